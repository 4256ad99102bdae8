"""transformers' Trainer on a Session: the same bits on any number of workers, through failures.

    class ExactTrainer(SessionLoop, Trainer): ...

`train` is a Session's loop. The model, the loss, the collator, the optimizer, the schedule, the
logs and the callbacks are the Trainer's, or those of TRL's SFTTrainer (docs/frameworks.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from fractions import Fraction
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SchedulerType, TrainOutput

from lockstep import Session, UsageError

# Arguments that the loop honors, or that do not change its result; all others are refused.
HONORED = """
    accelerator_config activation_checkpointing adam_beta1 adam_beta2 adam_epsilon
    average_tokens_across_devices bf16 dataloader_num_workers dataloader_pin_memory disable_tqdm
    do_eval do_train eval_delay eval_steps eval_strategy gradient_accumulation_steps
    gradient_checkpointing greater_is_better include_for_metrics label_names
    label_smoothing_factor learning_rate log_level log_level_replica logging_first_step
    logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
    metric_for_best_model num_train_epochs optim optim_args output_dir per_device_eval_batch_size
    per_device_train_batch_size remove_unused_columns report_to run_name save_steps save_strategy
    save_total_limit seed torch_compile torch_compile_backend use_cpu warmup_ratio warmup_steps
    weight_decay
"""
# Methods that the loop does not call.
REPLACED = """
    get_train_dataloader get_eval_dataloader _get_train_sampler _get_eval_sampler
    get_batch_samples training_step _prepare_inputs prediction_step evaluation_loop
