"""A run's checkpoints, as all its processes see them together.

The rooms below know nothing of each other: `state` names the tensors, `store` commits and verifies them, `background` writes beside the
training. Replicas are bitwise equal, so the first one alone writes: rank 0, or each of its workers its part (`parts`). Which step is
resumed is decided by rank 0 and told to everybody.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from lockstep.checkpoint.async_save import BackgroundSaver, nothing
from lockstep.checkpoint.fingerprints import make_run_id, read_run_id, refuse_another_run, warnings
from lockstep.checkpoint.policy import choose, show_steps
from lockstep.checkpoint.shards import Part, parameter_of, place_of
from lockstep.checkpoint.state_dict import capture, everything, kind_of, named_tensors, not_finite, optimizer_names, restore, several
from lockstep.checkpoint.stateful import TEXT, Stateful, capture_state, check_state, problems_of, restore_state, unnamed_schedulers
from lockstep.checkpoint.store import Checkpoint, Store
from lockstep.elastic.consensus import answers, every, lead, refuse_mixed_start
from lockstep.elastic.run_folder import trouble
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError, DivergedError, FolderAwayError, SaveFailedError, UsageError
from lockstep.parallel.parallelize import Held, whole_or_held
from lockstep.parallel.replica import digest_of
from lockstep.record.events import note
from lockstep.runtime import numerics, sources
from lockstep.runtime.exit_report import plainly
from lockstep.runtime.tensor_bytes import bytes_of
from lockstep.training.state_transfer import hand_over, roles
from lockstep.units import shown

log = logging.getLogger("lockstep")
PATIENCE_S = 5.0  # that a save which may be left out waits for the one before


@dataclass(frozen=True)
class Wanted:
    """A save that was asked for: see Keeper.save."""

    step: int
    facts: dict[str, Any]
    first: Callable[[], None]
    protect: Callable[[], Collection[int]]


class Keeper:
    """Saves and resumes `model` and `optimizer` (one, or a sequence of them) under `folder`; the same object on every process.

    state        everything else that changes during training, by a name of yours: {"scheduler": scheduler, "ema": ema, "scaler": scaler}.
                 Each has state_dict and load_state_dict. Saved, resumed and given to a joiner, as are the values of the optimizers'
                 parameter groups (lr, ...). Of a `Held` model (the recipes) neither: their loop sets the groups' values by the step
    every_steps  committed steps from one checkpoint to the next; 0: only when `save` is called
    keep         newest checkpoints kept; 0: all
    on_error     "continue": a failed save is a warning, and the next one is tried; "stop": it ends the run
    saved        which parameters and buffers a checkpoint holds, by name; the others are on every process from the start
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        model: nn.Module | Held,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        state: Mapping[str, Stateful] | None = None,
        every_steps: int = 0,
        keep: int = 3,
        on_error: Literal["continue", "stop"] = "continue",
        saved: Callable[[str], bool] = everything,
    ) -> None:
        self.world, self.every_steps, self.on_error, self.saved = world, every_steps, on_error, saved
        self.optimizers = several(optimizer)
        self.state = None if isinstance(model, Held) else dict(state or {})
        self.store = Store(folder, keep=keep)
        module, self.held = whole_or_held(model)
        self.model: nn.Module | Mapping[str, torch.Tensor] = self.held.named if self.held else module
        self._refuse_what_cannot_be_saved(state or {})
        self.saver: BackgroundSaver | None = None  # the leader's
        self.facts: dict[str, Any] = {}
        self.stamp: dict[str, Any] = {}  # what each checkpoint says of the run that saves it
        self._saved_step = 0
        self._asked: Wanted | None = None  # the last save, whoever was to do it, while the state is still that one
        self._failure: Exception | None = None
        self._left_out = False  # the last save that was due, because the one before was still being written
        self._begun = (-1, -1)  # the step of the last save that this worker began, and the generation in which it did
        self._doubted = -1  # the generation that could not say whether all its replicas are alike
        world.take(self)
        self.alike: Callable[[int], bool] | None = None  # collective: whether the state after a step is the same on all replicas

    @property
    def unit(self) -> int:
        """Workers of a replica, which save together."""
        return self.held.layout.unit if self.held else 1

    @property
    def writes(self) -> bool:
        """Whether this worker writes checkpoints, or a part of them."""
        return self.world.rank < self.unit

    def _refuse_what_cannot_be_saved(self, state: Mapping[str, object]) -> None:
        """Refuse at construction, by name, what a save would refuse."""
        if wrong := [type(one).__name__ for one in self.optimizers if not isinstance(one, torch.optim.Optimizer)]:
            raise UsageError(f"not an optimizer of torch: {', '.join(wrong)}", "Keeper(optimizer=...)", "pass one, or a sequence of them")
        if state and self.state is None:
            hint = "give the module itself to Keeper and Team"
            raise UsageError(f"the state of {', '.join(state)} is not supported with a Held model", "Keeper(state=...)", hint)
        check_state(state)
        self.capture()

    def refuse_what_is_left_out(self) -> None:
        """Raise a UsageError for trained parameters and schedulers that no checkpoint would hold and no joiner would receive."""
        known = optimizer_names(self.model, self.optimizers)
        if left_out := [name for name, one in named_tensors(self.model).items() if one.requires_grad and name not in known]:
            raise UsageError(
                f"{len(left_out)} trained parameters are in no optimizer that the Keeper knows: {shown(left_out)}",
                f"Keeper(..., {', '.join(type(one).__name__ for one in self.optimizers)}), {kind_of(self.model)}",
                "pass all optimizers as a list, or freeze these parameters with requires_grad_(False)",
            )
        if self.state is not None and (unnamed := unnamed_schedulers(self.optimizers, self.state)):
            scheduler, optimizer = unnamed[0], unnamed[0].optimizer
            raise UsageError(
                f"{type(scheduler).__name__} sets the learning rate of {type(optimizer).__name__}, and the Keeper does not know it",
                "after a resume, and in a worker that joins, the scheduler would begin again",
                'name it: Keeper(..., state={"scheduler": scheduler})',
            )

    def capture(self) -> dict[str, torch.Tensor]:
        """The living state by name, as far as this worker has it."""
        tensors = capture(self.model, self.optimizers, self.saved)
        return tensors if self.state is None else tensors | capture_state(self.model, self.optimizers, self.state)

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill model, optimizers and state with a captured state. CheckpointError, and nothing is changed, when it does not fit."""
        problems = problems_of(self.model, self.optimizers, self.state, tensors) if self.state is not None else []
        restore(self.model, self.optimizers, tensors, self.saved, problems)
        if self.state is not None:
            restore_state(self.model, self.optimizers, self.state, tensors)

    def optimizer_digest(self) -> int:
        """Return 64 bits over all state except the model; any flipped bit changes them. Equal on the same rank of every replica."""
        tensors = [(name, tensor) for name, tensor in sorted(self.capture().items()) if not name.startswith("model.")]
        texts = b"".join(bytes_of(tensor) for name, tensor in tensors if name.endswith(TEXT))  # digest_of sums: too weak for text
        numbers = [tensor for name, tensor in tensors if not name.endswith(TEXT)]
        return digest_of(numbers) ^ int.from_bytes(hashlib.sha256(texts).digest()[:8])

    def _take_part(self, held: Held) -> dict[str, torch.Tensor]:
        """What this worker writes of a checkpoint: of tensors that several have, the first of them writes."""
        spot, world, tensors = held.layout.spot(self.world.rank), self.world, self.capture()
        places = {name: place_of(name, held.pieces[parameter_of(name)].shape, held.pieces) for name in tensors}
        pieces = {name: places[name] for name, tensor in tensors.items() if tuple(tensor.shape) == places[name].size}

        def is_mine(name: str) -> bool:
            if held.is_borrowed(parameter_of(name)):
                return False
            if name not in pieces:  # a number beside the tensors
                return spot.shard == spot.tensor == 0
            cut = not held.shared[parameter_of(name)].is_whole
            return tensors[name].numel() > 0 and (spot.tensor == 0 or cut)

        self.store.part = Part(world.rank, self.unit, pieces, lambda: world.generation, world.broken)
        return {name: tensor for name, tensor in tensors.items() if is_mine(name)}

    def resume(
        self,
        how: str = "auto",
        facts: Mapping[str, str] | None = None,
        about: Mapping[str, Any] | None = None,
        allowed: Collection[str] = (),
    ) -> int:
        """Collective. Load the checkpoint that `how` names; the number of steps done, 0 for a new run.

        Where others of this run are at work already, their state is taken from them instead, bitwise, and this worker is one of them.

        how      "auto", "never", "required", or a step: then newer checkpoints are set aside, as the metrics behind that step are
        facts    must be equal on all workers; a worker whose facts differ is refused, with the reason
        about    written to each checkpoint, see checkpoint/fingerprints.py; by default its fingerprints are `facts`
        allowed  names of fingerprints that may differ from the checkpoint, since the user changed them on purpose
        CheckpointError when it is required and missing, damaged, or of another run. With "auto" a damaged newest one is set aside for the
        one before.
        """
        equal, run = dict(facts or {}), self.store.folder.parent
        here = {"numerics": numerics.fingerprint(self.world.device), "code": sources.fingerprint(), "flags": self.world.flags}
        self.stamp = {"fingerprints": equal, **here, **(about or {})}
        if self.world.joining and (step := self._join(equal)) is not None:
            self.stamp["run_id"] = read_run_id(run)  # not before: the others may only now have made it
            return step
        refuse_mixed_start(self.world, self.world.facts(equal))
        self.world.know(equal)
        found: Checkpoint | None = None

        def chosen() -> int | None:
            nonlocal found
            if self.world.membership and (why := trouble(self.world.membership.seat)):
                raise FolderAwayError(f"the run folder cannot be used: {why}", str(self.store.folder), "mount it again")
            self.store.preflight()
            step, reason = choose(how, self.store.steps())
            there = step
            if step is not None and not self.held:
                found = self.store.load(step) if how.isdecimal() else self.store.load_newest()
                there = found.step if found else None
            if how == "never" or how.isdecimal():
                self.store.go_back(step or 0)
            log.info(reason if there == step else f"resuming from step {there}")
            return there

        loading = self.world.board.during("preparing")  # takes as long as the disk and the size of the state make it
        step = lead(self.world, loading(chosen))
        self.store.made = True
        if step is not None and self.held and not how.isdecimal():
            step = self._newest_whole()
        if step is not None:
            there, pieces = step, self.held.pieces if self.held else None
            load = partial(self.store.load, there) if pieces is None else partial(self.store.pieces, there, pieces)
            found = every(self.world, loading(lambda: found or load()))
        known = str(found.facts.get("run_id") or "") if found else ""
        self.stamp["run_id"] = lead(self.world, lambda: make_run_id(run, known))
        if found:
            self._compare(found, allowed)
            self.restore(found.tensors)
            self.facts = found.facts
        self._saved_step = step or 0
        if self.world.leader and self.world.membership:
            note(run, "began", generation=self.world.generation, step=step or 0, workers=list(self.world.members))
        return step or 0

    def _compare(self, found: Checkpoint, allowed: Collection[str]) -> None:
        """Refuse a checkpoint of another run; log allowed differences."""
        refuse_another_run(found.facts, self.stamp, found.step, self.store.folder, allowed)
        differences = warnings(found.facts, self.stamp)
        for sentence in differences:
            log.warning("this run goes on with other bits than it would have had where it began: %s", sentence)
        if differences and self.world.leader:
            note(self.store.folder.parent, "resumed with differences", step=found.step, differences=differences)

    def _trained(self) -> list[str]:
        return [name for name, tensor in named_tensors(self.model).items() if tensor.requires_grad]

    def warn_of_other_trained(self) -> None:
        """Warn in the first step after a resume when it does not train what the last step before the checkpoint trained.

        That is right only where the loop freezes or unfreezes in this very step. `if step == 300: unfreeze()` is not run again after it.
        """
        before, now = self.facts.pop("trained", None), set(self._trained())
        if before is not None and (changed := sorted(now ^ set(before))):
            log.warning(
                "the checkpoint was trained with other layers frozen: %s changed since; let requires_grad follow from the step, "
                "layer.requires_grad_(step >= 300), so that it is the same after a resume",
                shown(changed),
            )

    def _newest_whole(self) -> int | None:
        """Collective. The step of the newest whole checkpoint, every byte verified, by each process its share of the files."""
        damaged: dict[int, list[str]] = {}
        share, whole, verified = (self.world.rank, self.world.size), None, self.world.board.during("preparing")
        for step in reversed(lead(self.world, self.store.steps)):
            problems = [one for some in answers(self.world, verified(partial(self.store.verify, step, share))) for one in some]
            if not problems:
                whole = step
                break
            damaged[step] = sorted(set(problems))
        lead(self.world, lambda: self.store.settle(damaged, whole))
        return whole

    def _join(self, facts: Mapping[str, str]) -> int | None:
        """Collective. Become one of those that are at work; the step at which they are. None when none of them was left to join."""
        world = self.world
        world.standing = {"at": "resume", "step": -1}
        if not world.generation:
            world.enter(facts)
        while world.joining:
            try:
                tensors = hand_over(world, unit=self.unit)
                break
            except Exception as error:
                if not world.lost(error):
                    raise
                why = plainly(error)
                error.__traceback__ = None  # it holds the group
            world.leave_group(why)
            world.form_next()
        else:
            return None
        assert tensors is not None
        self.restore(tensors)
        world.joining, self.store.made = False, True
        step = roles(world.standings)[0]
        log.info("joined at step %d as rank %d of %d", step, world.rank, world.size)
        self._saved_step = step
        return step

    def take_over(self, step: int) -> None:
        """After a change of members: the leader begins anew what the leader before it was to save, while the state is still that one.

        Not before the change: who could not compare itself with the others may be the one that differs. Where several workers write
        together they all begin anew, since the part of one of them may never come.
        """
        if self._doubted == self.world.generation or not (self.writes and self._asked and self._asked.step == step):
            return
        if step in self.store.steps():
            return
        if self._begun == (step, self.world.generation) or (self._begun[0] == step and not self.held):
            return
        if self.saver and self.held:
            self.saver.wait()
            while self.saver.failure():  # of the group that is no more
                pass
        self._refuse_to_save_what_is_not_finite(step)
        self._begin(self._asked)

    def moved_on(self) -> None:
        """The state is no longer the one that was to be saved last."""
        self._asked = None

    def due(self, step: int) -> bool:
        """True when `step` committed steps call for a checkpoint."""
        return bool(self.every_steps) and step % self.every_steps == 0

    def save(
        self,
        step: int,
        facts: dict[str, Any] | None = None,
        *,
        first: Callable[[], None] = nothing,
        protect: Callable[[], Collection[int]] = tuple,
        waits: bool = True,
    ) -> None:
        """Collective. Begin to save the state after `step` committed steps: copied now, written in the background. Nothing when it is saved
        already, or when the replicas turn out not to be alike: then whoever leads without those that differ saves (`take_over`).
        DivergedError when trained weights or optimizer state are not finite.

        first    what is done in the background before anything is written
        protect  says there which steps retention must leave, such as the best
        waits    for the save before, however long it takes; otherwise this one is left out when that takes longer than PATIENCE_S
                 (replicas of several workers wait)
        """
        if taken := sorted({*self.stamp, "trained"} & (facts or {}).keys()):
            raise UsageError(f"facts of the names {', '.join(taken)} are Lockstep's own", "Keeper.save(facts=...)", "use other names")
        if step == self._saved_step:
            return
        trained = {} if self.state is None else {"trained": self._trained()}
        self._saved_step, self._asked = step, Wanted(step, {**self.stamp, **trained, **(facts or {})}, first, protect)
        if self.alike and not self.alike(step):
            self._doubted = self.world.generation
            return
        self._refuse_to_save_what_is_not_finite(step)
        if not self.writes:
            return
        within_s = None if waits or self.held else 0.0 if self._left_out else PATIENCE_S
        before, self._left_out = self._left_out, bool(self.saver and not self.saver.wait(f"before step {step} is copied", within_s))
        if not self._left_out:
            self._begin(self._asked)
        elif not before:
            log.warning("the save of step %d is left out: the one before is still being written (said once for as long as it is)", step)

    def _refuse_to_save_what_is_not_finite(self, step: int) -> None:
        """DivergedError for an infinity or NaN in trained weights or optimizer state: retention would delete the last good checkpoints."""
        trained = {f"model.{name}" for name, one in named_tensors(self.model).items() if one.requires_grad}
        if wrong := not_finite({name: one for name, one in self.capture().items() if name in trained or name.startswith("optim.")}):
            raise DivergedError(
                f"not finite after step {step}: {shown(wrong)}",
                f"{len(wrong)} tensors of the state that was to be saved; {show_steps(self.store.steps())}",
                "nothing was saved or deleted: resume from an earlier step with a lower learning rate, or clip the gradients",
            )

    def _begin(self, wanted: Wanted) -> None:
        self._begun = (wanted.step, self.world.generation)
        self.saver = self.saver or BackgroundSaver(self.store, self._note_saved if self.world.leader else lambda step, seconds: None)
        tensors = self._take_part(self.held) if self.held else self.capture()
        self.saver.save(wanted.step, tensors, wanted.facts, wanted.protect, wanted.first)

    def _note_saved(self, step: int, seconds: float) -> None:
        note(self.store.folder.parent, "saved", step=step, seconds=round(seconds, 4), generation=self.world.generation)

    def save_if_due(self, step: int) -> None:
        """`save`, when `step` committed steps call for it; left out while the disk does not take the one before."""
        if self.due(step):
            self.save(step, waits=False)

    def must_stop(self) -> bool:
        """True on rank 0 when a save failed and on_error is "stop". With "continue" the failure is a warning, once."""
        error = self.saver.failure() if self.saver else None
        if error and self.on_error == "continue":
            log.warning("%s\n  training goes on (save.on_error = continue)", error)
        elif error:
            self._failure = self._final(error)
        return self._failure is not None

    def _final(self, error: Exception) -> Exception:
        """A failed save as it ends the run, where it is to."""
        return SaveFailedError(*error.args) if self.on_error == "stop" and isinstance(error, CheckpointError) else error

    def close(self) -> None:
        """Collective. Wait until the last checkpoint is committed. CheckpointError, on all processes, when it could not be written."""

        def finish() -> None:
            try:
                if self.saver:
                    self.saver.close()
            except CheckpointError as error:
                raise self._final(error) from error.__cause__
            if self._failure:
                raise self._failure

        def together() -> None:
            if self._asked:
                self.take_over(self._asked.step)
            lead(self.world, finish)
            if self.saver and not self.world.leader:
                self.saver.close()

        self.world.redo(together)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.world.give_back(self)
        if kind is None:
            self.close()
        elif self.saver:
            self.saver.__exit__(kind, error, trace)
