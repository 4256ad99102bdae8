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

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

import torch
from torch import nn

from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.log import log, logging_to_terminal
from lockstep.object_store.address import local_folder
from lockstep.parallel.activation_checkpoint import Mode
from lockstep.parallel.parallelize import SplitOptions
from lockstep.parallel.pipeline import evaluate_in_stages
from lockstep.parallel.plans import Patterns, TensorPlan
from lockstep.record.progress import progress_interval_s
from lockstep.record.tracker import Tracker
from lockstep.runtime.environment import read_rank_info
from lockstep.runtime.numerics import make_deterministic
from lockstep.runtime.variables import REPLAY
from lockstep.runtime.worker_env import read_worker_env
from lockstep.training import function_values, model_options, session_checks, sharding
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.evaluation import Samples, gather_over, in_eval_mode, mean_over
from lockstep.training.leaves import Leaves
from lockstep.training.loader import Collate, KeyedBatches, Loader
from lockstep.training.model_options import Precision, PreparedModel
from lockstep.training.replica_group import ReplicaGroup, ReplicaOptions
from lockstep.training.sample_order import make_order
from lockstep.training.saved_state import PerMicroBatch, SavedState
from lockstep.training.session_parts import Declared, RunValues
from lockstep.training.started_run import StartedRun

