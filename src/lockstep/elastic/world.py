"""A worker among those of its run: its position in a generation, and the progress that all members
exchange when one forms.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.elastic.consensus import StepDecision
from lockstep.elastic.generation_log import Generation
from lockstep.errors import FencedError, LockstepError, UsageError
from lockstep.log import announcing, log
from lockstep.record.events import append_event
from lockstep.record.goodput import Ledger
from lockstep.runtime.status_board import StatusBoard
from lockstep.runtime.worker_env import SHARED_TERMINAL


@dataclass(frozen=True)
class World:
    """The position of this worker among the workers of one generation.

    rank, size              among all workers of the run; -1 and 0 before the first generation
    local_rank, local_size  among the workers of this host
    host                    name of this host
    device                  where this worker computes
    generation              number of the membership list; 0 for a static process group
    members                 worker ids, by rank; () for a static process group
    reason                  why the generation was formed: "a/1: exited"
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    device: torch.device
    generation: int = 0
    members: tuple[str, ...] = ()
    reason: str = ""

    @property
    def leader(self) -> bool:
        """Whether this is rank 0, which alone writes files that exist once per run."""
        return self.rank == 0

    @property
    def local_leader(self) -> bool:
        """Whether this is the first worker of its host."""
        return self.local_rank == 0

    def in_generation(self, generation: Generation, id: str) -> World:
        """Return the world of member `id` in a generation."""
        slots = sorted(member.slot for member in generation.members if member.host == self.host)
        rank = generation.ranks[id]
        return replace(
            self,
            rank=rank,
            size=len(generation.members),
            local_rank=slots.index(generation.members[rank].slot),
            local_size=len(slots),
            generation=generation.number,
            members=tuple(generation.ranks),
            reason=generation.reason,
        )


@dataclass(frozen=True)
class Progress:
    # "join" and "resume" before the first step, then "step".
    stage: Literal["join", "resume", "step"]
    step: int  # committed steps; -1: this worker has no training state yet
    # The vote on the last committed step, for members that missed it.
    decision: StepDecision | None = None
    divergences: int = 0  # see Divergence
    compare_all: bool = False  # compare all weights at the next vote: a member is new
    rehearse: bool = True  # compute micro-batch 0 of the next step on all ranks: a member is new
    one_source: bool = False  # a joiner receives its state from one worker only
    first_generation: bool = True  # the worker was in no generation that trained
    ledger: Mapping[str, Any] | None = None  # how the time of the run was spent
    loop_state: Mapping[str, Any] = field(default_factory=dict)  # see ElasticRuntime.loop_state

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Progress:
        """Return the progress that `asdict` described. LockstepError for other fields."""
        _refuse_other_fields(cls, values)
        if (decision := values["decision"]) is None:
            return cls(**values)
        _refuse_other_fields(StepDecision, decision)
        tuples = {
            name: tuple(decision[name])
            for name in ("losses", "divergent_ranks", "digests", "micro_batch_us")
        }
        return cls(**{**values, "decision": StepDecision(**{**decision, **tuples})})


def _refuse_other_fields(kind: type, values: Mapping[str, Any]) -> None:
    expected = {field.name for field in fields(kind)}
    if values.keys() != expected:
        missing, unknown = sorted(expected - values.keys()), sorted(values.keys() - expected)
        raise LockstepError(
            f"a member sent a {kind.__name__} of another version: "
            f"missing {missing}, unknown {unknown}",
            "exchanged when a generation forms",
            "start all workers with the same version of Lockstep",
        )


