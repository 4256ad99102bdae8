"""A replica whose leaves are DiLoCo's learners (training/learners.py).

All workers of a replica work on one learner at a time. `inner` sums the gradients of its steps
inside the replica, in the tree over the learner's micro-batches. The leaf of the outer sum is the
learner's difference of weights, of which each shard has its rows. So both sums have the bits of
whole replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.layout import Layout
from lockstep.network.bucket_sizes import group_by_size
from lockstep.network.wire_format import Wire
from lockstep.parallel.build_replica import build_replica, start_equal
from lockstep.parallel.digest import Digest
from lockstep.parallel.gradient_source import GradientSource, PassPhase, StepPlan, SumOptions
from lockstep.parallel.groups import Connection, ProcessGroups
from lockstep.parallel.ordered_sum import FlatSum
from lockstep.parallel.parallelize import LocalModel
from lockstep.parallel.reducer import Reducer
from lockstep.parallel.replica import Replica, StepResults
from lockstep.parallel.wire_sum import row_lengths, sum_in_format


class DifferenceSource(GradientSource):
    """The differences that learners have made in the parameters of `inner`, which travel between
    replicas in the format of `options`; inside one, gradients travel in fp32."""

    def __init__(self, inner: GradientSource, groups: ProcessGroups, options: SumOptions) -> None:
        device = inner.parameters[0].device
        reducer = Reducer(device, groups.waits.generation_error, side_stream=False)
        super().__init__(groups, reducer, options)
        self.inner = inner
        self.names = inner.names
        self.parameters = inner.parameters
        self.shards = 1
        self._buckets: list[tuple[list[int], FlatSum]] = []  # numbers of parameters, their sum

    @property
    def measures_passes(self) -> bool:
        """Shards train learners together, which are not dealt by speed then."""
        return self.groups.layout.shard == 1

    def reset(self) -> None:
        self.reducer.start_step()
        self.inner.reset()

    def follow_parameters(self) -> bool:
        self.inner.follow_parameters()
        has_changed = self.names != self.inner.names
        self.names = self.inner.names
        self.parameters = self.inner.parameters
        return has_changed

    def start_step(self, plan: StepPlan) -> None:
        super().start_step(plan)
        sizes = [(p.dtype, p.nbytes) for p in self.parameters]
        self._buckets = []
        for numbers in group_by_size(sizes, self.options.bucket_bytes, range(len(sizes))):
            rows = partial(row_lengths, [self.parameters[i] for i in numbers])
            total = sum_in_format(self.options.wire, rows, plan.key, plan.shares)
            self._buckets.append((numbers, total))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.inner.forward(*inputs, **named)

    def add(self, differences: Sequence[Tensor]) -> None:
        """Add the differences of the current learner, which may be overwritten."""
        k = self.now.k
        for numbers, total in self._buckets:
            total.add(k, total.encode(k, [differences[i] for i in numbers]))
        if not self.now.last:
            return
        self.inner.reset()
        self.groups.board.enter("reducing")
        for tag in range(len(self._buckets)):
            self.reducer.submit(partial(self._reduce, tag))

    def end_pass(self) -> None:
        self.phase = PassPhase.OUTSIDE

    def _reduce(self, tag: int) -> None:
        """Collective. Sum the differences of a bucket over all replicas, and write them to
        .grad."""
        numbers, total = self._buckets[tag]
        parameters = [self.parameters[i] for i in numbers]
        sizes = [p.numel() for p in parameters]
        flat = parameters[0].new_empty(sum(sizes))
        self.groups.board.enter_collective(flat.nbytes)
        self.note_slice(self.sum_up(total, flat, tag))
        for p, part in zip(parameters, flat.split(sizes), strict=True):
            p.grad = part.view_as(p)

    def finish_step(self) -> None:
        self._buckets = []
        for p in self.parameters:  # slices without elements are in no bucket
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad

    def norm_squared(self, *, is_scaled: bool) -> Tensor | None:
        return self.inner.norm_squared(is_scaled=is_scaled)

    def release(self) -> None:
        super().release()
        self.inner.release()
        self._buckets = []

    def close(self) -> None:
        super().close()
        self.inner.close()


class LearnerReplica(Replica):
    """The learners of this replica.

    inner    sums the micro-batches of a learner's step
    numbers  of these micro-batches: rows (loss, count + 1, samples + 1), zeros where unknown
    squared  norm of the gradient of that step; None: this worker has all of it
    """

    source: DifferenceSource

    def __init__(self, inner: Replica, groups: ProcessGroups, wire: Wire) -> None:
        super().__init__(
            DifferenceSource(inner.source, groups, replace(inner.source.options, wire=wire)),
            inner.module,
            micro_batches=inner.leaves,
            seed=inner.seed,
            statistics=inner.statistics,
        )
        self.inner = inner
        self.numbers = torch.empty(0)
        self.squared: Tensor | None = None
        self._error: Exception | None = None  # of an inner step
        self._waited_s = 0.0  # in this outer step, for the sums inside the replica

    def _prepare(self) -> None:
        self._waited_s = 0.0
        super()._prepare()

    def passes(self, step: int, leaves: range) -> Iterator[int]:
        """Collective in the replica. Yield this worker's part of the micro-batches `leaves` of a
        learner's step, each for a forward pass and `add_pass`.

        After the loop .grad is the sum over all of them, or this worker's rows of it.
        """
        inner = self.inner
        count = len(leaves)
        device = self.parameters[0].device
        self.numbers = torch.zeros(count, 3, dtype=torch.float64, device=device)
        inner.source.reset()
        yield from inner.sum_leaves(step, (count,), list(range(count)), leaves.start)
        # Each row comes from one shard, so the sum is exact.
        self.groups.all_reduce(self.numbers, self.groups.gather_group)
        self.squared = inner.grad_norm_squared()
        if self.groups.layout.shard > 1:
            self._waited_s += inner.exposed_s()

    def add_pass(self, loss: Tensor, count: int, samples: int) -> None:
        """Run the backward pass of a micro-batch of a learner. count, samples: see `numbers`."""
        self.groups.board.enter("backward")
        self.inner.backward(loss)
        if self.inner.counts:
            row = self.numbers.new_tensor([count, samples])
            loss = loss.detach().double().reshape(())
            self.numbers[self.inner.source.now.k] = torch.stack([loss, *row])

    def add_learner(self, loss: float, differences: Sequence[Tensor]) -> None:
        """Take what the current learner has made of the weights, start minus end."""
        self.source.add(differences)
        device = self.parameters[0].device
        self._losses[self.source.now.k] = torch.tensor(loss, dtype=torch.float64, device=device)

    def results(self, squared: Tensor | None = None, digests: Sequence[Digest] = ()) -> StepResults:
        """As of any replica; the first shard has the losses of its learners."""
        results = super().results(squared, digests)
        return results if self.groups.position.at.shard == 0 else results._replace(losses={})

    def is_equal(self, steps: int) -> bool:
        """Collective in the replica. Return whether all shards have taken as many steps of a
        learner."""
        _, layout, at = self.groups.position
        counts = torch.zeros(layout.shard, dtype=torch.int64, device=self.parameters[0].device)
        counts[at.shard] = steps
        self.groups.all_reduce(counts, self.groups.gather_group)
        return self.groups.failure is None and set(counts.tolist()) == {steps}

    def fail(self, error: Exception) -> None:
        """Keep the error of an inner step: `micro_batches` raises it, where a lost peer is
        handled."""
        self._error = self._error or error

    def _raise_failure(self) -> None:
        if self._error:
            raise self._error
        super()._raise_failure()

    def exposed_s(self) -> float:
        return self._waited_s + self.source.reducer.exposed_s()

    def release_groups(self) -> None:
        super().release_groups()
        self._error = None


def build_learner_replica(
    model: nn.Module | LocalModel,
    *,
    connection: Connection,
    init_sync: bool,
    wire: Wire = "fp32",
    **options: Any,
) -> LearnerReplica:
    """As build_replica, with learners in the place of micro-batches."""
    is_whole = isinstance(model, nn.Module)
    # A whole learner needs no peer: it finishes its steps also when the generation ends.
    inside = None if is_whole else connection
    inner = build_replica(model, connection=inside, init_sync=False, **options)
    groups = ProcessGroups(Layout(), inner.groups.in_thread) if is_whole else inner.groups
    groups.connect(connection)
    replica = LearnerReplica(inner, groups, wire)
    if init_sync and is_whole:
        start_equal(replica)
    return replica
