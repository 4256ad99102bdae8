"""transformers' Trainer on a Session: the same bits on any number of workers, through failures.

    class ExactTrainer(SessionLoop, Trainer): ...

`train` is a Session's loop. The model, the loss, the collator, the optimizer, the schedule, the
logs and the callbacks are the Trainer's, or those of TRL's SFTTrainer (docs/frameworks.md).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer, TrainerState
from transformers.trainer_utils import TrainOutput, align_special_tokens

from lockstep import Session, UsageError
from lockstep.frameworks.saved_trainer import SavedTrainer
from lockstep.frameworks.supported import refuse_unsupported


class SessionLoop(Trainer):
    """The first base class of a Trainer whose `train` is a Session's loop.

    gradient_accumulation_steps    micro-batches of a step, over all workers
    save_steps, save_total_limit   of the Session's checkpoints, in output_dir/checkpoints
    compute_loss                   of a micro-batch: called again when a step is retried

    The same command resumes. Metrics: `lockstep run --track NAME`.
    """

    model: Any
    eval_dataset: Any
    optimizer: Any
    lr_scheduler: Any
    __saved: SavedTrainer
    session: Any = None  # while `train` runs
    logged_step = 0

    def train(self, resume_from_checkpoint: Any = None) -> TrainOutput:  # type: ignore[override]
        """Train from the newest checkpoint of the run to the last step."""
        args = self.args
        refuse_unsupported(self, SessionLoop, resume_from_checkpoint)
        micro_batches = args.gradient_accumulation_steps
        rows = micro_batches * args.per_device_train_batch_size
        dataset: Any = self.train_dataset
        self.per_epoch = Fraction(len(dataset), rows)  # floats would miss the end of some epochs
        total = args.max_steps
        epochs = total / self.per_epoch
        if total <= 0:
            epochs = Fraction(str(args.num_train_epochs))
            total = math.ceil(epochs * self.per_epoch)
        args._n_gpu = 1  # else it multiplies the loss by the GPUs of the host
        self.is_in_train = True
        is_tokenizer = isinstance(self.processing_class, PreTrainedTokenizerBase | ProcessorMixin)
        if is_tokenizer and hasattr(self.model, "config"):
            align_special_tokens(self.model, self.processing_class)  # type: ignore[no-untyped-call]
        self.current_gradient_accumulation_steps = 1  # the Session divides
        self.create_optimizer_and_scheduler(total)
        self.state = TrainerState(max_steps=total, num_train_epochs=math.ceil(epochs))
        self.state.compute_steps(args, total)  # type: ignore[no-untyped-call]
        if dist.is_initialized():
            dist.destroy_process_group()  # accelerate's, of the one worker of a replay
        self.session = Session(
            str(args.output_dir),
            micro_batches=micro_batches,
            save_every=self.state.save_steps if args.save_strategy == "steps" else 0,
            keep=args.save_total_limit or 0,
            seed=args.seed,
        )
        with self.session as session:
            self.__prepare()
            loader = session.loader(
                dataset,
                batch_size=rows,
                collate_fn=self._get_collator_with_removed_columns(self.data_collator),
                num_workers=args.dataloader_num_workers,
            )
            for step in session.steps(total):
                self.__begin(step)
                for inputs in loader(step):
                    self.__backward(inputs)
                self.__update(step)
            self.__set_step(session.step)
            self.__notify("on_train_end")
            result = TrainOutput(session.step, session.loss, {})
        self.session = None
        self.is_in_train = False
        return result

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the mean loss over `eval_dataset`; while `train` runs, computed in shares."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if self.session is None or isinstance(dataset, dict):  # of a dict it evaluates each
            return super().evaluate(dataset, ignore_keys, metric_key_prefix)
        loss = self.session.evaluate(
            lambda inputs: self.__loss(self.model, inputs)[0],
            self.eval_dataset[dataset] if isinstance(dataset, str) else dataset,
            batch_size=self.args.per_device_eval_batch_size,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator),
        )
        metrics = {f"{metric_key_prefix}_loss": float(loss)}
        self.__log(metrics)
        self.__notify("on_evaluate", metrics)
        return metrics

    def __prepare(self) -> None:
        """Give the Session what it trains and saves."""
        args = self.args
        self.model_wrapped, self.optimizer = self.session.prepare(
            self.model,
            self.optimizer,
            precision="bf16" if args.bf16 else "fp32",
            compile=args.torch_compile,
            activation_checkpoint="full" if args.activation_checkpointing else "none",
        )
        # compute_loss decides by the class of the model, and this knows only torch's wrappers.
        unwrap = self.accelerator.unwrap_model
        vars(self.accelerator)["unwrap_model"] = lambda model, *words, **named: unwrap(
            self.model if model is self.model_wrapped else model, *words, **named
        )
        scheduler = self.lr_scheduler
        vars(self.callback_handler).update(optimizer=self.optimizer, lr_scheduler=scheduler)
        self.__set_step(0)
        # Callbacks may make here what checkpoints hold, or take the time. What the state of a
        # checkpoint or of the others has replaces it.
        for event in ("on_train_begin", "on_epoch_begin", "on_step_begin"):
            self.__notify(event)
        self.__saved = SavedTrainer(self)
        self.session.state(
            scheduler=scheduler, trainer=self.__saved, **self.__saved.stateful_parts()
        )

    def __begin(self, step: int) -> None:
        """Notify the callbacks of the beginning of a step, and of an epoch."""
        self.__set_step(step)
        # __prepare has notified of step 0; in a join the other workers have done so of the step.
        if vars(self.state).get("begun", 0) != step:
            vars(self.state).update(begun=step)
            if step % self.per_epoch < 1:
                self.__notify("on_epoch_begin")
            self.__notify("on_step_begin")
        self.model.train()

    def __backward(self, inputs: dict[str, Any]) -> None:
        """Run the passes of a micro-batch. A loss per token weighs all tokens of the step alike."""
        loss, count = self.__loss(self.model_wrapped, inputs)
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)  # None: the Trainer decides
        if count is not None and is_scaled is not False:
            self.session.backward(loss * count, count=int(count))
            return
        if is_scaled or (is_scaled is None and self.compute_loss_func):
            loss = loss * self.args.gradient_accumulation_steps  # the Trainer adds such losses
        self.session.backward(loss)

    def __loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Return the loss, and the number of labels; None where it is no mean over labels."""
        count = self._get_num_items_in_batch([inputs], self.session.world.device)
        words: Any = {}
        if count is not None:
            words["num_items_in_batch"] = torch.as_tensor(count).clamp(min=1)
        with self.compute_loss_context_manager():
            return self.compute_loss(model, inputs, **words), count

    def __update(self, step: int) -> None:
        """Update the weights, and report them."""
        limit = self.args.max_grad_norm
        metrics = {
            "loss": self.session.loss,
            "grad_norm": float(self.session.clip_grad_norm_(limit if limit > 0 else math.inf)),
            "learning_rate": self._get_learning_rate(),
        }
        self.__notify("on_pre_optimizer_step")
        self.optimizer.step()
        self.__notify("on_optimizer_step")
        self.lr_scheduler.step()
        self.__set_step(step + 1)
        self.__notify("on_step_end")
        self.__report(metrics)
        if (step + 1) % self.per_epoch < 1:
            self.__notify("on_epoch_end")
            self.__report(metrics)
        if self.control.should_training_stop and step + 1 < self.state.max_steps:
            self.session.stop()

    def __report(self, metrics: dict[str, float]) -> None:
        """Log and evaluate when the callbacks ask for it."""
        state = self.state
        if self.control.should_log and state.global_step > self.logged_step:
            self.logged_step = state.global_step
            self.__log(metrics)
        if self.control.should_evaluate:
            self._determine_best_metric(self.evaluate(), None)
        saves = self.args.save_strategy == "steps" and state.global_step % state.save_steps == 0
        is_saved = saves or state.global_step == state.max_steps
        control = self.control
        if control.should_epoch_stop or (control.should_save and not is_saved):
            raise UsageError(
                f"should_epoch_stop={control.should_epoch_stop}, should_save={control.should_save} "
                "have no effect on a Session",
                f"a callback of {type(self).__name__}, step {state.global_step}",
                "save by save_steps, and end the training by should_training_stop",
            )

    def __set_step(self, step: int) -> None:
        is_leader = self.session.runtime.is_leader()
        number = int(not is_leader)  # of the process, for save_model, should_log and callbacks
        vars(self.args.distributed_state).update(process_index=number, local_process_index=number)
        vars(self.state).update(
            global_step=step,
            epoch=float(step / self.per_epoch),
            is_world_process_zero=is_leader,
            is_local_process_zero=is_leader,
        )

    def __log(self, metrics: dict[str, float]) -> None:
        self.session.log(self.session.step, **metrics)
        state = self.state
        self.__saved.logged.append(metrics | {"epoch": state.epoch, "step": state.global_step})
        self.log(dict(metrics))  # a subclass adds those of this worker

    def __notify(self, event: str, *words: Any) -> None:
        notify = getattr(self.callback_handler, event)
        self.control = notify(self.args, self.state, self.control, *words)
