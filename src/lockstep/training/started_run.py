"""The parts of a Session from its first step on: they resume, train, record and save together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
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
from lockstep.training.session_parts import Declared
from lockstep.training.step_record import StepRecord, account_facts, resume_account
from lockstep.training.update_checks import StepWatch

if TYPE_CHECKING:
    from lockstep.training.model_flops import ModelFlops
    from lockstep.training.profiler import Profiler


def resume_state(
    declared: Declared, runtime: ElasticRuntime, layout: Layout, total: int
) -> tuple[nn.Module | LocalModel, Checkpointer]:
    """Collective. Shard the model where a replica is several workers; load the checkpoint that
    `resume` names, or compute the initial values. Return what is trained, and what has loaded
    it."""
    facts = declared.facts()
    options = declared.shown_options(layout, total)
    saved: dict[str, Any] = {"tensor": layout.tensor} if layout.tensor > 1 else {}
    if declared.run:
        saved |= declared.run.saved()
        saved["fingerprints"] = facts | saved["fingerprints"]
        facts |= declared.run.shared()
    saved |= declared.function.saved()
    check = partial(declared.function.overridden, declared.out, declared.keep)
    model = split_model(declared, runtime, layout, facts | options)
    init = declared.init
    checkpointer = Checkpointer(
        declared.out / "checkpoints",
        runtime,
        model,
        declared.optimizers,
        state=declared.state,
        every_steps=declared.save_every,
        keep=declared.keep,
        on_error=declared.on_save_error,
        saved=init.is_saved if init else all_names,
    )
    first_step = checkpointer.resume(
        declared.resume, facts, saved, options=options, overridden=check
    )
    if declared.run:
        declared.run.check(checkpointer.facts, first_step)
    else:
        sharding.warn_of_other_bits(checkpointer.facts, layout)
    if not checkpointer.loaded:
        declared.function.refuse_new_run()
        if init:
            from lockstep.training.initial_values import draw_initial_values

            with runtime.preparing("drawing the initial weights"):
                draw_initial_values(model, init, runtime)
    if init:
        init.release()
    changed = check(checkpointer.facts, first_step)
    if changed and runtime.world.leader:
        append_event(declared.out, "override", step=first_step, values=changed)
        log.info("from step %d on: %s", first_step + 1, changed)
    resume_account(runtime, checkpointer.facts, first_step, declared.out)
    return model, checkpointer


def split_model(
    declared: Declared,
    runtime: ElasticRuntime,
    layout: Layout,
    facts: Mapping[str, str],
) -> nn.Module | LocalModel:
    """Collective. Return the model, or this worker's part of it."""
    module = declared.refuse_incomplete().module
    declared.leaves.refuse_incomplete(declared, runtime.world.size, layout)
    if layout.workers_per_replica == 1:
        return module
    return sharding.shard_session(
        runtime,
        module,
        [*declared.optimizers, *declared.leaves.optimizers],
        layout,
        facts,
        declared.state,
        splits=replace(declared.splits, verify=declared.options.get("rehearse", True)),
        init=declared.init,
        unused=declared.options.get("unused", "raise"),
    )


def replica_options(declared: Declared, checkpointer: Checkpointer) -> dict[str, Any]:
    """Return arguments of the ReplicaGroup: those of the Session, and of its leaves."""
    chosen: dict[str, Any] = {
        "micro_batches": declared.micro_batches,
        "seed": declared.seed,
        "carried": declared.carried,
        "leaves": declared.leaves,
        **declared.options,
    }
    if declared.rollback:
        from lockstep.training.rollback import SkippedMicroBatches

        chosen["rollback"] = SkippedMicroBatches(
            declared.rollback, declared.micro_batches, checkpointer, declared
        )
    chosen |= declared.leaves.options
    return chosen


def make_flops(declared: Declared, layout: Layout, device: torch.device) -> ModelFlops | None:
    """Return what counts the operations of the model; None: they are not asked for."""
    if not declared.mfu:
        return None
    from lockstep.training.model_flops import ModelFlops, refuse_counting

    model = declared.refuse_incomplete()
    refuse_counting(declared.mfu, layout, model.module)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    dtype = dtypes.get(model.precision or "")
    return ModelFlops(declared.mfu, declared.micro_batches, model.module, device, dtype)


