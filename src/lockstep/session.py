"""Session: a PyTorch training loop on any number of workers, with the same bits, through failures.

    with lockstep.Session(out, micro_batches=8, save_every=50) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=64)
        for step in session.steps(200):
            for x, y in loader(step):
                session.backward(loss_fn(model(x), y))
            optimizer.step()

A Session composes ElasticRuntime, ReplicaGroup, Checkpointer and Tracker, which can also be used
without it (docs/loop.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Unpack

import torch
import torch.distributed as dist
from torch import nn

from lockstep.checkpoint.fingerprints import BEST_STEP
from lockstep.checkpoint.stateful import Stateful, refuse_unsupported_state
from lockstep.data.order import splitmix64
from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.consensus import STOP_REQUEST
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.log import log
from lockstep.object_store.address import local_folder
from lockstep.parallel.activation_checkpoint import Mode
from lockstep.parallel.deferred_init import move_to
from lockstep.parallel.parallelize import LocalModel
from lockstep.parallel.plans import Patterns
from lockstep.parallel.sequential import evaluate_in_stages
from lockstep.parallel.tensor_plan import TensorPlan
from lockstep.record.progress import ProgressDisplay
from lockstep.record.tracker import BackgroundTracker, Tracker
from lockstep.runtime.numerics import make_deterministic, seed_generators
from lockstep.runtime.signals import Stopped, StopSignals
from lockstep.runtime.torch_private import collectives_of
from lockstep.runtime.worker_env import read_worker_env
from lockstep.training import model_options, session_checks, sharding
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.evaluation import Samples, gather_over, in_eval_mode, mean_over
from lockstep.training.loader import Collate, Loader
from lockstep.training.model_options import Precision
from lockstep.training.prepared_model import PreparedModel
from lockstep.training.replica_group import ReplicaGroup
from lockstep.training.sample_order import make_order
from lockstep.training.saved_state import PerMicroBatch, SavedState
from lockstep.training.scores import ScoredRun
from lockstep.training.session_checks import ReplicaOptions
from lockstep.training.session_words import in_session_words
from lockstep.training.step_record import StepRecord
from lockstep.training.time_account import account_facts, resume_account
from lockstep.training.update_checks import scaler_watch

AFTER_EVALUATION, BEFORE_STEP = 1, 2  # separate the random numbers of these places


class Session:
    """One training run of this process, together with all other workers. A context manager.

    out            folder of the run: checkpoints/, metrics.jsonl, events.jsonl
    micro_batches  micro-batches of a step, over all workers; at least the number of workers
    save_every     steps between two checkpoints; 0: only after the last step and when the run is
                   stopped
    keep           number of newest checkpoints to keep; 0: all
    seed           of the order of the samples, and of the random numbers of samples and model
    resume         "auto" (the newest valid checkpoint, if there is one), "never", "required", or a
                   step as text
    threads        of torch in this process; their number changes bits
    track          metric backends that follow metrics.jsonl: "tensorboard", "wandb", "wandb:offline",
                   "MODULE:CLASS" (docs/loop.md). `lockstep run --track NAME` adds others
    progress       seconds between two lines of rank 0 on the screen; False: none
    shard, tensor, pipeline  sizes of the axes of the layout (docs/parallelism.md): workers that hold
                   one copy of the model together. `lockstep run --layout.shard` and the variable
                   LOCKSTEP_LAYOUT_SHARD replace `shard`, and so for the other axes
    options        keyword arguments for ReplicaGroup: reduce, wire, bucket_bytes, verify_every,
                   rehearse, on_nonfinite, buffers, unused, balance

    Attributes: `runtime` and `world` exist inside the `with` block; `replicas`, `checkpointer` and
    `tracker` exist once `steps` has yielded. `step` is the number of committed steps.
    """

    runtime: ElasticRuntime
    replicas: ReplicaGroup
    checkpointer: Checkpointer
    tracker: Tracker
    _open: ClassVar[list[Path]] = []  # folders of the open Sessions of this process
    _entered: ClassVar[list[Path]] = []  # folders of all Sessions that it has entered

    def __init__(  # independent options, all by keyword and with defaults
        self,
        out: str | os.PathLike[str],
        *,
        micro_batches: int,
        save_every: int = 0,
        keep: int = 3,
        seed: int = 0,
        resume: str = "auto",
        threads: int = 1,
        track: Sequence[str] = (),
        progress: float | bool = 10.0,
        shard: int = 1,
        tensor: int = 1,
        pipeline: int = 1,
        **options: Unpack[ReplicaOptions],
    ) -> None:
        session_checks.refuse_wrong_options(micro_batches, options)
        self.out, self.micro_batches_per_step, self.save_every, self.keep = (
            local_folder(out),
            micro_batches,
            save_every,
            keep,
        )
        self.seed, self.resume, self.threads, self.options = seed, resume, threads, options
        self._backends = session_checks.choose_backends(track)
        self.progress_s = session_checks.progress_interval_s(progress)
        self.layout = Layout(1, shard, tensor, pipeline)  # of a replica
        self.step, self.in_micro_batches = 0, False
        self.model: PreparedModel | None = None
        self._splits: dict[str, Any] = {}  # units and tensor_plan of `prepare`
        self._state: dict[str, Stateful] = {}
        self._saved = SavedState()  # what `state` returns
        self._carried: list[PerMicroBatch] = []
        self._micro_batch: int | None = None  # that the loop is in
        self._stopped: Stopped | None = None  # raised in the next micro-batch loop
        self._loaders: list[
            tuple[Loader, str]
        ] = []  # and what a resumed run must have in common with it
        self._total = 0
        self._collectives: int | None = (
            None  # of the group so far, at the end of the micro-batch loop
        )
        self._warned = False  # of collectives of the loop's own
        self._zero_rates = session_checks.ZeroRates()
        self._exit = ExitStack()

    def __enter__(self) -> Session:
        worker_env = read_worker_env(os.environ)
        session_checks.refuse_ineffective_variables(os.environ)
        session_checks.refuse_second_session(self.out, self._open, bool(self._entered), worker_env)
        self.layout = sharding.choose_replica_layout(
            self.layout, self.micro_batches_per_step, worker_env
        )
        with ExitStack() as stack:
            limits = ElasticLimits(replica_size=self.layout.workers_per_replica)
            self.runtime = stack.enter_context(
                ElasticRuntime.join(threads=self.threads, limits=limits)
            )
            if self.runtime.membership is None:
                sharding.refuse_incomplete_replicas(self.world.size, self.layout)
                session_checks.refuse_different_folders(
                    all_gather_json(self.runtime, str(self.out))
                )
            log.debug(make_deterministic(self.world.device))
            self._exit = stack.pop_all()
        self._open.append(self.out)
        self._entered.append(self.out)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Collective, without an error: wait for the last checkpoint, then leave the run."""
        if kind is None and self.step < self._total:
            committed = max(self.step, self.replicas.last_step + 1)
            what = "the loop was left after %d of %d steps, and those since the newest checkpoint are not saved: session.stop() saves"
            log.warning(what, committed, self._total)
        self._open.remove(self.out)
        self._exit.__exit__(kind, error, trace)
        if reworded := in_session_words(error):
            raise reworded.with_traceback(trace) from None

    def __getattr__(self, name: str) -> Any:
        session_checks.refuse_early_use(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def world(self) -> World:
        """Rank, size and device of this worker; a new value after a failure."""
        return self.runtime.world

    # Before the loop.

    def prepare(  # what decides how the model is split, by keyword
        self,
        model: nn.Module,
        *optimizers: torch.optim.Optimizer,
        units: Patterns = None,
        tensor_plan: TensorPlan = None,
        split_points: Sequence[str] = (),
        precision: Precision | None = None,
        compile: bool = False,
        activation_checkpoint: Mode = "none",
    ) -> Any:
        """Return (the model to call in the loop, *optimizers); without optimizers only the model.

        Moves the model to world.device. Checkpoints hold the model and the optimizers. The returned
        model behaves like DistributedDataParallel: `model.module` is the model that was passed.

        units         in shards: names of the modules to gather one by one, "layers.*"; () for none.
                      None: repeated blocks (parallel/own_model.py). `steps` shards the model
        tensor_plan   with tensor: styles of layers by patterns of names (parallel/tensor_plan.py),
                      {"layers.*.up": "colwise", "layers.*.down": "rowwise"}; "auto" for the plan of a
                      Hugging Face model
        split_points  in a pipeline: names of the first blocks of its later stages; (): similar bytes
        precision     "bf16": forward passes run in torch.autocast and return float32; "auto": where
                      the device has bf16 units; "fp32". None: the loop may use torch.autocast itself
        compile       compile each of the units, or repeated blocks, in place
        activation_checkpoint  what these keep for their backward pass: "none" (all activations),
                      "selective" (matrix products), "full" (their inputs). The same bits
        """
        self._refuse_after_start("prepare")
        if self.model is not None:
            raise UsageError(
                "a second session.prepare",
                "one Session trains one model",
                "put all trained modules into one nn.ModuleDict",
            )
        session_checks.refuse_unprepared(model, optimizers)
        device = self.world.device
        if self.layout.workers_per_replica == 1:
            model = move_to(model, device)
        model_options.prepare_blocks(
            model, units, compile=compile, activation_checkpoint=activation_checkpoint
        )
        chosen = model_options.resolve_precision(precision, device)
        self.model = PreparedModel(model, self._replicas_in_loop, device, chosen)
        self.optimizers = optimizers
        self._splits = {"units": units, "tensor_plan": tensor_plan, "split_points": split_points}
        self._bits = {"precision": chosen or "of the loop", "compile": str(compile)}
        return (self.model, *optimizers) if optimizers else self.model

    def state(self, **objects: Any) -> SavedState:
        """Add to the checkpoints, by name; return all of them as attributes of one object.

            saved = session.state(scheduler=scheduler, ema=ema, best=0.0, patience=3)
            saved.best = max(saved.best, score)

        An object has state_dict and load_state_dict. A plain value is a number, text, bool, None, a
        tensor, an array, or a list, tuple, dict or deque of them, equal on all workers; assign new
        ones to the attribute. A resume and a join restore both.
        """
        self._refuse_after_start("state")
        state = self._saved.add(objects)
        refuse_unsupported_state(state)
        self._state |= state
        return self._saved

    def per_micro_batch(self, initial: torch.Tensor) -> PerMicroBatch:
        """Return a tensor for each micro-batch, for session.state: what micro-batch k assigns to its
        `value` in one step, it finds there in the next, on whichever worker. Moved to the device.

            saved = session.state(hidden=session.per_micro_batch(torch.zeros(8, 64)))
            for k in session.micro_batches(step):
                output, hidden = model(inputs(step, k), saved.hidden.value)
                session.backward(loss_fn(output, target(step, k)))
                saved.hidden.value = hidden
        """
        self._refuse_after_start("per_micro_batch")
        carried = PerMicroBatch(
            initial.to(self.world.device), self.micro_batches_per_step, lambda: self._micro_batch
        )
        self._carried.append(carried)
        return carried

    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        tokens: int | None = None,
        lengths: Sequence[int] | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
    ) -> Loader:
        """Return a loader: `for batch in loader(step)` yields this worker's micro-batches, on its
        device. See training/loader.py.

        batch_size   samples of a step, over all workers; a multiple of micro_batches
        tokens       instead of batch_size: limit of a micro-batch's samples times the longest of
                     them. Its samples have similar lengths; give `count` to `backward`
        lengths      with `tokens`: the number of tokens of each sample
        num_workers  processes of each training worker that prefetch
        A resumed run is refused when the number of samples or one of these sizes differs. Other
        content of the same length is not detected.
        """
        order, fact = make_order(
            dataset, batch_size, tokens, lengths, self.micro_batches_per_step, self.seed
        )
        loader = Loader(
            dataset,
            order,
            self.runtime,
            self.micro_batches,
            lambda: self.replicas.replica.own_leaves,
            collate_fn,
            num_workers,
        )
        self._exit.callback(loader.close)
        self._loaders.append((loader, fact))
        return loader

    # The loop.

    def steps(self, total: int) -> Iterator[int]:
        """Collective. Yield the step numbers from the resumed one to `total` - 1.

        Saves when due and after the last step. After SIGTERM, SIGINT or SIGUSR1 the workers agree
        to stop, save, and raise Stopped: a SystemExit with code 75 or 130.
        """
        if not self._is_started:
            self._start(total)
        self._total = total
        if self.step >= total:
            log.info("the run is finished: step %d of %d", self.step, total)
        if self.step and (why := self._stopping.why()):
            log.info("the run has stopped early, %s; a higher patience continues it", why)
            self._total = self.step
            return
        unsaved = session_checks.watch_variables(
            self.runtime, (self.model, *self.optimizers, *self._state.values()), self._loaders
        )
        while self.step < total:
            step = self.step
            self._updates.start()
            self._seed(BEFORE_STEP)
            yield step
            if self.replicas.last_step != step:
                what, hint = (
                    f"the body of step {step} ran no micro-batches",
                    "take all of them, `for batch in loader(step)`, in every step",
                )
                raise UsageError(what, "for step in session.steps(...)", hint)
            self._warned = self._warned or session_checks.warn_of_collectives(
                self._collectives, step, self.world.size
            )
            self.step += 1
            self._updates.end(step)
            stop = self.replicas.decision.stop
            ends = self._stopping.end(self.step)
            is_last = bool(stop or ends) or self.step >= total
            self._record.end(self.step, is_last=is_last)
            unsaved.look(saves=is_last or self.checkpointer.due(self.step))
            self._save_if_due(last=is_last)
            if ends or stop == STOP_REQUEST:
                why = ends or "session.stop()"
                log.info("%s: step %d of %d is the last one", why, self.step, total)
                self._total = self.step
                return
            if stop:
                self.checkpointer.close()
                self._stopped = Stopped(stop)
                if self.step < total and self.replicas.rehearsal:
                    self._seed(BEFORE_STEP)
                    yield self.step  # its micro-batch 0 is what a resume is compared with; then the loop raises
                raise self._stopped

    def stop(self) -> None:
        """End `steps` with a save and without an error, on all workers, when one of them asks to.

        The next vote carries the request: inside the micro-batch loop the current step is the last
        one; after that loop, the next step.
        """
        if not self._is_started:
            raise UsageError(
                "session.stop outside of the loop",
                "session.stop()",
                "call it in `for step in session.steps(...)`",
            )
        self.replicas.request_stop()

    def micro_batches(self, step: int) -> Iterator[int]:
        """Collective. Yield the numbers of this worker's micro-batches: for data without a loader.

        One loop per step.
        """
        if not self._is_started or step != self.step:
            raise UsageError(
                f"the micro-batches of step {step}",
                f"the loop is at step {self.step}",
                "for step in session.steps(...)",
            )
        self.in_micro_batches = True
        try:
            run = self.replicas.leave_witness if self._stopped else self.replicas.micro_batches
            for micro_batch in run(step):
                self._micro_batch = micro_batch
                yield micro_batch
            if self._stopped:
                raise self._stopped
            self._collectives = collectives_of(dist.group.WORLD)
            self._zero_rates.record(self.optimizers, step)
        finally:
            self.in_micro_batches, self._micro_batch = False, None

    def backward(
        self,
        loss: torch.Tensor,
        *,
        count: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Run the backward pass of a micro-batch.

        loss    mean over the micro-batch; the step's gradient is the mean over its micro-batches.
                UsageError when these have different numbers of samples
        count   number of samples or tokens of the micro-batch, an integer. `loss` is then their sum,
                and the step's gradient is the sum of all losses divided by the sum of all counts.
                Give it for every micro-batch of a step, or for none
        scaler  scales the gradient; `loss` is unscaled, and so is the recorded loss
        """
        if not self._is_started:
            raise UsageError(
                "session.backward outside of the loop",
                "session.backward(loss)",
                "call it in `for batch in loader(step)`",
            )
        if self.layout.pipeline > 1:
            hint = "call session.forward_backward(x, y, loss_fn) for each micro-batch"
            raise UsageError(
                "in a pipeline only the last stage has a loss",
                f"session.backward, layout {self.layout}",
                hint,
            )
        self._backward(self._share(loss, count), count, scaler)

    def forward_backward(
        self,
        inputs: Any,
        target: Any,
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        count: int | None = None,
    ) -> None:
        """Run the passes of a micro-batch: `backward(loss(model(inputs), target), count=count)`. A
        pipeline needs this form, and runs the micro-batches together after the loop."""
        model: Any = self.model
        if self.layout.pipeline > 1:
            with model_options.autocast(self.world.device, model.precision):
                result = self.replicas(
                    inputs, target, lambda output, target: self._share(loss(output, target), count)
                )
        else:
            result = self._share(loss(model(inputs), target), count)
        with torch.autocast(self.world.device.type, enabled=False):
            self._backward(result, count)

    def _share(self, loss: torch.Tensor, count: int | None) -> torch.Tensor:
        return loss / self.micro_batches_per_step if count is None else loss

    def _backward(
        self, loss: torch.Tensor, count: int | None, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        if self.layout.workers_per_replica > 1:
            session_checks.refuse_uneven_skips(
                scaler, self.options.get("on_nonfinite", ""), self._state
            )
        sources: Any = (*(loader for loader, _ in self._loaders), self.model)
        samples = (source.samples_of_mean() for source in sources if count is None)
        self.replicas.backward(
            loss,
            count,
            scaler=scaler,
            samples=next((number for number in samples if number is not None), None),
        )

    @property
    def loss(self) -> float:
        """The mean loss of the newest step, also after a resume; the same bits on all workers."""
        if not self._is_started or (self.step == 0 and self.replicas.last_step < 0):
            raise UsageError(
                "there is no loss yet",
                "session.loss before the end of the first micro-batch loop",
                "read it after the loop",
            )
        return self.replicas.loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the step's gradient to a norm of at most `max_norm`; return the norm before. Call it
        between the micro-batches and optimizer.step()."""
        return self.replicas.gradient.clip_(max_norm)

    def log(self, step: int, /, **values: Any) -> None:
        """Add numbers to this step's line in metrics.jsonl, which rank 0 writes.

        The line is numbered by committed steps: step + 1. It has loss, seconds and workers anyway.
        The screen shows these numbers, too.
        """
        if step != self.step:
            raise UsageError(
                f"session.log of step {step}",
                f"the loop is at step {self.step}",
                "call it in the body of that step",
            )
        self._record.log(session_checks.numbers_to_log(values, lambda: self.loss))

    def print(self, *values: object) -> None:
        """Print a line on rank 0, also after a failure, above the bar of the progress."""
        if self.runtime.is_leader():
            line = " ".join(map(str, values))
            if "_record" in self.__dict__:
                self._record.display.print_line(line)
            else:
                print(line, flush=True)

    def evaluate(
        self,
        function: Callable[[Any], float | torch.Tensor | Mapping[str, Any]],
        dataset: Any,
        *,
        batch_size: int = 64,
        collate_fn: Collate | None = None,
    ) -> Any:
        """Collective. Return the mean over `dataset` of function(batch): a number or a dict of
        numbers, each the mean over the batch's samples.

        Each worker computes its share, without gradients, with the model and the modules in
        `session.state` (an EMA) in eval mode. The same bits come out on any number of workers.
        """
        samples = self._samples(
            dataset, "session.evaluate(function, dataset)", batch_size, collate_fn
        )
        with self._evaluating():
            return mean_over(self.runtime, samples, function)

    def gather(
        self,
        function: Callable[[Any], Any],
        dataset: Any,
        *,
        batch_size: int = 64,
        collate_fn: Collate | None = None,
    ) -> Any:
        """Collective. Return function(batch) of the whole `dataset`, in its order, on all workers: for
        scores that are no mean over samples, such as F1, BLEU or AUC.

            labels, predicted = session.gather(lambda batch: (batch[1], model(batch[0]).argmax(1)), test)

        function returns a tensor, an array or a list with one row for each sample, or a tuple or dict of
        them. Tensors come back on the CPU. Shared and evaluated as by `evaluate`.
        """
        samples = self._samples(
            dataset, "session.gather(function, dataset)", batch_size, collate_fn
        )
        with self._evaluating():
            return gather_over(self.runtime, samples, function)

    def _samples(
        self, dataset: Any, where: str, batch_size: int, collate_fn: Collate | None
    ) -> Samples:
        size = self.replicas.replica.workers_per_replica if self._is_started else 1
        return Samples(dataset, where, batch_size, collate_fn, self.seed, size)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Context manager around an evaluation: modules in eval mode. The loop continues as without it."""
        if self._stopped:
            raise self._stopped
        with ExitStack() as stack:
            if self._is_started:
                stack.enter_context(self.checkpointer.attributes.unsaved_changes())
                stack.enter_context(self._record.timing("overhead"))
            stack.enter_context(in_eval_mode(self.model, *self._state.values()))
            yield
        self._seed(AFTER_EVALUATION)
        self._collectives = None

    @property
    def _is_started(self) -> bool:
        return "replicas" in self.__dict__

    def _seed(self, place: int) -> None:
        """Seed the generators, equal on all workers, also on one that has resumed or joined."""
        seed_generators(
            splitmix64(self.seed, self.step, self.micro_batches_per_step, place) >> 1,
            self.world.device,
        )

    def _start(self, total: int) -> None:
        """Collective. Resume, and open what the loop needs for `total` steps."""
        if self.model is None:
            raise UsageError(
                "session.steps without a model",
                "session.steps(...)",
                "call session.prepare(model, optimizer) before",
            )
        if any(
            all(carried is not value for value in self._state.values()) for carried in self._carried
        ):
            hint = "saved = session.state(hidden=session.per_micro_batch(...)), then saved.hidden.value"
            raise UsageError(
                "session.state has not received a per_micro_batch", "session.steps(...)", hint
            )
        module, runtime, enter = self.model.module, self.runtime, self._exit.enter_context
        facts = {
            "micro_batches": str(self.micro_batches_per_step),
            "seed": str(self.seed),
            "wire": self.options.get("wire", "fp32"),
            **self._bits,
        }
        facts |= {f"loader {i}": fact for i, (_, fact) in enumerate(self._loaders)}
        axes = {f"--layout.{axis}": getattr(self.layout, axis) for axis in sharding.SESSION_AXES}
        values = {
            "steps": total,
            "save_every": self.save_every,
            **axes,
            **self._splits,
            **self.options,
        }
        options = {name: str(value) for name, value in values.items()}
        model: nn.Module | LocalModel = module
        if self.layout.workers_per_replica > 1:
            how = self._splits | {
                "verify": self.options.get("rehearse", True),
                "unused": self.options.get("unused", "raise"),
            }
            model = sharding.shard_session(
                runtime, module, self.optimizers, self.layout, facts | options, self._state, **how
            )
        checkpointer = Checkpointer(
            self.out / "checkpoints",
            runtime,
            model,
            self.optimizers,
            state=self._state,
            every_steps=self.save_every,
            keep=self.keep,
        )
        saved = {"tensor": self.layout.tensor} if self.layout.tensor > 1 else {}
        self.step = checkpointer.resume(self.resume, facts, saved, options=options)
        session_checks.warn_of_other_bits(checkpointer.facts, self.layout)
        resume_account(runtime, checkpointer.facts, self.step, self.out)
        signals = enter(StopSignals())
        tracker = enter(
            Tracker(
                self.out,
                leader=runtime.is_leader,
                from_step=self.step,
                run=facts | options,
                **self._backends,
            )
        )
        metrics = enter(BackgroundTracker(tracker))
        display = ProgressDisplay(total, self.step, runtime.shows_progress, every_s=self.progress_s)
        enter(display)
        enter(checkpointer)
        group: Any = {
            "micro_batches": self.micro_batches_per_step,
            "seed": self.seed,
            "signals": signals,
            "tracker": metrics,
        }
        group["carried"] = self._carried
        self.replicas = enter(ReplicaGroup(runtime, model, checkpointer, **group, **self.options))
        enter(scaler_watch(self.optimizers, lambda: self.replicas.scaler))
        self.checkpointer, self.tracker = checkpointer, tracker
        loaders = [loader for loader, _ in self._loaders]
        self._record = StepRecord(self.replicas, loaders, metrics, display)
        self._stopping = ScoredRun(self.out, self._state.values(), runtime.is_leader)
        self._updates = session_checks.UpdateWatch(self.replicas, self.optimizers)

    def _replicas_in_loop(self) -> Callable[..., Any] | None:
        if self.layout.pipeline > 1 and self._is_started:
            return partial(
                evaluate_in_stages, self.replicas.local_model, in_loop=self.in_micro_batches
            )
        return self.replicas if self.in_micro_batches and torch.is_grad_enabled() else None

    def _save_if_due(self, *, last: bool) -> None:
        """Collective. Save the state and the loss after the last step, or when a save is due."""
        best = self._stopping.best_steps()
        is_best = self.step in best
        if last or is_best or self.checkpointer.due(self.step):
            facts = {"loss": self.loss, **account_facts(self.runtime.ledger)}
            facts |= {BEST_STEP: best[0]} if best else {}
            # The metrics are on disk first, so that no checkpoint is ahead of them.
            first = self._record.tracker.sync
            with self._record.timing("saving"), self.runtime.during("saving"):
                self.checkpointer.save(
                    self.step, facts, first=first, protect=lambda: best, waits=last or is_best
                )

    def _refuse_after_start(self, what: str) -> None:
        if self._is_started:
            raise UsageError(
                f"session.{what} after session.steps",
                "the run has resumed already",
                f"call session.{what} before the loop",
            )
