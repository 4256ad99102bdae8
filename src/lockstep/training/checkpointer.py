"""The checkpoints of a run. Each process has a Checkpointer; collective methods run on all of them.

Replicas are bitwise equal, so only the first one writes: rank 0, or each of its workers its slices
(`shards`). Rank 0 decides which step is resumed.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from lockstep.checkpoint import state_dict, stateful
from lockstep.checkpoint.async_save import AsyncSaver, do_nothing
from lockstep.checkpoint.fingerprints import (
    fingerprint_changes,
    make_run_id,
    read_run_id,
    refuse_other_run,
    tolerated_changes,
)
from lockstep.checkpoint.store import Checkpoint, CheckpointStore
from lockstep.elastic.collectives import assert_equal_on_all_ranks, run_on_rank0
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import Progress, transfer_roles
from lockstep.errors import CheckpointError, SaveFailedError, UsageError
from lockstep.layout import REPLICA_AXES, Layout
from lockstep.parallel.parallelize import LocalModel
from lockstep.record.events import append_event
from lockstep.runtime import numerics, sources
from lockstep.runtime.worker_env import start_words
from lockstep.training import trained_parameters
from lockstep.training.loading import load_checkpoint
from lockstep.training.state_transfer import transfer_state
from lockstep.training.trained_state import Optimizers, TrainedState
from lockstep.training.witness import WitnessFile
from lockstep.units import join_names

log = logging.getLogger("lockstep")
SAVE_TIMEOUT_S = 5.0  # how long a save that may be skipped waits for the previous one


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of Checkpointer.save, and the generations in which this worker started that save,
    or did not since the replicas were not found identical."""

    step: int
    facts: dict[str, Any]
    first: Callable[[], None]
    started_in: int = -1
    undecided_in: int = -1


