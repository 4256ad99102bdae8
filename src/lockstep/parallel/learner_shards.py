"""A replica of several workers whose leaves are DiLoCo's learners (training/learners.py).

All shards of a replica work on one learner at a time. The gradients of its steps are summed inside
the replica, in the tree over the learner's micro-batches. Its leaf of the outer sum is the
difference of weights, of which each shard has its rows. Workers with the same rows in other
replicas finish that tree. So both sums have the bits of whole replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import PeersLostError
from lockstep.network.bucket_sizes import group_by_size
from lockstep.network.subtrees import Subtree, equal_shares, leaves_of_rank
from lockstep.network.wire_format import Wire
from lockstep.parallel.exchange import tree_all_reduce
from lockstep.parallel.ordered_sum import PartialSum, SumTree
from lockstep.parallel.parallelize import LocalModel
from lockstep.parallel.sharded_replica import ShardedReplica
from lockstep.parallel.wire_sum import WireSum, row_lengths


@dataclass
class DifferenceBucket:
    """Differences that travel together: of the parameters `numbers`. wire_sum: None for fp32."""

    numbers: list[int]
    wire_sum: WireSum | None
    tree: SumTree[PartialSum] = field(default_factory=SumTree)


class LearnerShards(ShardedReplica):
    """A ShardedReplica whose `micro_batches` are the learners of an outer step.

    wire          how differences travel between replicas; inside one, gradients travel in fp32
    bucket_bytes  differences sent together
    """

    def __init__(
        self,
        local: LocalModel,
        *,
        wire: Wire = "fp32",
        bucket_bytes: int = 25_000_000,
        **options: Any,
    ) -> None:
        super().__init__(local, **options)
        self.outer_wire, self.bucket_bytes = wire, bucket_bytes
        self._learner, self._learner_losses, self._buckets = (
            0,
            list[Tensor](),
            list[DifferenceBucket](),
        )
        self._error: Exception | None = None  # of an inner step; raised by `micro_batches`
        self.numbers = new_numbers(0, self.parameters[0].device)  # of a learner's micro-batches
        self.squared = torch.zeros(())  # norm of a learner's gradient
        self._waited_s = 0.0  # in this outer step

    @property
    def counts(self) -> bool:
        """True: every shard trains every learner of its replica."""
        return True

    @property
    def _replica_group(self) -> None:
        """None: an inner step sums inside the replica."""

    def release_groups(self) -> None:
        super().release_groups()
        self._error, self._buckets = None, []

    def fail(self, error: Exception) -> None:
        """Keep the error of an inner step: `micro_batches` raises it, where a lost peer is
        handled."""
        self._error = self._error or error

    def losses(self) -> list[float]:
        """Return the losses of this replica's learners, on its first shard."""
        is_first = self.groups.current_layout().coordinates(dist.get_rank()).shard == 0
        return [float(loss) for loss in self._learner_losses] if is_first else []

    def measured_s(self) -> None:
        """Return None: learners are not dealt by speed."""

    def exposed_s(self) -> float:
        return self._waited_s

    def micro_batches(
        self, step: int, meanwhile: Callable[[], None] = lambda: None, shares: tuple[int, ...] = ()
    ) -> Iterator[int]:
        """Collective. Yield this replica's learners of the outer step that starts at `step`.

        After the loop .grad is this worker's rows of the sum of all differences.

        meanwhile, shares  see ShardedReplica; a share counts learners
        """
        if not self.groups.formed:
            self.groups.form()
        layout = self.groups.current_layout()
        shares = shares or equal_shares(layout.replicate, self.leaves)
        sizes = [(p.dtype, p.nbytes) for p in self.parameters]
        groups = group_by_size(sizes, self.bucket_bytes, range(len(sizes)))
        self._buckets = [
            DifferenceBucket(numbers, self._wire_sum(numbers, step, shares)) for numbers in groups
        ]
        self._learner_losses, self._waited_s = [], 0.0
        for self._learner in leaves_of_rank(layout.coordinates(dist.get_rank()).replica, shares):
            yield self._learner
            if error := self._stop_error():
                raise error
        for p, sharded in zip(self.parameters, self._sharded, strict=True):
            p.grad, sharded.grad = (
                torch.zeros_like(p),
                None,
            )  # slices without elements are in no bucket
        meanwhile()
        self.groups.board.enter("reducing")
        start_s = time.perf_counter()
        for tag, bucket in enumerate(self._buckets):
            self._all_reduce(bucket, shares, tag)
        self._buckets, self._waited_s = [], self._waited_s + time.perf_counter() - start_s

    def backward(self, loss: Tensor, scaler: object = None) -> None:
        """Add a learner's difference, the gradient of `loss`, to the sum."""
        if self._stop_error():
            return  # `micro_batches` raises it; the difference may be incomplete
        differences = torch.autograd.grad(loss, self.parameters)
        self._learner_losses.append(loss.detach())
        for bucket in self._buckets:
            parts = [differences[i] for i in bucket.numbers]
            if bucket.wire_sum:
                bucket.wire_sum.add(self._learner, bucket.wire_sum.encode(self._learner, parts))
            else:
                bucket.tree.add(
                    Subtree(self._learner, 1),
                    PartialSum(torch.cat([part.reshape(-1) for part in parts])),
                )

    def passes(self, step: int, leaves: range) -> Iterator[int]:
        """Collective in the replica. Yield this worker's part of the micro-batches `leaves` of a
        learner's step, each for a forward pass and `add_pass`.

        After the loop .grad is this worker's rows of the sum over all of them; `numbers` and
        `squared` are those of the replica.
        """
        self._first_leaf = leaves.start
        self.shares = (len(leaves),)
        self.replica_leaves = [*range(len(leaves))]
        self.numbers = new_numbers(len(leaves), self.parameters[0].device)
        yield from self._sum_passes(step)
        # Each row comes from one shard, so the sum is exact.
        self.groups.all_reduce(self.numbers, self.groups.gather_group)
        self.squared = self.grad_norm_squared()
        self._waited_s += super().exposed_s()

    def add_pass(self, loss: Tensor, count: int = 0, samples: int = 0) -> None:
        """Run the backward pass of a micro-batch of a learner. count, samples: see `numbers`."""
        super().backward(loss)
        if self._pass.counts:
            row = self.numbers.new_tensor([count, samples])
            self.numbers[self._pass.k] = torch.stack([loss.detach().double().reshape(()), *row])

    def is_equal(self, steps: int) -> bool:
        """Collective in the replica. Return whether all shards have taken as many steps of a
        learner."""
        layout = self.groups.current_layout()
        counts = torch.zeros(layout.shard, dtype=torch.int64, device=self.parameters[0].device)
        counts[layout.coordinates(dist.get_rank()).shard] = steps
        self.groups.all_reduce(counts, self.groups.gather_group)
        return self.groups.failure is None and set(counts.tolist()) == {steps}

    def _stop_error(self) -> Exception | None:
        """Return why no learner of this outer step can be completed."""
        reason = self.groups.waits.generation_error()
        return self._error or (
            PeersLostError(reason, "LearnerShards.micro_batches") if reason else None
        )

    def _wire_sum(self, numbers: list[int], step: int, shares: tuple[int, ...]) -> WireSum | None:
        rows = row_lengths([self.parameters[i] for i in numbers])
        return (
            None
            if self.outer_wire == "fp32"
            else WireSum(self.outer_wire, rows, (self.seed, step), shares)
        )

    def _all_reduce(self, bucket: DifferenceBucket, shares: tuple[int, ...], tag: int) -> None:
        """Collective. Sum the differences of a bucket over all replicas, and write them to
        .grad."""
        parameters = [self.parameters[i] for i in bucket.numbers]
        group, waits = self.groups.replica_group, self.groups.waits
        self.groups.board.enter_collective(sum(p.nbytes for p in parameters))
        if bucket.wire_sum:
            bucket.wire_sum.all_reduce(
                [p.grad for p in parameters if p.grad is not None], group, waits, self.traffic, tag
            )
            return
        total = bucket.tree.stack[-1][1].tensor
        if group is None:
            total = bucket.tree.total().tensor
        else:
            tree_all_reduce(
                [(subtree, part.tensor) for subtree, part in bucket.tree.stack],
                shares,
                group,
                total,
                waits,
                self.traffic,
                tag,
            )
        for p, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)


def new_numbers(micro_batches: int, device: torch.device) -> Tensor:
    """Return rows (loss, count + 1, samples + 1) of micro-batches, filled with zeros: unknown."""
    return torch.zeros(micro_batches, 3, dtype=torch.float64, device=device)
