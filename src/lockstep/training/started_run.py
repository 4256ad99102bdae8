"""The parts of a Session from its first step on: they resume, train, record and save together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.checkpoint.fingerprints import BEST_STEP
from lockstep.checkpoint.state_dict import all_names
from lockstep.elastic.consensus import STOP_REQUEST
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.log import log
from lockstep.parallel.parallelize import LocalModel
from lockstep.record.events import append_event
from lockstep.record.progress import ProgressDisplay
from lockstep.record.tracker import BackgroundTracker, Tracker
from lockstep.runtime.signals import Stopped, StopSignals
from lockstep.training import sharding
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup
from lockstep.training.scores import Position, ScoredRun
from lockstep.training.session_parts import Declared, SessionValues
from lockstep.training.step_record import StepRecord, account_facts, resume_account
from lockstep.training.update_checks import StepWatch, refuse_uneven_skips

if TYPE_CHECKING:
    from lockstep.training.model_flops import ModelFlops
    from lockstep.training.profiler import Profiler


@dataclass(frozen=True)
class StepEnd:
    """How a step has ended.

    why      the loop ends without an error after it; "": it does not
    stopped  the error that ends the loop after a stop signal
    """

    is_last: bool
    why: str
    stopped: Stopped | None


@dataclass(frozen=True)
class ResumedState:
    """The model with its newest state.

    shown  values of the run for trackers
    """

    model: nn.Module | LocalModel
    checkpointer: Checkpointer
    first_step: int
    shown: Mapping[str, Any]


def resume_state(
    values: SessionValues, declared: Declared, runtime: ElasticRuntime, layout: Layout, total: int
) -> ResumedState:
    """Collective. Shard the model where a replica is several workers; load the checkpoint that
    `resume` names, or compute the initial values."""
    facts = declared.facts(values)
    options = declared.shown_options(values, layout, total)
    saved: dict[str, Any] = {"tensor": layout.tensor} if layout.tensor > 1 else {}
    shown: dict[str, Any] = facts | options
    if values.run:
        shown = values.run.shown()
        saved |= values.run.saved()
        saved["fingerprints"] = facts | saved["fingerprints"]
        facts |= values.run.shared()
    check = None
    if values.function:
        saved |= values.function.saved()
        check = partial(values.function.overridden, values.out, values.keep)
    model = split_model(values, declared, runtime, layout, facts | options)
    init = declared.init
    checkpointer = Checkpointer(
        values.out / "checkpoints",
        runtime,
        model,
        declared.optimizers,
        state=declared.state,
        every_steps=values.save_every,
        keep=values.keep,
        on_error=values.on_save_error,
        saved=init.is_saved if init else all_names,
    )
    first_step = checkpointer.resume(values.resume, facts, saved, options=options, overridden=check)
    if values.run:
        values.run.check(checkpointer.facts, first_step)
    else:
        sharding.warn_of_other_bits(checkpointer.facts, layout)
    if init and not checkpointer.loaded:
        from lockstep.training.initial_values import draw_initial_values

        with runtime.preparing("drawing the initial weights"):
            draw_initial_values(model, init, runtime)
    if init:
        init.release()
    if values.function and not checkpointer.loaded:
        values.function.refuse_new_run()
    changed = check(checkpointer.facts, first_step) if check else {}
    if changed and checkpointer.runtime.world.leader:
        append_event(values.out, "override", step=first_step, values=changed)
        log.info("from step %d on: %s", first_step + 1, changed)
    resume_account(runtime, checkpointer.facts, first_step, values.out)
    return ResumedState(model, checkpointer, first_step, shown)


def split_model(
    values: SessionValues,
    declared: Declared,
    runtime: ElasticRuntime,
    layout: Layout,
    facts: Mapping[str, str],
) -> nn.Module | LocalModel:
    """Collective. Return the model, or this worker's part of it."""
    module = declared.refuse_incomplete().module
    learners = declared.learners
    if learners:
        from lockstep.training import learner_checks

        learner_checks.refuse_incomplete(learners, declared, module, runtime, layout)
    if layout.workers_per_replica == 1:
        return module
    inner = learners.inner.optimizers if learners else ()
    return sharding.shard_session(
        runtime,
        module,
        [*declared.optimizers, *inner],
        layout,
        facts,
        declared.state,
        splits=replace(declared.splits, verify=values.options.get("rehearse", True)),
        init=declared.init,
        unused=values.options.get("unused", "raise"),
    )


