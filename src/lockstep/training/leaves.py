"""The leaves of the ordered sum, as the loop of a Session runs them: micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.build_replica import build_replica
from lockstep.parallel.replica import Replica
from lockstep.training.loop_changes import LoopChanges
from lockstep.training.update_checks import refuse_uneven_skips

if TYPE_CHECKING:
    from lockstep.training.session_parts import Declared
    from lockstep.training.started_run import StartedRun


class Leaves:
    """The micro-batches of a step. session.learners replaces them: see Learners.

    steps          of the run from one commit to the next
    micro_batches  that share a loss
    divisor        of the summed gradient, instead of the step's count; 0: the count
    loop           what a step repeats, and how
    optimizers     beside those of session.prepare
    facts          that a resumed run must have in common with the run
    options        of the ReplicaGroup
    """

    steps = 1
    divisor = 0
    loop = "micro-batches", "for batch in loader(step)"
    optimizers: Sequence[torch.optim.Optimizer] = ()
    facts: Mapping[str, str] = {}
    options: Mapping[str, Any] = {}
    build_replica: Callable[..., Replica] = staticmethod(build_replica)
    watch_changes = LoopChanges
    run: StartedRun

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.step: int | None = None  # that the loop is in; None: before its first one

    def refuse_total(self, total: int) -> None:
        """UsageError for a number of steps that does not end with a commit."""

    def refuse_inside(self, call: str) -> None:
        """UsageError where this call would differ between workers."""

    def refuse_incomplete(self, declared: Declared, workers: int, layout: Layout) -> None:
        """UsageError for what the loop has declared, and these leaves cannot follow."""

    def start(self, run: StartedRun) -> None:
        self.run = run

    def begin(self, step: int) -> None:
        self.step = step

    def micro_batches_of(self, step: int) -> Iterator[int]:
        """Collective. Yield this worker's micro-batches of `step`; of a run that has stopped the
        one that a resume compares, and then raise."""
        if step != self.step:
            raise UsageError(
                f"the micro-batches of step={step}",
                f"the loop has step={self.step}",
                "for step in session.steps(...)",
            )
        replicas = self.run.replicas
        if self.run.stopped:
            yield from replicas.runner.leave_witness(step)
            raise self.run.stopped
        yield from replicas.micro_batches(step)
        self.run.watch.end_micro_batches(step)

    @property
    def own_leaves(self) -> Sequence[int]:
        """Return the micro-batches of this worker."""
        return self.run.replicas.replica.own_leaves

    def share(self, loss: torch.Tensor, count: int | None) -> torch.Tensor:
        """Return what a micro-batch adds to the loss: of a sum over `count` samples all of it."""
        return loss / self.micro_batches if count is None else loss

    def backward(
        self, loss: torch.Tensor, count: int | None, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        """Run the backward pass of a micro-batch. loss: its share"""
        run, replicas = self.run, self.run.replicas
        samples = run.declared.samples_of_mean() if count is None else None
        if replicas.runner.rollback:
            replicas.runner.rollback.refuse_scaler(scaler)
        if replicas.replica.workers_per_replica > 1:
            refuse_uneven_skips(scaler, replicas.on_nonfinite, run.declared.state)
        known = [] if samples is None else [samples]
        with run.record.counting_backward(count):
            replicas.backward(loss, count, scaler=scaler, samples=known)

    def clip_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient of the step to a norm of at most `max_norm`; return the norm
        before."""
        return self.run.replicas.updates.gradient.clip_(max_norm)