class WorkerState:
    """The state that a worker reports to the others, and theirs at the last exchange.

    world             rank, size, device; a new value in each generation
    is_joining        other workers train; this worker has not received their state yet
    first_generation  all workers started together, so all take part in preparing the run
    progress          of this worker, sent to all members when a generation forms
    member_progress   of each rank, received at that time
    exit_code         of the run, if this worker leaves without an error
    loop_state        JSON values of the training loop, which a joiner receives
    board, ledger     this worker's current activity; how the run's time was spent
    """

    def __init__(self, world: World, board: StatusBoard) -> None:
        self.world = world
        self.board = board
        self.ledger = Ledger(time.monotonic())
        self.progress = Progress("join", -1)
        self.member_progress: list[Progress] = []
        self.loop_state: Mapping[str, Any] = {}
        self.is_joining = False
        self.first_generation = True
        self.exit_code = 0
        self._owners: dict[str, weakref.ref[object]] = {}

    def is_leader(self) -> bool:
        """Return `world.leader`, which changes with the generation."""
        return self.world.leader

    def shows_progress(self) -> bool:
        """Return whether this is the first worker of its host, or of the shared terminal: the one
        in slot 0, which has the terminal, else the one with the lowest rank."""
        world = self.world
        if not world.members:
            return world.local_leader
        is_shared = os.environ.get(SHARED_TERMINAL) == "1"
        ids = [id for id in world.members if is_shared or id.startswith(f"{world.host}/")]
        first = next((id for id in ids if id.split("/")[1] == "0"), ids[0])
        return world.members[world.rank] == first

    def register(self, owner: object) -> None:
        """Register a ReplicaGroup or Checkpointer. UsageError if another one is open."""
        kind = type(owner).__name__
        if (registered := self._owners.get(kind)) and registered() is not None:
            raise UsageError(
                f"a second {kind} on one ElasticRuntime",
                f"{kind}(...) while the first one is open",
                "use one ReplicaGroup and one Checkpointer "
                "for an nn.ModuleDict of all trained modules, or close the first one (`with`)",
            )
        self._owners[kind] = weakref.ref(owner)

    def unregister(self, owner: object) -> None:
        self._owners.pop(type(owner).__name__, None)

    def set_progress(self, progress: Progress) -> None:
        """Set what this worker reports when the next generation forms."""
        self.progress = progress

    @property
    def is_late(self) -> bool:
        """True after this worker has committed a step whose vote it missed: the other members are
        in the next step, whose collectives it must join first."""
        steps = [member.step for member in self.member_progress]
        return bool(steps) and 0 <= steps[self.world.rank] < max(steps) == self.progress.step

    def set_loop_state(self, values: Mapping[str, Any]) -> None:
        """Set what a joiner receives besides tensors: JSON values, equal on all workers."""
        self.loop_state = values

    def set_ledger(self, ledger: Ledger) -> None:
        """Continue the time account of an earlier start of the run."""
        self.ledger = ledger

    def set_exit_code(self, code: int) -> None:
        self.exit_code = code

    @contextmanager
    def during(self, phase: Literal["compiling", "saving", "evaluating"]) -> Iterator[None]:
        """Context manager that shows `phase` on the board and in the ledger."""
        before = self.ledger.switch(phase, time.monotonic())
        try:
            with self.board.during(phase):
                yield
        finally:
            self.ledger.switch(before, time.monotonic())

    @contextmanager
    def preparing(self, what: str) -> Iterator[None]:
        """Context manager that shows "preparing" on the board, and logs `what` if it takes long."""
        with self.board.during("preparing"), announcing(what):
            yield

    def count_as_lost(self, trained_s: float) -> None:
        """Count the training since the ledger had `trained_s` of it as lost."""
        now_s = time.monotonic()
        seconds = self.ledger.spent("training", now_s) - trained_s
        self.ledger.move("training", "lost", seconds, now_s)

    def track_compilation(self) -> None:
        """Show "compiling" on the board and in the ledger whenever torch.compile works, maybe for
        minutes, and log it once."""
        from lockstep.runtime.torch_private import on_compile  # loads torch._dynamo

        compiling = ExitStack()
        this = weakref.ref(self)  # torch keeps the callbacks until the process exits

        def start(_: object) -> None:
            if state := this():
                compiling.enter_context(state.during("compiling"))
                compiling.enter_context(announcing("compiling the model for a new shape"))

        on_compile(start, lambda _: compiling.close())

    def report_goodput(self, folder: Path) -> None:
        """Log how the time of the run in `folder` was spent, and write it to its events."""
        if self.world.leader:
            append_event(folder, "goodput", **self.ledger.summary(time.monotonic()))
        log.log(
            logging.INFO if self.shows_progress() else logging.DEBUG,
            self.ledger.describe(time.monotonic()),
        )

    def finish_joining(self) -> None:
        """Record that this worker has received the training state."""
        self.is_joining = False

    def take_progress(self) -> None:
        """Decide from the members' progress what this generation starts with."""
        newest = max(self.member_progress, key=lambda member: member.step)
        self.is_joining = self.progress.step < 0 <= newest.step
        # A later leader must count the time of the run, not its own.
        if self.is_joining and newest.ledger:
            self.ledger = Ledger.from_json(newest.ledger, time.monotonic(), self.ledger.category)
            self.loop_state = newest.loop_state
        # Equal on all ranks: collectives depend on it.
        self.first_generation = (
            all(member.first_generation for member in self.member_progress) and newest.step < 0
        )
        stages = sorted({member.stage for member in self.member_progress})
        if newest.step < 0 and len(stages) > 1:
            member = self.world.members[self.world.rank]
            raise FencedError(
                f"workers are at different stages of the start: {', '.join(stages)}",
                member,
                "they restart",
            )


def decision_before(members: Sequence[Progress], facts: Mapping[str, Any]) -> StepDecision:
    """Return the loss of the last step before this start: from other workers, or of a
    checkpoint."""
    if decisions := [member.decision for member in members if member.decision and member.step >= 0]:
        newest = decisions[0]
        return StepDecision(newest.loss, count=newest.count, trained_share=newest.trained_share)
    return StepDecision(float(facts.get("loss", 0.0)))


def transfer_roles(progress: Sequence[Progress]) -> tuple[int, list[int], list[int]]:
    """Return (the step of the run, the ranks that have its state, the ranks that need it)."""
    newest = max(member.step for member in progress)
    sources = [rank for rank, member in enumerate(progress) if member.step == newest >= 0]
    return newest, sources, [rank for rank, member in enumerate(progress) if member.step < 0]