if TYPE_CHECKING:
    from lockstep.training.initial_values import InitialValues
    from lockstep.training.rollback import Rollback

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
    track          metric backends that follow metrics.jsonl: "tensorboard", "wandb",
                   "wandb:offline", "MODULE:CLASS" (docs/loop.md). `lockstep run --track NAME` adds
                   others
    progress       seconds between two lines of rank 0 on the screen; False: none
    on_divergence  loss or gradient not finite: "stop"; "rollback" or lockstep.Rollback(...): on a
                   spike too, retry the step without the guilty micro-batches (docs/divergence.md)
    on_save_error  a checkpoint that cannot be written: "continue", with a warning, or "stop"
    runtime        that has joined the workers already; None: the Session joins them
    values         further values of the run, which decide what a resume compares (RunValues)
    mfu            True: count the floating-point operations of the first micro-batch, and show
                   the model FLOPs utilization; or their number, for each sample, or token that
                   `backward` counts
    shard, tensor, pipeline  sizes of the axes of the layout (docs/parallelism.md): workers that
                   hold one copy of the model together. `lockstep run --layout.shard` and the
                   variable LOCKSTEP_LAYOUT_SHARD replace `shard`, and so for the other axes
    options        of ReplicaOptions: help(lockstep.ReplicaGroup) explains them

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
        on_divergence: Literal["stop", "rollback"] | Rollback = "stop",
        on_save_error: Literal["continue", "stop"] = "continue",
        runtime: ElasticRuntime | None = None,
        values: RunValues | None = None,
        mfu: float | bool = False,
        shard: int = 1,
        tensor: int = 1,
        pipeline: int = 1,
        **options: Unpack[ReplicaOptions],
    ) -> None:
        session_checks.refuse_wrong_options(Session, micro_batches, on_save_error, options)
        self._replay = None
        if REPLAY in os.environ:
            from lockstep.history.request import Replay

            self._replay = Replay(**json.loads(os.environ[REPLAY]))
        self.out = Path(self._replay.folder) if self._replay else local_folder(out)
        self._declared = Declared(
            out=self.out,
            micro_batches=micro_batches,
            save_every=save_every,
            keep=keep,
            seed=seed,
            resume=resume,
            backends=session_checks.choose_backends(track),
            progress_s=progress_interval_s(progress),
            rollback=session_checks.rollback_of(on_divergence, micro_batches, options),
            on_save_error=on_save_error,
            mfu=session_checks.parse_mfu(mfu),
            profiled=session_checks.profiled_steps(),
            options=options,
            run=values,
            function=function_values.NO_VALUES if values else function_values.running(),
            leaves=Leaves(micro_batches),
        )
        if self._replay:
            self._declared = replace(self._declared, save_every=0, resume="auto", backends=())
        self.threads = threads
        if runtime:
            self.runtime = runtime
        self.layout = Layout(1, shard, tensor, pipeline)  # of a replica
        self.step = 0
        self._total: int | None = None  # of the newest call of `steps`
        self._run: StartedRun | None = None
        self._micro_batch: int | None = None  # that the loop is in
        self._exit = ExitStack()

    def __enter__(self) -> Session:
        worker_env = read_worker_env(os.environ)
        # The values of a run file have taken the variables into account.
        environ = {} if self._declared.run else os.environ
        session_checks.refuse_ineffective_variables(environ)
        session_checks.refuse_second_session(self.out, self._open, bool(self._entered), worker_env)
        self.layout = sharding.choose_replica_layout(
            self.layout, self._declared.micro_batches, worker_env, environ
        )
        with ExitStack() as stack:
            if self._declared.progress_s != math.inf:
                rank_info = read_rank_info(os.environ)
                stack.enter_context(logging_to_terminal(rank_info.rank if rank_info else 0))
            if "runtime" not in vars(self):
                limits = ElasticLimits(replica_size=self.layout.workers_per_replica)
                self.runtime = stack.enter_context(
                    ElasticRuntime.join(threads=self.threads, limits=limits)
                )
            if self.runtime.is_static:
                sharding.refuse_incomplete_replicas(self.world.size, self.layout)
                session_checks.refuse_different_folders(
                    all_gather_json(self.runtime, str(self.out))
                )
            else:
                sharding.refuse_other_replicas(self.runtime.replica_size, self.layout)
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
        if kind is None and self._run:
            self._run.warn_if_left(self.step)
        self._open.remove(self.out)
        self._exit.__exit__(kind, error, trace)
        sharding.refuse_use_of_slices(error)

    def __getattr__(self, name: str) -> Any:
        run = self.__dict__.get("_run")
        if run and name in ("replicas", "checkpointer", "tracker"):
            return getattr(run, name)
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
        init: InitialValues | None = None,
        prefetch_units: int = 1,
        reshard_after_forward: bool = True,
        pipeline_chunks: int = 1,
    ) -> Any:
        """Return (the model to call in the loop, *optimizers); without optimizers only the model.

        Moves the model to world.device. Checkpoints hold the model and the optimizers. The returned
        model behaves like DistributedDataParallel: `model.module` is the model that was passed.

        init          computes the values of a model on the meta device (training/initial_values.py)
        units         in shards: names of the modules to gather one by one, "layers.*"; () for none.
                      None: repeated blocks (parallel/own_model.py)
        tensor_plan   with tensor: styles of layers by patterns of names (parallel/plans.py);
                      "auto" for the plan of a Hugging Face model
        split_points  in a pipeline: the first blocks of its later stages; (): similar bytes
        prefetch_units, reshard_after_forward, pipeline_chunks  see parallel/parallelize.py
        precision     "bf16": forward passes run in torch.autocast and return float32; "auto": where
                      the device has bf16 units; "fp32". None: the loop may use torch.autocast
        compile       compile each of the units, or repeated blocks, in place
        activation_checkpoint  what these keep for their backward pass: "none" (all activations),
                      "selective" (matrix products), "full" (their inputs). The same bits
        """
        self._refuse_after_start("prepare")
        self._declared.refuse_second_model()
        session_checks.refuse_unprepared(model, optimizers, init)
        device = self.world.device
        if self.layout.workers_per_replica == 1:
            model = model_options.move_model(model, device, init)
        model_options.prepare_blocks(
            model,
            units,
            compile=compile,
            activation_checkpoint=activation_checkpoint,
            counted=self._declared.options.get("buffers") or {},
        )
        chosen = model_options.resolve_precision(precision, device)
        splits = SplitOptions(
            units, tensor_plan, split_points, prefetch_units, reshard_after_forward, pipeline_chunks
        )
        prepared = PreparedModel(model, self._replicas_in_loop, device, chosen)
        self._declared = replace(
            self._declared,
            model=prepared,
            optimizers=optimizers,
            splits=splits,
            init=init,
            bits={"precision": chosen or "of the loop", "compile": str(compile)},
        )
        return (prepared, *optimizers) if optimizers else prepared

    def state(self, **objects: Any) -> SavedState:
        """Add to the checkpoints, by name; return all of them as attributes of one object.

            saved = session.state(scheduler=scheduler, ema=ema, best=0.0, patience=3)
            saved.best = max(saved.best, score)

        An object has state_dict and load_state_dict. A plain value is a number, text, bool, None, a
        tensor, an array, or a list, tuple, dict or deque of them, equal on all workers; assign new
        ones to the attribute. A resume and a join restore both.
        """
        self._refuse_after_start("state")
        self._declared.add_state(objects)
        return self._declared.saved

    def per_micro_batch(self, initial: torch.Tensor) -> PerMicroBatch:
        """Return a tensor for each micro-batch, for session.state: what micro-batch k assigns to
        its `value` in one step, it finds there in the next, on whichever worker. Moved to the
        device.

            saved = session.state(hidden=session.per_micro_batch(torch.zeros(8, 64)))
            for k in session.micro_batches(step):
                output, hidden = model(inputs(step, k), saved.hidden.value)
                session.backward(loss_fn(output, target(step, k)))
                saved.hidden.value = hidden
        """
        self._refuse_after_start("per_micro_batch")
        carried = PerMicroBatch(
            initial.to(self.world.device), self._declared.micro_batches, lambda: self._micro_batch
        )
        self._declared.carried.append(carried)
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

        dataset      has __len__ and __getitem__; or it makes its micro-batches itself: it has
                     micro_batch(step, k) and `order`, as one of lockstep.UniformOrder, and
                     none of the arguments below is given. samples(step, k) returns the numbers
                     of its samples, one for each row, if they are not those of `order`
        batch_size   samples of a step, over all workers; a multiple of micro_batches
        tokens       instead of batch_size: limit of a micro-batch's samples times the longest of
                     them. Its samples have similar lengths; give `count` to `backward`
        lengths      with `tokens`: the number of tokens of each sample
        num_workers  processes of each training worker that prefetch

        A resumed run is refused when the number of samples or one of these sizes differs. Other
        content of the same length is not detected.
        """
        declared = self._declared
        order, fact = make_order(
            dataset, batch_size, tokens, lengths, declared.micro_batches, declared.seed
        )
        loader = Loader(
            KeyedBatches(dataset, order, collate_fn),
            self.runtime,
            self.micro_batches,
            lambda: self._run_in_loop("loader(step)").leaves.own_leaves,
            num_workers,
        )
        self._exit.callback(loader.close)
        declared.loaders.append((loader, fact))
        return loader

    def learners(
        self, *inner: torch.optim.Optimizer, count: int, steps: int
    ) -> Callable[[int], Iterator[int]]:
        """Return the learners of DiLoCo (docs/slow-links.md): `for inner_step in learners(step)`
        yields the steps of this worker's learners, one learner after the other. Each starts at the
        common weights, and their mean change is the gradient of `outer.step()`.

            learners = session.learners(inner, count=4, steps=50)
            for step in session.steps(1000):    # 0, 50, 100, ...
                for inner_step in learners(step):
                    for x, y in loader(inner_step):
                        session.backward(loss_fn(model(x), y))
                    inner.step()
                outer.step()

        inner  optimizers of the learners' steps; those of `prepare` take the outer step
        count  learners, which share the micro-batches of each step
        steps  of each learner in an outer step
        """
        from lockstep.training import learner_checks
        from lockstep.training.learners import Learners

        self._refuse_after_start("learners")
        declared = self._declared
        learner_checks.refuse_wrong_learners(declared, self.layout, inner, count, steps)
        learners = Learners(inner, declared, count, steps)
        self._declared = replace(declared, leaves=learners)
        return learners

    # The loop.

    def steps(self, total: int) -> Iterator[int]:
        """Collective. Yield the step numbers from the resumed one to `total` - 1; with learners
        those of the outer steps.

        `total` counts those of the whole run: an epoch loop takes steps((epoch + 1) * per_epoch).
        Saves when due and after the last step. After SIGTERM, SIGINT or SIGUSR1 the workers agree
        to stop, save, and raise Stopped: a SystemExit with code 75 or 130.
        """
        session_checks.refuse_ended("runtime" in vars(self), is_open=self.out in self._open)
        declared = self._declared
        declared.leaves.refuse_total(total)
        session_checks.refuse_finished(self._total, total, self.step)
        self._total = total
        if self._run is None:
            self._run = StartedRun(declared, self.runtime, self.layout, total, self._exit)
            self.step = self._run.checkpointer.saved_step
            if self._replay:
                from lockstep.history.observer import Observer  # only replays need it

                self._run.replicas.runner.observe(Observer(self._replay, self._run))
        run = self._run
        run.set_total(total)
        if why := run.why_no_step(self.step):
            log.info(why)
            run.set_total(self.step)
        unsaved = declared.watch_unsaved(self.runtime)
        while self.step < run.total:
            run.begin_step(self.step)
            declared.seed_generators(self.step, BEFORE_STEP, self.world.device)
            yield self.step
            self.step += run.replicas.commit_steps
            is_last = run.end_step(self.step)
            if observer := run.replicas.runner.observer:
                observer.end_step(self.step)
            if unsaved:
                unsaved.look(saves=is_last or run.checkpointer.due(self.step))
            run.save_if_due(self.step, is_last=is_last)
            if run.stopped:
                run.checkpointer.close()
                if self.step < run.total and run.replicas.runner.rehearsal:
                    run.leaves.begin(self.step)
                    declared.seed_generators(self.step, BEFORE_STEP, self.world.device)
                    yield self.step  # its micro-batch 0 is what a resume is compared with
                raise run.stopped

    def stop(self) -> None:
        """End `steps` with a save and without an error, on all workers, when one of them asks to.

        The next vote carries the request: inside the micro-batch loop the current step is the last
        one; after that loop, the next step.
        """
        self._run_in_loop("session.stop()").replicas.runner.ballot.request_stop()

    def micro_batches(self, step: int) -> Iterator[int]:
        """Collective. Yield the numbers of this worker's micro-batches: for data without a loader.

        One loop per step.
        """
        leaves = self._run_in_loop("session.micro_batches(step), loader(step)").leaves
        try:
            for micro_batch in leaves.micro_batches_of(step):
                self._micro_batch = micro_batch
                yield micro_batch
        finally:
            self._micro_batch = None

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
        count   number of samples or tokens of the micro-batch, an integer. `loss` is then their
                sum, and the step's gradient is the sum of all losses divided by the sum of all
                counts. Give it for every micro-batch of a step, or for none
        scaler  scales the gradient; `loss` is unscaled, and so is the recorded loss
        """
        run = self._run_in_loop("session.backward(loss)")
        if self.layout.pipeline > 1 and not self._declared.is_staged:
            raise UsageError(
                "in a pipeline only the last stage has a loss",
                f"session.backward, layout {self.layout}",
                "call session.forward_backward(x, y, loss_fn) for each micro-batch",
            )
        model: Any = self._declared.model
        model.warn_if_bypassed()
        run.leaves.backward(run.leaves.share(loss, count), count, scaler)

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
        model: Any = self._declared.model
        run = self._run_in_loop("session.forward_backward(x, y, loss)")
        if self.layout.pipeline > 1:
            loss_of = model_options.outside_of_autocast(loss, self.world.device, model.precision)
            with model_options.autocast(self.world.device, model.precision):
                result = run.forward(
                    inputs,
                    target,
                    lambda output, target: run.leaves.share(loss_of(output, target), count),
                )
        else:
            result = run.leaves.share(loss(model(inputs), target), count)
        with torch.autocast(self.world.device.type, enabled=False):
            run.leaves.backward(result, count)

    def _run_in_loop(self, call: str) -> StartedRun:
        """Return the started run. UsageError: the user has made this call before the loop."""
        if self._run is None:
            raise UsageError(
                f"{call.partition('(')[0]} outside of the loop",
                call,
                "call it in `for step in session.steps(...)`",
            )
        return self._run

    @property
    def loss(self) -> float:
        """The mean loss of the newest step, also after a resume; the same bits on all workers."""
        if not self._run or (self.step == 0 and self._run.replicas.last_step < 0):
            raise UsageError(
                "there is no loss yet",
                "session.loss before the end of the first micro-batch loop",
                "read it after the loop",
            )
        return self._run.replicas.loss

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the step's gradient, or that of a learner's step, to a norm of at most `max_norm`;
        return the norm before. Call it between the micro-batches and optimizer.step()."""
        return self._run_in_loop("session.clip_grad_norm_(max_norm)").leaves.clip_(max_norm)

    def log(self, step: int, /, **values: Any) -> None:
        """Add numbers to this step's line in metrics.jsonl, which rank 0 writes.

        The line is numbered by committed steps: step + 1. It has loss, seconds and workers anyway.
        The screen shows these numbers, too.
        """
        self._declared.leaves.refuse_inside("session.log")
        if step != self.step or self._micro_batch is not None:
            raise UsageError(
                f"session.log of step={step}",
                f"the loop has step={self.step}",
                "call it in the body of that step, after the micro-batch loop: inside, it would "
                "record one micro-batch of rank 0",
            )
        run = self._run_in_loop("session.log(step, ...)")
        run.record.log(values, lambda: self.loss)

    def print(self, *values: object) -> None:
        """Print a line on rank 0, also after a failure, above the bar of the progress. The report
        has the newest lines in the loop, as of the last save: samples of a model, for example."""
        line = " ".join(map(str, values))
        if not self.runtime.is_leader():
            return
        if self._run:
            self._run.record.display.print_line(line, always=True)
            self._run.record.printed.add(self.step + 1, line)
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
        with self._evaluating(
            "session.evaluate(function, dataset)", dataset, batch_size, collate_fn
        ) as samples:
            return mean_over(self.runtime, samples, function)

    def gather(
        self,
        function: Callable[[Any], Any],
        dataset: Any,
        *,
        batch_size: int = 64,
        collate_fn: Collate | None = None,
    ) -> Any:
        """Collective. Return function(batch) of the whole `dataset`, in its order, on all workers:
        for scores that are no mean over samples, such as F1, BLEU or AUC.

            labels, predicted = session.gather(
                lambda batch: (batch[1], model(batch[0]).argmax(1)), test
            )

        function returns a tensor, an array or a list with one row for each sample, or a tuple or
        dict of them. Tensors come back on the CPU. Shared and evaluated as by `evaluate`.
        """
        with self._evaluating(
            "session.gather(function, dataset)", dataset, batch_size, collate_fn
        ) as samples:
            return gather_over(self.runtime, samples, function)

    @contextmanager
    def _evaluating(
        self, where: str, dataset: Any, batch_size: int, collate_fn: Collate | None
    ) -> Iterator[Samples]:
        """Context manager around an evaluation: modules in eval mode. The loop continues as
        without it."""
        if self._run and self._run.stopped:
            raise self._run.stopped
        self._declared.leaves.refuse_inside(where)
        replica_size = self.layout.workers_per_replica if self._run else 1
        declared = self._declared
        with ExitStack() as stack:
            if self._run:
                self._run.watch.check_collectives(self.step, self.world.size)
                stack.enter_context(self._run.checkpointer.attributes.unsaved_changes())
                stack.enter_context(self._run.record.evaluating())
            stack.enter_context(in_eval_mode(declared.model, *declared.state.values()))
            yield Samples(dataset, where, batch_size, collate_fn, declared.seed, replica_size)
        if self._run:
            self._run.watch.expect_no_collectives()
        declared.seed_generators(self.step, AFTER_EVALUATION, self.world.device)

    def _replicas_in_loop(self) -> Callable[..., Any] | None:
        if self._run is None:
            return None
        in_loop = self._micro_batch is not None
        if self.layout.pipeline > 1:
            if self._declared.is_staged:
                return self._run.replicas
            return partial(evaluate_in_stages, self._run.replicas.local_model, in_loop=in_loop)
        return self._run.forward if in_loop and torch.is_grad_enabled() else None

    def _refuse_after_start(self, what: str) -> None:
        if self._run:
            raise UsageError(
                f"session.{what} after session.steps",
                "the run has resumed already",
                f"call session.{what} before the loop",
            )