def replica_options(
    values: SessionValues, declared: Declared, checkpointer: Checkpointer
) -> dict[str, Any]:
    """Return arguments of the ReplicaGroup: those of the Session, and of its learners."""
    chosen: dict[str, Any] = {
        "micro_batches": values.micro_batches,
        "seed": values.seed,
        "carried": declared.carried,
        **values.options,
    }
    if values.rollback:
        from lockstep.training.rollback import SkippedMicroBatches

        chosen["rollback"] = SkippedMicroBatches(
            values.rollback, values.micro_batches, checkpointer, declared
        )
    if declared.learners:
        from lockstep.training import learner_checks

        chosen |= learner_checks.replica_options(declared.learners)
    return chosen


def make_flops(
    values: SessionValues, declared: Declared, layout: Layout, device: torch.device
) -> ModelFlops | None:
    """Return what counts the operations of the model; None: they are not asked for."""
    if not values.mfu:
        return None
    from lockstep.training.model_flops import ModelFlops, refuse_counting

    model = declared.refuse_incomplete()
    refuse_counting(values.mfu, layout, model.module)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    dtype = dtypes.get(model.precision or "")
    return ModelFlops(values.mfu, values.micro_batches, model.module, device, dtype)


def open_profiler(
    values: SessionValues, runtime: ElasticRuntime
) -> AbstractContextManager[Profiler | None]:
    """Context manager that profiles the steps of `lockstep run --profile`."""
    if values.profiled is None:
        return nullcontext()
    from lockstep.training.profiler import Profiler

    return Profiler(values.profiled, values.out, runtime)


