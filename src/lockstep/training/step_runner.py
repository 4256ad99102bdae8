"""One attempt at a step: its passes, what is compared meanwhile, the vote, the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.state_dict import nonfinite_tensors
from lockstep.elastic.collectives import refuse_aborted, vote_on_step
from lockstep.elastic.consensus import STOP_REQUEST, StepDecision, Vote, parse_count
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import Progress
from lockstep.errors import DivergedError, UsageError
from lockstep.log import log
from lockstep.parallel.digest import NOTHING, Digest
from lockstep.parallel.replica import Replica
from lockstep.runtime.signals import StopSignals
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.divergence import ReplicaComparison, ReplicaState
from lockstep.training.loop_changes import LoopChanges
from lockstep.training.rehearsal import Rehearsal
from lockstep.training.share_balance import ShareBalance
from lockstep.units import join_names

if TYPE_CHECKING:
    from lockstep.training.rollback import SkippedMicroBatches


class Carried(Protocol):
    """Values that each attempt at a step collects on all workers, and its commit keeps."""

    def start_attempt(self) -> None: ...

    def exchange(
        self, group: dist.ProcessGroup | None, wait: Callable[[list[dist.Work | None]], None]
    ) -> None:
        """Collective, before the vote."""

    def commit(self) -> None: ...


class StepObserver(Protocol):
    """Looks at the attempts of a replayed run (history/observer.py)."""

    def passes(self, step: int) -> Iterator[int]:
        """Yield micro-batches that have no effect on the step."""

    def enter(self, step: int, k: int) -> None:
        """Called before the loop gets micro-batch `k`."""

    def end_step(self, step: int) -> None:
        """Called after the step of this number is recorded, before a save."""


class Ballot:
    """The counts of a step, and what asks for the end of the run.

    signals  stop signals of this worker; None: nothing listens to them
    counts   of the micro-batches of `step`, None where there are none
    """

    def __init__(
        self,
        runtime: ElasticRuntime,
        checkpointer: Checkpointer | None,
        signals: StopSignals | None,
    ) -> None:
        self.runtime = runtime
        self.checkpointer = checkpointer
        self.signals = signals
        self.is_leaving = False  # this worker, whose host is taken away
        self.step = 0
        self.counts: list[int | None] = []
        self._samples: list[int] = []  # of the micro-batches whose loss is a mean
        self._stop_requested = False

    def start(self, step: int) -> None:
        """Forget the step before, or the attempt before."""
        self.step = step
        self.counts = []
        self._samples = []

    def add(self, count: int | None, samples: Sequence[int], *, counts: bool = True) -> None:
        """Take the count of a micro-batch. UsageError where only some have one. counts: it is a
        micro-batch of this worker."""
        count = None if count is None else parse_count(count)
        if self.counts and (count is None) != (self.counts[0] is None):
            raise UsageError(
                "some micro-batches of a step have a count and others have none",
                f"session.backward(loss, count=...), step {self.step + 1}",
                "give a count to all of them, or to none",
            )
        if counts:
            self.counts.append(count)
            self._samples += samples

    def request_stop(self) -> None:
        """Ask all replicas to stop: the next vote carries it as `decision.stop`."""
        self._stop_requested = True

    def received(self) -> str:
        """Return the stop signal that this worker has received, or ""."""
        return self.signals.received if self.signals else ""

    def _is_drained(self) -> bool:
        return self.received() == "SIGUSR1" and self.runtime.membership.drains

    def _stop_signal(self) -> str:
        """Return what asks to stop the run; "" for nothing, or to drain the host only."""
        own = "" if self._is_drained() else self.received()
        requested = STOP_REQUEST * self._stop_requested
        return own or self.runtime.membership.stop_signal or requested

    def vote(
        self,
        replica: Replica,
        digests: Sequence[Digest],
        squared: Tensor | None,
        measured_us: dict[str, int],
    ) -> Vote:
        """Return the vote of this worker. digests: of its trained weights, and of what the vote
        compares"""
        self.is_leaving = self.is_leaving or self._is_drained()
        counts = [count for count in self.counts if count is not None]
        results = replica.results(squared, digests)
        trained, digest = results.digests
        return Vote(
            [results.losses.get(k) for k in range(replica.leaves)],
            count=sum(counts) if counts else None,
            samples=self._samples,
            stop_signal=self._stop_signal(),
            save_failed=bool(self.checkpointer and self.checkpointer.save_failed()),
            joiners_waiting=self.runtime.membership.joiner_count > 0,
            leaving=self.is_leaving,
            digest=digest,
            trained=trained,
            gradient_finite=results.is_finite,
            step=self.step,
            **measured_us,
        )


@dataclass
class StepRunner:
    """The parts of an attempt. A step is attempted until its decision is committed.

    divisor  of the summed gradient, instead of the step's count; 0: the count
    digests  of the trained weights that the step is computed with, and of what is compared
    squared  norm of the step's gradient over the workers of a replica; None: it is whole here
    has_voted  for a complete gradient, which the others may commit without this worker
    """

    runtime: ElasticRuntime
    replica: Replica
    state: ReplicaState
    comparison: ReplicaComparison
    ballot: Ballot
    balance: ShareBalance
    loop_changes: LoopChanges
    rehearsal: Rehearsal | None
    rollback: SkippedMicroBatches | None
    carried: Sequence[Carried]
    divisor: int
    observer: StepObserver | None = None
    digests: Sequence[Digest] = (NOTHING, NOTHING)
    squared: Tensor | None = None
    has_voted: bool = False

    def observe(self, observer: StepObserver) -> None:
        """Let it look at the attempts from now on."""
        self.observer = observer
        self.comparison.record_all()

    def first_trained(self, skipped: Sequence[int]) -> int:
        return next(k for k in range(self.replica.leaves) if k not in skipped)

    def trained(self, step: int) -> list[int] | None:
        """Return the micro-batches of a committed step that were not skipped; None: all of them."""
        return self.rollback.trained(step) if self.rollback else None

    def passes(self, step: int) -> Iterator[int]:
        """Collective. Yield this worker's micro-batches, and exchange what the vote needs."""
        replica = self.replica
        ballot = self.ballot
        rehearsal = self.rehearsal
        self.has_voted = False
        ballot.start(step)
        self.comparison.divergence.start_generation(self.runtime, step)
        skipped = self.rollback.start(step) if self.rollback else []
        first = self.first_trained(skipped)
        if rehearsal and rehearsal.is_due:
            yield from rehearsal.run(step, first)
        if self.observer:
            yield from self.observer.passes(step)
        ballot.start(step)
        self.digests = (NOTHING, NOTHING)
        if rehearsal:
            replica.hash_gradient_of(first if rehearsal.hashes(step) else None)
        for carried in self.carried:
            carried.start_attempt()

        def compute_digests() -> None:
            self.digests = self.comparison.start_digests(step)

        for k in replica.micro_batches(step, compute_digests, self.balance.shares):
            self.state.follow_parameters()
            if not ballot.counts:
                self.loop_changes.start(self.state.frozen_state)
            self.runtime.board.enter("forward", step + 1)
            if self.observer:
                self.observer.enter(step, k)
            if k not in skipped:
                yield k
            elif not replica.source.skip():
                yield first
        self.loop_changes.refuse(self.state.frozen_state, step)
        if rehearsal:
            rehearsal.compare(step, first)
        for carried in self.carried:
            carried.exchange(dist.group.WORLD, self.runtime.group.wait)
        self.squared = replica.grad_norm_squared()

    def vote(self, step: int) -> StepDecision | None:
        """Collective. Return what all ranks have decided; None: replicas differ, and were
        evicted."""
        comparison = self.comparison
        measured_us = self.balance.measured_us()
        vote = self.ballot.vote(self.replica, self.digests, self.squared, measured_us)
        self.runtime.board.enter("voting")
        self.runtime.board.enter_collective()
        size = self.replica.workers_per_replica
        refuse_aborted(self.runtime)  # the vote has read the losses, so all works are done
        self.has_voted = True
        decision = vote_on_step(self.runtime, vote, replica_size=size)
        if not decision.is_ordinary:
            log.debug("the vote on step %d: %s", step + 1, decision)
        if self.rollback:
            decision = self.rollback.with_share(decision, self.rollback.start(step))
        if decision.divergent_ranks:
            self.has_voted = False
            what = comparison.what_is_compared()
            comparison.refuse_repeated(step)
            comparison.evict(step, decision.divergent_ranks, decision.digests, what)
            return None
        if vote.digest:
            comparison.record_equal(step)
        comparison.name_culprits(step)
        return decision

    def suspicion(self, step: int, decision: StepDecision) -> SkippedMicroBatches | None:
        """Return what measures the micro-batches of a step that seems to diverge; else None."""
        if self.rollback is None or not self.rollback.suspects(step, decision):
            return None
        self.has_voted = False
        return self.rollback

    def follow_members(self, members: Sequence[Progress], joined: Sequence[int]) -> None:
        """Take from the members of a new generation what is due: the same on all ranks, so that
        their digests can be compared."""
        self.comparison.follow(
            compare_all=bool(joined) or any(member.compare_all for member in members)
        )
        if self.rehearsal:
            self.rehearsal.follow(is_due=bool(joined) or any(member.rehearse for member in members))

    def refuse_nonfinite(self, step: int, decision: StepDecision) -> None:
        """DivergedError, on all workers, when the loss or the gradient is not finite: of a whole
        replica the tensors are read, else the norm over its workers."""
        wrong: list[str] = []
        if self.state.local:
            squared = self.squared
            wrong = [] if squared is None or bool(squared.isfinite()) else ["its norm"]
        elif not decision.gradient_finite:
            named = self.replica.module.named_parameters()
            wrong = nonfinite_tensors({name: p.grad for name, p in named if p.grad is not None})
        if wrong or not decision.finite:
            raise DivergedError(
                f"loss {decision.loss} in step {step + 1}"
                + (f", gradient not finite: {join_names(wrong)}" if wrong else ""),
                "agreed by all replicas before the update, which was not made; "
                "the checkpoints before are whole",
                "lower the learning rate, lengthen its warm-up, or clip the gradients; "
                "on_divergence='rollback' skips samples that alone are the cause; "
                "with a GradScaler: on_nonfinite='ignore' and backward(loss, scaler=scaler)",
            )

    def commit(self, step: int, decision: StepDecision) -> None:
        """Keep what belongs to a step that all ranks have agreed on."""
        self.has_voted = False
        if self.rollback:
            self.rollback.commit(step, decision)
        if self.rehearsal:
            self.rehearsal.commit(step)
        self.replica.statistics.commit(self.trained(step))
        for carried in self.carried:
            carried.commit()
        self.comparison.commit(step)
        self.balance.decide(decision, step)

    def leave_witness(self, step: int) -> Iterator[int]:
        """Collective. Yield the first micro-batch of `step`, which a resume compares. A failure is
        logged: the run has been saved, and is about to exit."""
        newest = max((member.step for member in self.runtime.member_progress), default=-1)
        if self.rehearsal is None or newest >= step:
            return  # a group that formed after the last update takes no part in passes
        try:
            skipped = self.rollback.skipped(step) if self.rollback else []
            yield from self.rehearsal.run(step, self.first_trained(skipped))
        except Exception as error:  # of any type: the exit code is that of a run that is saved
            log.warning("what step %d begins with was not recorded: %s", step + 1, error)
