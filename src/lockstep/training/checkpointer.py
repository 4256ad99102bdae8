"""The checkpoints of a run. Each process has a Checkpointer; collective methods run on all of them.

Replicas are bitwise equal, so only the first one writes: rank 0, or each of its workers its slices
(`shards`). Rank 0 decides which step is resumed.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
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
from lockstep.checkpoint.json_tree import JSON_SUFFIX, spec_of
from lockstep.checkpoint.optimizer_state import refuse_inner_optimizers
from lockstep.checkpoint.shards import ShardWriter, is_text, parameter_of
from lockstep.checkpoint.store import Checkpoint, CheckpointStore
from lockstep.elastic.collectives import assert_equal_on_all_ranks, run_on_rank0
from lockstep.elastic.progress import Progress, transfer_roles
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError, SaveFailedError, UsageError
from lockstep.parallel.digest import digest_of
from lockstep.parallel.parallelize import LocalModel, unwrap_local_model
from lockstep.record.events import append_event
from lockstep.runtime import numerics, sources
from lockstep.runtime.tensor_bytes import bytes_of
from lockstep.training import published_run, trained_parameters
from lockstep.training.attributes import Attributes
from lockstep.training.loading import load_checkpoint
from lockstep.training.model_form import ModelForm
from lockstep.training.nonfinite import refuse_nonfinite_state
from lockstep.training.state_transfer import transfer_state
from lockstep.training.witness import WitnessFile
from lockstep.units import join_names

log = logging.getLogger("lockstep")
SAVE_TIMEOUT_S = 5.0  # how long a save that may be skipped waits for the previous one


@dataclass(frozen=True)
class SaveRequest:
    """Arguments of Checkpointer.save."""

    step: int
    facts: dict[str, Any]
    first: Callable[[], None]


class Checkpointer:
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
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        state: Mapping[str, stateful.Stateful] | None = None,
        every_steps: int = 0,
        keep: int = 3,
        on_error: Literal["continue", "stop"] = "continue",
        saved: Callable[[str], bool] = state_dict.all_names,
    ) -> None:
        self.runtime, self.every_steps, self.on_error, self.saved = (
            runtime,
            every_steps,
            on_error,
            saved,
        )
        self.optimizers = state_dict.as_tuple(optimizer)
        self.state = None if isinstance(model, LocalModel) and state is None else dict(state or {})
        self.store = CheckpointStore(folder, keep=keep)
        module, self.local_model = unwrap_local_model(model)
        self.model: nn.Module | Mapping[str, torch.Tensor] = module
        if self.local_model:
            self.model = {
                **self.local_model.local_params,
                **self.local_model.buffers,
                **self.local_model.placeholders,
            }
            elsewhere = self.local_model.placeholders
            self.saved = lambda name: name not in elsewhere and saved(name)
        is_tracked = self.state is not None and not (
            self.local_model and self.local_model.layout.pipeline > 1
        )
        self.attributes = Attributes(
            module if is_tracked else None, self.optimizers if is_tracked else (), self.state
        )
        self._form = ModelForm(self.model, module)
        self._refuse_unsupported(state or {})
        self._constants = {
            name: dict(stateful.plain_values(value.state_dict()))
            for name, value in (self.state or {}).items()
        }
        self.saver: AsyncSaver | None = None  # on processes that write
        self.loaded = False  # a checkpoint, or the state of other workers
        self.facts: dict[str, Any] = {}  # of the checkpoint that was resumed
        self.run_facts: dict[str, Any] = {}  # written to each checkpoint
        self.differences: list[str] = []  # between this start and the run that was resumed
        self._groups: list[
            list[list[int]]
        ] = []  # ids of the parameters in each group, in the first step
        self._started_steps = 0  # of this start
        self._saved_step = 0
        self._request: SaveRequest | None = (
            None  # the last save on any process, until the state changes
        )
        self._failure: Exception | None = None
        self._skipped = False  # the last save that was due
        self._started = (-1, -1)  # step and generation of the last save that this worker started
        self._undecided_generation = (
            -1
        )  # the last generation in which the replicas were not found identical
        runtime.register(self)
        self._replicas_identical: Callable[[int], bool] | None = None
        self._more_facts: Callable[[int], dict[str, Any]] = lambda step: {}
        self._protect: Callable[[], Collection[int]] = tuple

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that was saved, resumed or asked for; 0: none."""
        return self._saved_step

    @property
    def replica_size(self) -> int:
        """Workers per replica, which save together."""
        return self.local_model.layout.workers_per_replica if self.local_model else 1

    @property
    def writes(self) -> bool:
        """True when this worker writes checkpoints, or slices of them."""
        return self.runtime.world.rank < self.replica_size

    def compare_before_saving(self, replicas_identical: Callable[[int], bool]) -> None:
        """Set the collective comparison of the replicas: a save waits while it returns False."""
        self._replicas_identical = replicas_identical

    def _refuse_unsupported(self, state: Mapping[str, object]) -> None:
        """Refuse at construction, by name, what a save would refuse."""
        if wrong := [
            type(optimizer).__name__
            for optimizer in self.optimizers
            if not isinstance(optimizer, torch.optim.Optimizer)
        ]:
            hint = "pass one, or a sequence of them"
            raise UsageError(
                f"not an optimizer of torch: {', '.join(wrong)}",
                "Checkpointer(optimizer=...)",
                hint,
            )
        if self.runtime.has_own_folder:
            self._refuse_unpublished()
        for optimizer in self.optimizers:
            refuse_inner_optimizers(optimizer)
        stateful.refuse_unsupported_state(state)
        trained_parameters.refuse_misplaced_parameters(self.model, self.optimizers)
        self.state_dict()

    def _refuse_unpublished(self) -> None:
        """UsageError for checkpoints that hosts without a shared disk could not publish."""
        assert self.runtime.membership is not None
        published = self.runtime.membership.folder / "checkpoints"
        if self.store.folder.resolve() != published:
            what = f"checkpoints in {self.store.folder} would stay on this host, and the hosts share no disk"
            raise UsageError(
                what,
                "Checkpointer(folder, ...)",
                f"give {published}, which is published to the store",
            )

    def add_to_saves(
        self, facts: Callable[[int], dict[str, Any]], protect: Callable[[], Collection[int]]
    ) -> None:
        """Add `facts(step)` to every save from now on, and keep the steps of `protect()`."""
        self._more_facts = facts
        self._protect = protect

    def refuse_unsaved_parameters(self) -> None:
        """UsageError for trained parameters and schedulers that no checkpoint would hold."""
        trained_parameters.refuse_unsaved(self.model, self.optimizers, self.state)

    def begin_step(self, step: int) -> None:
        """Refuse, before the micro-batches of `step`, what a save would refuse. CheckpointError or
        UsageError: after the first update of a start the optimizers have their state."""
        groups = [
            [list(map(id, group["params"])) for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]
        self._groups = self._groups or groups
        if self._groups != groups:
            trained_parameters.refuse_new_groups(self.model, self.optimizers, self._groups, step)
        self._started_steps += 1
        if self._started_steps == 1:
            self._form.note_modules()
        if self._started_steps == 2:
            for name, tensor in (
                self._state_to_write() if self.writes else self.state_dict()
            ).items():
                spec_of(name, tensor)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this worker's state by name. Tensors share memory with model and optimizers."""
        return self._tensors() | self.attributes.state_dict()

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the state of the model, the optimizers and the objects in `state`."""
        tensors = state_dict.get_state_dict(self.model, self.optimizers, self.saved)
        extra = (
            stateful.pack_extra_state(self.model, self.optimizers, self.state)
            if self.state is not None
            else {}
        )
        if self.local_model:
            self._refuse_unsliced(tensors | extra, self.local_model)
        return tensors | extra

    def _refuse_unsliced(
        self, tensors: Mapping[str, torch.Tensor], local_model: LocalModel
    ) -> None:
        """UsageError, in shards, for tensors of which no worker knows the slices."""
        names = [
            name for name in tensors if name.startswith("state.") and not name.endswith(JSON_SUFFIX)
        ]
        if unknown := [name for name in names if name not in local_model.slices]:
            what = f"state with tensors is not supported in shards, except copies of the model: {join_names(unknown)}"
            hint = "average the model with torch.optim.swa_utils.AveragedModel, or train with whole replicas"
            raise UsageError(what, "session.state(...)", hint)
        own = [
            name for name in tensors if name.startswith("optimizers.") and tensors[name].numel() > 1
        ]
        if own:
            what = f"tensors that an optimizer keeps besides its state by parameter are not supported in shards: {join_names(own)}"
            raise UsageError(
                what,
                f"layout {local_model.layout}",
                "keep them in optimizer.state[parameter], or train with whole replicas",
            )

    def common_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that belong to no parameter: the workers of a replica hold them
        alike."""
        slices = self.local_model.slices if self.local_model else {}
        return {
            name: tensor
            for name, tensor in self.state_dict().items()
            if parameter_of(name) not in slices
        }

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill model, optimizers and state. CheckpointError, without changes, for a misfit."""
        problems = (
            stateful.extra_state_problems(self.model, self.optimizers, self.state, tensors)
            if self.state is not None
            else []
        )
        state_dict.set_state_dict(self.model, self.optimizers, tensors, self.saved, problems)
        self.attributes.load_state_dict(tensors, self.runtime.world.device)
        if self.state is not None:
            stateful.load_extra_state(self.model, self.optimizers, self.state, tensors)
        self.loaded = True

    def optimizer_digest(self) -> int:
        """Return 64 bits over all state except model and attributes; equal on the same rank of
        replicas."""
        tensors = [
            (name, tensor)
            for name, tensor in sorted(self._tensors().items())
            if not name.startswith("model.")
        ]
        texts = b"".join(
            bytes(bytes_of(tensor)) for name, tensor in tensors if name.endswith(JSON_SUFFIX)
        )
        numbers = [tensor for name, tensor in tensors if not name.endswith(JSON_SUFFIX)]
        return digest_of(numbers) ^ int.from_bytes(hashlib.sha256(texts).digest()[:8])

    def _sharded_state_dict(self, local_model: LocalModel) -> dict[str, torch.Tensor]:
        """Return the tensors that this worker writes; each is written by one worker."""
        runtime, tensors = self.runtime, self.state_dict()
        rank = runtime.world.rank
        coordinates = local_model.layout.coordinates(rank)
        slices = {
            name: local_model.slices[parameter_of(name)]
            for name in tensors
            if parameter_of(name) in local_model.slices
        }
        shaped_slices = {
            name: part
            for name, part in slices.items()
            if tuple(tensors[name].shape) == part.local_shape and not is_text(name)
        }

        def writes(name: str) -> bool:
            if local_model.is_tied_copy(parameter_of(name)):
                return False
            if (
                name not in shaped_slices or shaped_slices[name].is_whole
            ):  # the same on all shards, or on one
                on_all_stages = parameter_of(name) not in local_model.slices
                return (
                    coordinates.shard
                    == coordinates.tensor
                    == on_all_stages * coordinates.stage
                    == 0
                )
            tensor_parallel = not local_model.tensor_slices[parameter_of(name)].is_whole
            return tensors[name].numel() > 0 and (coordinates.tensor == 0 or tensor_parallel)

        generation = (lambda: runtime.world.generation, runtime.generation_error)
        self.store.share_writing(ShardWriter(rank, self.replica_size, shaped_slices, *generation))
        return {name: tensor for name, tensor in tensors.items() if writes(name)}

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
        flags = (
            self.runtime.flags
            if self.runtime.membership
            else {"--arguments": shlex.join(sys.argv[1:])}
        )
        own = {
            "numerics": numerics.fingerprint(self.runtime.world.device),
            "code": sources.fingerprint(),
            "flags": flags,
        }
        constructed = trained_parameters.constructed_options(self.optimizers)
        self.run_facts = {"fingerprints": dict(fingerprints or {}), **own, **(facts or {})}
        self.run_facts["constructed"] = trained_parameters.options_as_text(constructed)
        if self.runtime.is_joining and (step := self._join(equal)) is not None:
            self.run_facts["run_id"] = read_run_id(
                run_folder
            )  # only now: the other workers may just have created it
            return step
        assert_equal_on_all_ranks(self.runtime, self.runtime.fingerprint(equal))
        self.runtime.set_fingerprint(equal)
        checkpoint = load_checkpoint(self.runtime, self.store, how, self.local_model)
        saved_id = str(checkpoint.facts.get("run_id") or "") if checkpoint else ""
        self.run_facts["run_id"] = run_on_rank0(
            self.runtime, lambda: make_run_id(run_folder, saved_id)
        )
        if checkpoint:
            self._refuse_other_run(checkpoint)
            names = [*overridden(checkpoint.facts, checkpoint.step)] if overridden else []
            if self.state is not None and not names:
                trained_parameters.warn_of_other_options(
                    self.model,
                    self.optimizers,
                    checkpoint.tensors,
                    checkpoint.facts.get("constructed", ()),
                )
            self.load_state_dict(checkpoint.tensors)
            self.facts = checkpoint.facts
            self._constants = trained_parameters.warn_of_other_constants(
                self.state or {}, self._constants, self.facts.get("constants", {}), names
            )
            if names:
                before = self.facts.get("constructed", [])
                trained_parameters.apply_options(self.optimizers, constructed, before)
        self._saved_step = checkpoint.step if checkpoint else 0
        world = self.runtime.world
        if world.leader:
            WitnessFile(run_folder).drop_after(self._saved_step)
        if world.leader and self.runtime.membership:
            append_event(
                run_folder,
                "began",
                generation=world.generation,
                step=self._saved_step,
                workers=list(world.members),
            )
        return self._saved_step

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
        trained_parameters.warn_if_changed(self.facts.pop("trained", None), self.model)

    def follow_eval_mode(self, names: list[str]) -> None:
        """Write the modules in eval mode to each checkpoint. Warn if the resumed one has others."""
        if (before := self.facts.pop("eval_mode", names)) != names:
            what = "the checkpoint was trained with other modules in eval mode: %s then, %s now; let the mode follow from the step"
            log.warning(what, join_names(before) or "none", join_names(names) or "none")
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
        if not runtime.has_own_folder:
            self.store.require_folder()
        self._saved_step = transfer_roles(runtime.member_progress)[0]
        if (
            runtime.has_own_folder
        ):  # checkpoints that this run, resumed from an earlier one, has not made
            self.store.set_aside_after(self._saved_step)
        log.info(
            "joined at step %d as rank %d of %d",
            self._saved_step,
            runtime.world.rank,
            runtime.world.size,
        )
        return self._saved_step

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
        waits    for the previous save. False: skip this one after SAVE_TIMEOUT_S (in whole replicas)
        again    also if this worker counts the step as saved
        """
        if reserved := sorted({*self.run_facts, "trained", "constants"} & (facts or {}).keys()):
            what = f"facts of the names {', '.join(reserved)} are Lockstep's own"
            raise UsageError(what, "Checkpointer.save(facts=...)", "use other names")
        if step == self._saved_step and not again:
            return
        self._form.refuse_other_names()
        self._form.warn_of_other_modules()
        described = {} if self.state is None else self._describe_state()
        if waits and self.saver:  # facts may name its step
            self.saver.wait(f"before step {step} is copied")
        facts = self._more_facts(step) | (facts or {})
        written = {**self.run_facts, **described, **facts}
        self._saved_step = step
        self._request = SaveRequest(step, written, first)
        if self._replicas_identical and not self._replicas_identical(step):
            self._undecided_generation = self.runtime.world.generation
            return
        refuse_nonfinite_state(
            self.state_dict(),
            trained_parameters.trained_names(self.model),
            step,
            self.store.steps(),
        )
        if not self.writes:
            return
        within_s = None if waits or self.local_model else 0.0 if self._skipped else SAVE_TIMEOUT_S
        skipped_before, self._skipped = (
            self._skipped,
            bool(self.saver and not self.saver.wait(f"before step {step} is copied", within_s)),
        )
        if not self._skipped:
            self._start_save(self._request)
        elif not skipped_before:
            log.warning(
                "the save of step %d is skipped: the previous one is still being written (logged once per delay)",
                step,
            )

    def _describe_state(self) -> dict[str, Any]:
        """Return facts about the state: what is trained, and which values of the objects in `state`
        are those of their construction."""
        self.attributes.announce()
        constants: dict[str, list[str]] = {}
        for name, value in (self.state or {}).items():
            now = dict(stateful.plain_values(value.state_dict()))
            constants[name] = [
                path
                for path, constructed in self._constants[name].items()
                if now.get(path) == constructed
            ]
        trained = {"trained": trained_parameters.trained_names(self.model)}
        return trained | ({"constants": constants} if constants else {})

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
        generation = self.runtime.world.generation
        if self._undecided_generation == generation or not (
            self.writes and self._request and self._request.step == step
        ):
            return
        is_started = self._started == (step, generation) or (
            self._started[0] == step and not self.local_model
        )
        if is_started or step in self.store.steps():
            return
        if self.saver and self.local_model:
            self.saver.wait()
            while self.saver.failure():  # failures of the previous generation
                pass
        refuse_nonfinite_state(
            self.state_dict(),
            trained_parameters.trained_names(self.model),
            step,
            self.store.steps(),
        )
        self._start_save(self._request)

    def drop_save_request(self) -> None:
        """Forget the last requested save: the state has changed since."""
        self._request = None

    def _start_save(self, request: SaveRequest) -> None:
        self._started = (request.step, self.runtime.world.generation)
        self.saver = self.saver or AsyncSaver(self.store, self._note_saved)
        self.saver.save(
            request.step,
            self._state_to_write(),
            request.facts,
            self._protect,
            request.first,
        )

    def _state_to_write(self) -> dict[str, torch.Tensor]:
        return self._sharded_state_dict(self.local_model) if self.local_model else self.state_dict()

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

        def finish() -> None:
            try:
                if self.saver:
                    self.saver.close()
            except CheckpointError as error:
                raise self._as_final(error) from error.__cause__
            if self._failure:
                raise self._failure
            if self.runtime.has_own_folder and (steps := self.store.steps()):
                published_run.wait_until_published(self.store.folder.parent, steps[-1])

        def finish_on_all() -> None:
            if self._request:
                self.retry_save(self._request.step)
            with (
                self.runtime.during("saving") if self.runtime.has_own_folder else nullcontext()
            ):  # all wait for the upload
                run_on_rank0(self.runtime, finish)
            if self.saver and not self.runtime.world.leader:
                self.saver.close()

        self.runtime.stop_admitting()
        self.runtime.retry_across_generations(finish_on_all)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.runtime.unregister(self)
        if kind is None:
            self.close()
        elif self.saver:
            self.saver.__exit__(kind, error, traceback)