class StartedRun:
    """Collective. Resume, and open what the loop needs for `total` steps.

    exits  leaves the contexts that are entered here, with the Session
    """

    def __init__(
        self,
        values: SessionValues,
        declared: Declared,
        runtime: ElasticRuntime,
        layout: Layout,
        total: int,
        exits: ExitStack,
    ) -> None:
        enter = exits.enter_context
        self.declared = declared
        self.runtime = runtime
        self.total = total
        flops = make_flops(values, declared, layout, runtime.world.device)
        state = resume_state(values, declared, runtime, layout, total)
        self.checkpointer = state.checkpointer
        self.first_step = state.first_step
        signals = enter(StopSignals())
        first, leads = self.first_step, runtime.is_leader
        self.tracker = Tracker(
            values.out, leader=leads, from_step=first, run=state.shown, track=values.backends
        )
        metrics = enter(BackgroundTracker(enter(self.tracker)))
        shows = runtime.shows_progress
        display = ProgressDisplay(total, first, shows, every_s=values.progress_s)
        enter(display)
        enter(self.checkpointer)
        self.replicas = enter(
            ReplicaGroup(
                runtime,
                state.model,
                self.checkpointer,
                signals=signals,
                tracker=metrics,
                **replica_options(values, declared, self.checkpointer),
            )
        )
        self.record = StepRecord(
            self.replicas,
            [loader for loader, _ in declared.loaders],
            metrics,
            display,
            flops,
            enter(open_profiler(values, runtime)),
        )
        position = enter(Position(self.replicas, declared.optimizers))
        self.scores = ScoredRun(values.out, declared.state.values(), runtime, position)
        self.scores.follow_state()
        self.checkpointer.add_to_saves(self._facts, self.scores.kept_steps)
        self.watch = StepWatch(self.replicas, declared.optimizers)
        if declared.learners:
            declared.learners.start(self)

    def set_total(self, total: int) -> None:
        """Set the number of the last step."""
        self.total = total
        self.record.display.set_total(total)

    def begin_step(self, step: int) -> None:
        self.scores.loop.begin(step)
        self.watch.begin()
        if self.declared.learners:
            self.declared.learners.begin(step)

    def _facts(self, step: int) -> dict[str, Any]:
        """Return what each checkpoint of a Session holds beside its state."""
        best = self.scores.best_steps(step)
        facts = {"loss": self.replicas.loss, **account_facts(self.runtime.ledger)}
        return facts | ({BEST_STEP: best[0]} if best else {})

    def micro_batches(self, step: int, stopped: Stopped | None) -> Iterator[int]:
        """Yield this worker's micro-batches of `step`; of a run that has stopped the one that a
        resume compares, and then raise."""
        yield from (self.replicas.runner.leave_witness if stopped else self.replicas.micro_batches)(
            step
        )
        if stopped:
            raise stopped
        self.watch.end_micro_batches(step)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model's forward pass in a micro-batch."""
        with self.record.counting_forward():
            return self.replicas(*inputs, **named)

    def backward(
        self, loss: torch.Tensor, count: int | None, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        """Run the backward pass of a micro-batch. loss: its share of the step's loss."""
        samples = self.declared.samples_of_mean() if count is None else None
        if self.declared.learners:
            self.declared.learners.backward(loss, count, scaler, samples)
            return
        if self.replicas.runner.rollback:
            self.replicas.runner.rollback.refuse_scaler(scaler)
        if self.replicas.replica.workers_per_replica > 1:
            on_nonfinite = self.replicas.on_nonfinite
            refuse_uneven_skips(scaler, on_nonfinite, self.declared.state)
        known = [] if samples is None else [samples]
        with self.record.counting_backward(count):
            self.replicas.backward(loss, count, scaler=scaler, samples=known)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradient of the step, or of the learner's step that the loop is in."""
        if self.declared.learners and self.declared.learners.now:
            return self.declared.learners.clip_(max_norm)
        return self.replicas.updates.gradient.clip_(max_norm)

    def own_leaves(self) -> Sequence[int]:
        """Return the micro-batches of this worker: of the learner that the loop is in."""
        learners = self.declared.learners
        return learners.own_leaves() if learners else self.replicas.replica.own_leaves

    def end_step(self, step: int) -> StepEnd:
        """Record the step that the loop has trained, the number `step` of those committed."""
        begun = step - self.replicas.commit_steps
        if self.replicas.last_step != begun:
            loops, form = "micro-batches", "for batch in loader(step)"
            if self.declared.learners:
                loops, form = "learners", "for inner_step in learners(step)"
            what = f"the body of step {begun} ran no {loops}"
            hint = f"take all of them, `{form}`, in every step"
            raise UsageError(what, "for step in session.steps(...)", hint)
        self.watch.end(begun, self.runtime.world.size)
        stop = self.replicas.decision.stop
        why = self.scores.end(step) or "session.stop()" * (stop == STOP_REQUEST)
        if self.replicas.decision.save_failed:
            why = "a checkpoint could not be saved"
        is_last = bool(stop or why) or step >= self.total
        self.record.end(step, is_last=is_last)
        return StepEnd(is_last, why, Stopped(stop) if stop and not why else None)

    def save_if_due(self, step: int, *, is_last: bool) -> None:
        """Collective. Save the state and the loss after the last step, the best one, or a step at
        which a save is due."""
        is_best = self.scores.is_best(step)
        if not (is_last or is_best or self.checkpointer.due(step)):
            return
        # The metrics are on disk first, so that no checkpoint is ahead of them.
        first = self.record.tracker.sync
        with self.record.timer.timing("saving"), self.runtime.during("saving"):
            self.checkpointer.save(step, first=first, waits=is_last or is_best)
        self.record.printed.write(self.tracker.folder)

    def why_no_step(self, step: int) -> str:
        """Return why the run trains no step after `step`; "" if it does."""
        if step >= self.total:
            return f"the run is finished: step {step} of {self.total}"
        if step and (why := self.scores.why()):
            return f"the run has stopped early, {why}; a higher patience continues it"
        return ""

    def warn_if_left(self, step: int) -> None:
        """Warn when the loop was left before its last step."""
        if step < self.total:
            committed = max(step, self.replicas.last_step + self.replicas.commit_steps)
            log.warning(
                "the loop was left after %d of %d steps, and those since the newest checkpoint are "
                "not saved: session.stop() saves",
                committed,
                self.total,
            )