"""
# Their modules, whose versions of these methods do no more than the loop does.
FRAMEWORK_MODULES = (
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    "trl.trainer.sft_trainer",
)


class SessionLoop(Trainer):
    """The first base class of a Trainer whose `train` is a Session's loop.

    gradient_accumulation_steps    micro-batches of a step, over all workers
    save_steps, save_total_limit   of the Session's checkpoints, in output_dir/checkpoints
    compute_loss                   of a micro-batch: called again when a step is retried

    The same command resumes. Metrics: `lockstep run --track NAME`.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    session: Session | None = None  # while `train` runs
    is_leader = True  # after it
    logged_step = 0

    def train(self, resume_from_checkpoint: Any = None, *_: Any, **__: Any) -> TrainOutput:
        """Train from the newest checkpoint of the run to the last step."""
        args = self.args
        self._refuse_unsupported(resume_from_checkpoint)
        micro_batches = args.gradient_accumulation_steps
        rows = micro_batches * args.per_device_train_batch_size
        dataset, collate = self._rows_of(self.train_dataset)
        self.per_epoch = Fraction(len(dataset), rows)  # floats would miss the end of some epochs
        total = args.max_steps
        if total <= 0:
            total = math.ceil(Fraction(str(args.num_train_epochs)) * self.per_epoch)
        args._n_gpu = 1  # else it multiplies the loss by the GPUs of the host
        self.current_gradient_accumulation_steps = 1  # the Session divides
        self.create_optimizer_and_scheduler(total)
        self.state = TrainerState(
            max_steps=total, num_train_epochs=math.ceil(args.num_train_epochs)
        )
        self.state.compute_steps(args, total)  # type: ignore[no-untyped-call]
        self.session = Session(
            str(args.output_dir),
            micro_batches=micro_batches,
            save_every=self.state.save_steps if args.save_strategy == "steps" else 0,
            keep=args.save_total_limit or 0,
            seed=args.seed,
        )
        with self.session as session:
            self.model_wrapped, self.optimizer = session.prepare(
                self.model,
                self.optimizer,
                precision="bf16" if args.bf16 else "fp32",
                compile=args.torch_compile,
                activation_checkpoint="full" if checkpoints_activations(args) else "none",
            )
            loader = session.loader(
                dataset,
                batch_size=rows,
                collate_fn=collate,
                num_workers=args.dataloader_num_workers,
            )
            session.state(scheduler=self.lr_scheduler, trainer=SavedTrainer(self))
            for step in self._steps(session, total):
                for inputs in loader(step):
                    self._backward(session, inputs)
                self._update(session, step)
            self._set_step(session.step)
            self.is_leader = session.runtime.is_leader()
            result = TrainOutput(session.step, session.loss, {})
        self.session = None
        return result

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the mean loss over `eval_dataset`; while `train` runs, computed in shares."""
        if self.session is None:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if eval_dataset is None:
            eval_dataset = self.eval_dataset
        if isinstance(eval_dataset, dict):
            metrics: dict[str, float] = {}
            for name, rows in eval_dataset.items():
                metrics |= self.evaluate(rows, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        dataset, collate = self._rows_of(eval_dataset)
        loss = self.session.evaluate(
            lambda inputs: self._loss(self.model, inputs),
            dataset,
            batch_size=self.args.per_device_eval_batch_size,
            collate_fn=collate,
        )
        metrics = {f"{metric_key_prefix}_loss": float(loss)}
        self._log(metrics)
        self._notify("on_evaluate", metrics)
        return metrics

    def is_world_process_zero(self) -> bool:
        return self.session.runtime.is_leader() if self.session else self.is_leader

    def save_model(self, *words: Any, **named: Any) -> None:
        """Save the model, on the leader."""
        if self.is_world_process_zero():
            super().save_model(*words, **named)

    def _steps(self, session: Session, total: int) -> Iterator[int]:
        """Yield the numbers of the steps; notify the callbacks of the beginning and the end."""
        scheduler = self.lr_scheduler
        vars(self.callback_handler).update(optimizer=self.optimizer, lr_scheduler=scheduler)
        self._notify("on_train_begin")
        for step in session.steps(total):
            self._set_step(step)
            if step % self.per_epoch < 1:
                self._notify("on_epoch_begin")
            self._notify("on_step_begin")
            self.model.train()
            yield step
            if self.control.should_training_stop and step + 1 < total:
                session.stop()
        self._notify("on_train_end")

    def _backward(self, session: Session, inputs: dict[str, Any]) -> None:
        """Run the passes of a micro-batch. A loss per token weighs all tokens of the step alike."""
        count = self._get_num_items_in_batch([inputs], session.world.device)
        if count is None:
            session.backward(self._loss(self.model_wrapped, inputs))
            return
        divisor = torch.as_tensor(count).clamp(min=1)
        loss = self._loss(self.model_wrapped, inputs, num_items_in_batch=divisor)
        session.backward(loss * count, count=int(count))

    def _loss(self, model: Any, inputs: dict[str, Any], **named: Any) -> torch.Tensor:
        loss: Any = self.compute_loss(model, inputs, **named)
        return loss  # type: ignore[no-any-return]

    def _update(self, session: Session, step: int) -> None:
        """Update the weights, and report them."""
        metrics = {"loss": session.loss, "learning_rate": self._get_learning_rate()}
        if self.args.max_grad_norm:
            metrics["grad_norm"] = float(session.clip_grad_norm_(self.args.max_grad_norm))
        self._notify("on_pre_optimizer_step")
        self.optimizer.step()
        self._notify("on_optimizer_step")
        self.lr_scheduler.step()
        self._set_step(step + 1)
        self._notify("on_step_end")
        self._report(metrics)
        if (step + 1) % self.per_epoch < 1:
            self._notify("on_epoch_end")
            self._report(metrics)

    def _report(self, metrics: dict[str, float]) -> None:
        """Log and evaluate when the callbacks ask for it."""
        if self.control.should_log and self.state.global_step > self.logged_step:
            self.logged_step = self.state.global_step
            self._log(metrics)
        if self.control.should_evaluate:
            self._determine_best_metric(self.evaluate(), None)

    def _set_step(self, step: int) -> None:
        vars(self.state).update(
            global_step=step,
            epoch=float(step / self.per_epoch),
            is_world_process_zero=self.is_world_process_zero(),
            is_local_process_zero=self.is_world_process_zero(),
        )

    def _log(self, metrics: dict[str, float]) -> None:
        assert self.session
        self.session.log(self.session.step, **metrics)
        self.log(dict(metrics))  # a subclass adds those of this worker

    def _notify(self, event: str, *words: Any) -> None:
        notify = getattr(self.callback_handler, event)
        self.control = notify(self.args, self.state, self.control, *words)

    def _rows_of(self, dataset: Any) -> tuple[Any, Any]:
        """Return the data set without the columns that the model does not take, and a collator."""
        if hasattr(dataset, "column_names"):
            return self._remove_unused_columns(dataset), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator)

    def _refuse_unsupported(self, resume_from_checkpoint: object) -> None:
        """UsageError for what the loop would leave out without an error."""
        args = self.args
        refused = []
        for field in fields(TrainingArguments):
            value = getattr(args, field.name)
            is_given = (value or None) != (field.default or None)
            if is_given and field.name not in HONORED.split():
                refused.append(f"{field.name}={value!r}")
        for name in REPLACED.split():
            method = getattr(type(self), name)
            if method.__module__ not in FRAMEWORK_MODULES:
                refused.append(f"{type(self).__name__}.{name}")
        refused += [
            name
            for name in ("compute_metrics", "preprocess_logits_for_metrics", "model_init")
            if getattr(self, name) is not None
        ]
        if args.save_strategy not in ("steps", "no"):
            refused.append(f"save_strategy={args.save_strategy}")
        if args.report_to:
            refused.append(f"report_to={args.report_to}")
        if args.torch_compile_backend not in (None, "inductor"):  # set by torch_compile=True
            refused.append(f"torch_compile_backend={args.torch_compile_backend}")
        is_by_metric = args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
        if is_by_metric or isinstance(self.lr_scheduler, ReduceLROnPlateau):
            refused.append("ReduceLROnPlateau")
        if isinstance(self.train_dataset, IterableDataset):
            refused.append("an IterableDataset")
        if self.accelerator.num_processes > 1:
            refused.append("workers of another launcher than lockstep run and lockstep launch")
        if resume_from_checkpoint is not None:
            refused.append(f"resume_from_checkpoint={resume_from_checkpoint!r}")
        if refused:
            raise UsageError(
                f"SessionLoop does not support {', '.join(refused)}",
                type(self).__name__,
                "leave it out, or train without SessionLoop: a failure then restarts all workers",
            )


class SavedTrainer:
    """The state of a Trainer beside its model and optimizer, for session.state."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, str]:
        state = self.trainer.state
        best = {"best_metric": state.best_metric, "best_global_step": state.best_global_step}
        callbacks = [callback.state() for callback in self._callbacks()]
        return {"state": json.dumps([best, callbacks])}

    def load_state_dict(self, saved: dict[str, str]) -> None:
        best, callbacks = json.loads(saved["state"])
        vars(self.trainer.state).update(best)
        for callback, state in zip(self._callbacks(), callbacks, strict=True):
            vars(callback).update(state["attributes"])

    def _callbacks(self) -> list[ExportableState]:
        callbacks = self.trainer.callback_handler.callbacks
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]


def checkpoints_activations(args: TrainingArguments) -> bool:
    return any(getattr(args, f"{name}_checkpointing", False) for name in ("gradient", "activation"))
