"""Run micro-batch 0 of the first step twice, to find loops whose loss depends on more than the step
and the micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.parallel.replica import Replica
from lockstep.parallel.sharded_replica import ShardedReplica
from lockstep.runtime.torch_private import collectives_of


class Rehearsal:
    """One rehearsal of a replica. A retry of the step does not repeat it, since only some ranks may
    have rehearsed before the failure."""

    def __init__(self, runtime: ElasticRuntime, replica: Replica | ShardedReplica) -> None:
        self.runtime, self.replica = runtime, replica
        self._due = True
        self._loss: str | None = None

    def run(self, step: int) -> Iterator[int]:
        """Collective. Yield micro-batch 0. UsageError when its loss differs between ranks."""
        self._loss = None
        if not self._due:
            return
        self._due = False
        for k in self.replica.rehearsal(step):
            self.runtime.board.enter("forward", step + 1)
            before = collectives_of(dist.group.WORLD)
            yield k
            if collectives_of(dist.group.WORLD) != before:
                raise UsageError(
                    f"a collective of torch.distributed ran in the micro-batch loop of step {step}",
                    "workers run different numbers of micro-batches, and gradients are being sent meanwhile",
                    "remove it, or run it after the loop: gradients are summed, and the loss is averaged, over all workers already",
                )
        self.runtime.board.enter("voting")
        self.runtime.board.enter_collective()
        rehearsed = self.replica.rehearsed  # None: a stage without the loss
        gathered = all_gather_json(self.runtime, None if rehearsed is None else str(rehearsed))
        losses = {rank: loss for rank, loss in enumerate(gathered) if loss}
        self._loss = next(iter(losses.values()))
        if len(set(losses.values())) > 1:
            listed = ", ".join(f"{loss} on rank {rank}" for rank, loss in losses.items())
            raise _nondeterministic(f"the loss of micro-batch 0 of step {step} is not the same on all workers: {listed}")

    def compare(self, step: int) -> None:
        """Collective in the attempt that rehearsed. UsageError, on all ranks, when micro-batch 0 has
        another loss now than in the rehearsal."""
        before, self._loss = self._loss, None
        if before is None:
            return
        losses = self.replica.losses() if self.replica.own_leaves[0] == 0 else []  # of tensor ranks only the first reports them
        if changed := [loss for loss in all_gather_json(self.runtime, str(losses[0]) if losses else before) if loss != before]:
            raise _nondeterministic(f"the loss of micro-batch 0 of step {step} is {before} the first time and {changed[0]} the second time")


def _nondeterministic(what: str) -> UsageError:
    return UsageError(
        what,
        "the first step of a start runs micro-batch 0 twice on every worker, to compare the loss",
        "data and random numbers of a micro-batch must follow from its step and number alone: no DataLoader or iterator consumed in the "
        "loop, no prefetched batch, no unseeded data set, no rank in a seed, only deterministic kernels (docs/loop.md); "
        "ReplicaGroup(rehearse=False) skips the comparison",
    )