def open_profiler(
    declared: Declared, runtime: ElasticRuntime
) -> AbstractContextManager[Profiler | None]:
    """Context manager that profiles the steps of `lockstep run --profile`."""
    if declared.profiled is None:
        return nullcontext()
    from lockstep.training.profiler import Profiler

    return Profiler(declared.profiled, declared.out, runtime)


class StartedRun:
    """Collective. Resume, and open what the loop needs for `total` steps.

    exits  leaves the contexts that are entered here, with the Session
    """

    def __init__(
        self,
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
        self.stopped: Stopped | None = None  # by a signal; raised in the next micro-batch loop
        flops = make_flops(declared, layout, runtime.world.device)
        model, self.checkpointer = resume_state(declared, runtime, layout, total)
        first = self.checkpointer.saved_step
        signals = enter(StopSignals())
        self.tracker = Tracker(
            declared.out,
            leader=runtime.is_leader,
            from_step=first,
            run=declared.shown(layout, total),
            track=declared.backends,
        )
        metrics = enter(BackgroundTracker(enter(self.tracker)))
        display = ProgressDisplay(total, first, runtime.shows_progress, every_s=declared.progress_s)
        enter(display)
        enter(self.checkpointer)
        self.replicas = enter(
            ReplicaGroup(
                runtime,
                model,
                self.checkpointer,
                signals=signals,
                tracker=metrics,
                **replica_options(declared, self.checkpointer),
            )
        )
        self.record = StepRecord(
            self.replicas,
            [loader for loader, _ in declared.loaders],
            metrics,
            display,
            flops,
            enter(open_profiler(declared, runtime)),
        )
        position = enter(Position(self.replicas, declared.optimizers))
        self.scores = ScoredRun(declared.out, declared.state.values(), runtime, position)
        self.scores.follow_state()
        self.checkpointer.add_to_saves(self._facts, self.scores.kept_steps)
        self.watch = StepWatch(self.replicas, declared.optimizers)
        self.leaves = declared.leaves
        self.leaves.start(self)

    def set_total(self, total: int) -> None:
        """Set the number of the last step."""
        self.total = total
        self.record.display.set_total(total)

    def begin_step(self, step: int) -> None:
        self.scores.loop.begin(step)
        self.watch.begin()
        self.leaves.begin(step)

    def _facts(self, step: int) -> dict[str, Any]:
        """Return what each checkpoint of a Session holds beside its state."""
        best = self.scores.best_steps(step)
        facts = {"loss": self.replicas.loss, **account_facts(self.runtime.ledger)}
        return facts | ({BEST_STEP: best[0]} if best else {})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model's forward pass in a micro-batch."""
        with self.record.counting_forward():
            return self.replicas(*inputs, **named)

    def end_step(self, step: int) -> bool:
        """Record the step that the loop has trained, the number `step` of those committed; return
        whether it is the last one."""
        begun = step - self.replicas.commit_steps
        if self.replicas.last_step != begun:
            loops, form = self.leaves.loop
            raise UsageError(
                f"the body of step {begun + 1} ran no {loops}",
                "for step in session.steps(...)",
                f"take all of them, `{form}`, in every step",
            )
        self.watch.end(begun, self.runtime.world.size)
        stop = self.replicas.decision.stop
        why = self.scores.end(step) or "session.stop()" * (stop == STOP_REQUEST)
        if self.replicas.decision.save_failed:
            why = "a checkpoint could not be saved"
        is_last = bool(stop or why) or step >= self.total
        self.record.end(step, is_last=is_last)
        if why:
            log.info("%s: step %d of %d is the last one", why, step, self.total)
            self.set_total(step)
        elif stop:
            log.info("%s: stopping after step %d of %d", stop, step, self.total)
            self.stopped = Stopped(stop)
        return is_last

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
            return (
                f"the run is finished: step {step} of {self.total} in {self.declared.out}; "
                "more steps continue it, another folder starts a new run"
            )
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