class Checkpointer(TrainedState):
    """Saves and resumes `model` and `optimizer` (one, or a sequence of them) under `folder`.

    state        other objects that change during training, by name: {"scheduler": scheduler}. Each
                 has state_dict and load_state_dict. They are saved, resumed and sent to a joiner,
                 as are the parameter groups of the optimizers (lr, ...). With a LocalModel: None,
                 or objects equal on all workers, without tensors except in its averages
    every_steps  committed steps between two checkpoints; 0: only when `save` is called
    keep         number of newest checkpoints to keep; 0: all
    on_error     "continue": a failed save is a warning, and the next one is tried; "stop": it ends
                 the run
    saved        filter on the names of parameters and buffers; the others are equal on every
                 process from the start
    """

    def __init__(  # independent options, most by keyword and with defaults
        self,
        folder: Path,
        runtime: ElasticRuntime,
        model: nn.Module | LocalModel,
        optimizer: Optimizers,
        *,
        state: Mapping[str, stateful.Stateful] | None = None,
        every_steps: int = 0,
        keep: int = 3,
        on_error: Literal["continue", "stop"] = "continue",
        saved: Callable[[str], bool] = state_dict.all_names,
    ) -> None:
        super().__init__(runtime, model, optimizer, state, saved)
        self.every_steps = every_steps
        self.on_error = on_error
        self.store = CheckpointStore(folder, keep=keep)
        if runtime.membership.has_own_folder:
            self._refuse_unpublished()
        self.saver: AsyncSaver | None = None  # on processes that write
        self.facts: dict[str, Any] = {}  # of the checkpoint that was resumed
        self.run_facts: dict[str, Any] = {}  # written to each checkpoint
        self.differences: list[str] = []  # between this start and the run that was resumed
        # Step of the newest checkpoint that was saved, resumed or asked for; 0: none.
        self.saved_step = 0
        # The last save on any process, until the state changes.
        self._request: SaveRequest | None = None
        self._failure: Exception | None = None
        self._skipped = False  # the last save that was due
        self._replicas_identical: Callable[[int], bool] | None = None
        self._more_facts: Callable[[int], dict[str, Any]] = lambda step: {}
        self._protect: Callable[[], Collection[int]] = tuple
        runtime.register(self)

    def compare_before_saving(self, replicas_identical: Callable[[int], bool]) -> None:
        """Set the collective comparison of the replicas: a save waits while it returns False."""
        self._replicas_identical = replicas_identical

    def _refuse_unpublished(self) -> None:
        """UsageError for checkpoints that hosts without a shared disk could not publish."""
        published = self.runtime.member.folder / "checkpoints"
        if self.store.folder.resolve() != published:
            raise UsageError(
                f"checkpoints in {self.store.folder} "
                "would stay on this host, and the hosts share no disk",
                "Checkpointer(folder, ...)",
                f"give {published}, which is published to the store",
            )

    def add_to_saves(
        self, facts: Callable[[int], dict[str, Any]], protect: Callable[[], Collection[int]]
    ) -> None:
        """Add `facts(step)` to every save from now on, and keep the steps of `protect()`."""
        self._more_facts = facts
        self._protect = protect

    # -- resuming ----------------------------------------------------------------------------------

    def resume(
        self,
        how: str = "auto",
        fingerprints: Mapping[str, str] | None = None,
        facts: Mapping[str, Any] | None = None,
        options: Mapping[str, str] | None = None,
        overridden: Callable[[Mapping[str, Any], int], Collection[str]] | None = None,
    ) -> int:
        """Collective. Load the checkpoint that `how` names; return the number of committed steps, 0
        for a new run.

        When other workers train already, this worker joins them and receives their state.

        how           "auto", "never", "required", or a step: then newer checkpoints and the metrics
                      after that step are set aside
        fingerprints  must be equal on all workers; a worker that differs is refused
        facts         written to each checkpoint, see checkpoint/fingerprints.py; by default only
                      the fingerprints
        options       must be equal on all workers, but may change at a resume
        overridden    names of the values that the user changed on purpose since a checkpoint, given
                      its facts and step: what they change in the optimizers holds

        CheckpointError when it is required and missing, damaged, or of another run. With "auto" a
        damaged newest checkpoint is set aside and the one before is used.
        """
        equal, run_folder = {**(fingerprints or {}), **(options or {})}, self.store.folder.parent
        runtime = self.runtime
        constructed = trained_parameters.constructed_options(self.trained)
        self.run_facts = {
            "fingerprints": dict(fingerprints or {}),
            "numerics": numerics.fingerprint(runtime.world.device),
            "code": sources.fingerprint(),
            "flags": {"--arguments": shlex.join(sys.argv[1:])}
            if runtime.is_static
            else runtime.membership.flags,
            **(facts or {}),
            "constructed": trained_parameters.options_as_text(constructed),
        }
        if runtime.is_joining and (step := self._join(equal)) is not None:
            # Only now: the other workers may just have created it.
            self.run_facts["run_id"] = read_run_id(run_folder)
            return step
        assert_equal_on_all_ranks(runtime, runtime.fingerprint(equal))
        runtime.set_fingerprint(equal)
        checkpoint = load_checkpoint(runtime, self.store, how, self.local_model)
        saved_id = str(checkpoint.facts.get("run_id") or "") if checkpoint else ""
        self.run_facts["run_id"] = run_on_rank0(runtime, lambda: make_run_id(run_folder, saved_id))
        if checkpoint:
            self._refuse_other_run(checkpoint)
            self.facts, self.saved_step = checkpoint.facts, checkpoint.step
            names = [*overridden(self.facts, self.saved_step)] if overridden else []
            self.load_checked(checkpoint.tensors, self.facts, constructed, names)
        world = runtime.world
        if world.leader:
            WitnessFile(run_folder).drop_after(self.saved_step)
            self._record_start(run_folder, int(equal.get("steps", 0)))
        return self.saved_step

    def _record_start(self, run_folder: Path, steps: int) -> None:
        """Write down the command of this start, also of torchrun's: `lockstep replay` repeats
        it. steps: of the whole run; 0: unknown"""
        world = self.runtime.world
        layout = self.local_model.layout if self.local_model else Layout(1)
        append_event(
            run_folder,
            "began",
            generation=world.generation,
            step=self.saved_step,
            steps=steps,
            workers=list(world.members),
            words=start_words(),
            folder=os.getcwd(),
            layout={axis: getattr(layout, axis) for axis in REPLICA_AXES},
        )

    def _refuse_other_run(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of another run; log differences that are tolerated."""
        refuse_other_run(checkpoint.facts, self.run_facts, checkpoint.step, self.store.folder)
        differences = tolerated_changes(checkpoint.facts, self.run_facts)
        for sentence in differences:
            log.warning("this run may continue with other bits than where it started: %s", sentence)
        self.differences = [
            *differences,
            *fingerprint_changes(checkpoint.facts, self.run_facts),
        ]
        if differences and self.runtime.world.leader:
            append_event(
                self.store.folder.parent,
                "resumed with differences",
                step=checkpoint.step,
                differences=differences,
            )

    def warn_if_trained_layers_changed(self) -> None:
        """Warn in the first step after a resume when it trains other layers than the last step."""
        trained_parameters.warn_if_changed(self.facts.pop("trained", None), self.trained)

    def follow_eval_mode(self, names: list[str]) -> None:
        """Write the modules in eval mode to each checkpoint. Warn if the resumed one has others."""
        if (before := self.facts.pop("eval_mode", names)) != names:
            log.warning(
                "the checkpoint was trained with other modules in eval mode: %s then, %s now; "
                "let the mode follow from the step",
                join_names(before) or "none",
                join_names(names) or "none",
            )
        self.run_facts["eval_mode"] = names

    def _join(self, fingerprints: Mapping[str, str]) -> int | None:
        """Collective. Join the training workers and receive their state; return their step. None
        when none of them is left."""
        runtime = self.runtime
        runtime.set_progress(Progress("resume", -1))
        if not runtime.world.generation:
            runtime.join_running(fingerprints)
        tensors = runtime.retry_across_generations(
            lambda: (
                transfer_state(runtime, replica_size=self.replica_size)
                if runtime.is_joining
                else None
            )
        )
        if tensors is None:
            return None
        self.load_state_dict(tensors)
        runtime.finish_joining()
        self.store.require_folder()
        self.saved_step = transfer_roles(runtime.member_progress)[0]
        if runtime.membership.has_own_folder:
            # Checkpoints that this run, resumed from an earlier one, has not made.
            self.store.set_aside_after(self.saved_step)
        log.info(
            "joined after step %d as rank %d of %d",
            self.saved_step,
            runtime.world.rank,
            runtime.world.size,
        )
        return self.saved_step

    # -- saving ------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """True when a checkpoint is due after `step` committed steps."""
        return bool(self.every_steps) and step % self.every_steps == 0

    def save(
        self,
        step: int,
        facts: dict[str, Any] | None = None,
        *,
        first: Callable[[], None] = do_nothing,
        waits: bool = True,
        again: bool = False,
    ) -> None:
        """Collective. Start to save the state after `step` committed steps: it is copied now and
        written in the background.

        Returns at once when the step is saved already. When replicas differ, the next generation
        saves (`retry_save`), without them. DivergedError when trained weights or optimizer state
        are not finite.

        facts    JSON values for facts.json
        first    called in the background before anything is written
        waits    for the previous save. False: skip this one after SAVE_TIMEOUT_S (whole replicas)
        again    also if this worker counts the step as saved
        """
        self._refuse_reserved(facts or {})
        if step == self.saved_step and not again:
            return
        described = self.describe()
        if waits and self.saver:  # facts may name its step
            self.saver.wait(f"before step {step} is copied")
        written = {**self.run_facts, **described, **self._more_facts(step), **(facts or {})}
        self.saved_step = step
        request = SaveRequest(step, written, first)
        self._request = request
        if self._replicas_identical and not self._replicas_identical(step):
            self._request = replace(request, undecided_in=self.runtime.world.generation)
            return
        self.refuse_nonfinite(step, self.store.steps())
        if self.writes and self._wait_for_previous(step, waits=waits):
            self._start_save(request)

    def _refuse_reserved(self, facts: Mapping[str, Any]) -> None:
        if reserved := sorted({*self.run_facts, "trained", "constants"} & facts.keys()):
            raise UsageError(
                f"facts of the names {', '.join(reserved)} are Lockstep's own",
                "Checkpointer.save(facts=...)",
                "use other names",
            )

    def _wait_for_previous(self, step: int, *, waits: bool) -> bool:
        """Return whether the previous save has ended. False: the one of `step` is skipped,
        with a warning unless the save before was skipped. waits: as for `save`"""
        within_s: float | None = SAVE_TIMEOUT_S
        if waits or self.local_model:
            within_s = None
        elif self._skipped:
            within_s = 0.0
        skipped_before = self._skipped
        self._skipped = bool(
            self.saver and not self.saver.wait(f"before step {step} is copied", within_s)
        )
        if self._skipped and not skipped_before:
            log.warning(
                "the save of step %d is skipped: "
                "the previous one is still being written (logged once per delay)",
                step,
            )
        return not self._skipped

    def save_if_due(self, step: int) -> None:
        """Call `save` when due; skip it while the previous one is still being written."""
        if self.due(step):
            self.save(step, waits=False)

    def retry_save(self, step: int) -> None:
        """Repeat the last requested save in a new generation, if the state is still that of `step`.

        The previous rank 0 may not have finished it. When a replica spans several workers all of
        them repeat it, since a lost writer's slices would never arrive. When the replicas were not
        found identical, wait for a new generation: this worker may be the one that differs.
        """
        generation, request = self.runtime.world.generation, self._request
        if request is None or request.step != step or not self.writes:
            return
        is_started = request.started_in == generation or (
            request.started_in >= 0 and not self.local_model
        )
        if request.undecided_in == generation or is_started or step in self.store.steps():
            return
        if self.saver and self.local_model:
            self.saver.wait()
            while self.saver.failure():  # failures of the previous generation
                pass
        self.refuse_nonfinite(step, self.store.steps())
        self._start_save(request)

    def drop_save_request(self) -> None:
        """Forget the last requested save: the state has changed since."""
        self._request = None

    def _start_save(self, request: SaveRequest) -> None:
        self._request = replace(request, started_in=self.runtime.world.generation)
        self.saver = self.saver or AsyncSaver(self.store, self._note_saved)
        tensors, writer = self.state_to_write()
        self.store.share_writing(writer)
        self.saver.save(request.step, tensors, request.facts, self._protect, request.first)

    def _note_saved(self, step: int, seconds: float) -> None:
        if self.runtime.world.leader:
            append_event(
                self.store.folder.parent,
                "saved",
                step=step,
                seconds=round(seconds, 4),
                generation=self.runtime.world.generation,
            )

    def save_failed(self) -> bool:
        """True when a save failed and on_error is "stop"; with "continue" it is a warning, once."""
        error = self.saver.failure() if self.saver else None
        if error and self.on_error == "continue":
            log.warning("%s\n  training continues (checkpoint.on_error = continue)", error)
        elif error:
            self._failure = self._as_final(error)
        return self._failure is not None

    def _as_final(self, error: Exception) -> Exception:
        """Return the error of a failed save as it ends the run, if on_error is "stop"."""
        return (
            SaveFailedError(*error.args)
            if self.on_error == "stop" and isinstance(error, CheckpointError)
            else error
        )

    def close(self) -> None:
        """Collective. Finish the last save. CheckpointError, on all processes, when it failed."""
        runtime = self.runtime

        def finish() -> None:
            try:
                if self.saver:
                    self.saver.close()
            except CheckpointError as error:
                raise self._as_final(error) from error.__cause__
            if self._failure:
                raise self._failure
            if runtime.membership.has_own_folder and (steps := self.store.steps()):
                # Only a run in an object store loads the code for it.
                from lockstep.remote.working_copy import wait_until_published

                wait_until_published(self.store.folder.parent, steps[-1])

        def finish_on_all() -> None:
            if self._request:
                self.retry_save(self._request.step)
            # All wait for the upload.
            with runtime.during("saving") if runtime.membership.has_own_folder else nullcontext():
                run_on_rank0(runtime, finish)
            if self.saver and not runtime.world.leader:
                self.saver.close()

        runtime.membership.stop_admitting()
        runtime.retry_across_generations(finish_on_all)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.runtime.unregister(self)
        if kind is None:
            self.close()
        elif self.saver:
            self.saver.__exit__(kind, error, traceback)
