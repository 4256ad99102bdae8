"""One whole copy of a model among the replicas that train together.

A hook on each parameter counts the gradients that the backward pass has added (buckets.py). When a
bucket of the last micro-batch is complete, a reducer adds it over all replicas (reducer.py,
exchange.py) while the backward pass continues. The group of all replicas can change between
generations; the buckets stay.

The gradients of earlier micro-batches are added in the tree of ordered_sum.py: two sibling leaves
by autograd, larger subtrees by SumTree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.data.order import splitmix64
from lockstep.errors import PeersLostError, UsageError
from lockstep.network.subtrees import Subtree, equal_shares, is_one_addition, leaves_of_rank
from lockstep.network.wire_format import Wire
from lockstep.parallel.buckets import Bucket, GradientBuckets
from lockstep.parallel.digest import digest_of, total_of
from lockstep.parallel.exchange import Traffic, tree_all_reduce
from lockstep.parallel.gradient_watch import (
    GradientWatch,
    Unused,
    hash_of,
    refuse_different_parameters,
    refuse_unsupported,
)
from lockstep.parallel.ordered_sum import SumTree
from lockstep.parallel.reducer import Reducer, seconds_between, time_mark
from lockstep.parallel.running_statistics import RunningStatistics
from lockstep.parallel.wire_sum import WireSum, row_lengths
from lockstep.runtime.numerics import seed_generators, sha256_of
from lockstep.runtime.process_group import gather_json
from lockstep.runtime.status_board import StatusBoard
from lockstep.runtime.torch_private import foreach_add_, own_buffers
from lockstep.runtime.work import WorkWaiter, static_group


@dataclass
class Gradients:
    """The gradients of all parameters; adding overwrites the left operand."""

    tensors: list[torch.Tensor]

    def __add__(self, right: Gradients) -> Gradients:
        foreach_add_(self.tensors, right.tensors)
        return self


class Replica:
    """A whole replica: `model`, with gradient sums of the same bits for any number of processes.

    micro_batches  K of a step, over all replicas; at least the number of processes
    seed           of the randomness within the model, keyed by (seed, step, micro-batch)
    wire           how gradients travel (network/wire_format.py)
    bucket_bytes   gradients reduced together
    unused         "zero": a parameter without a gradient in a micro-batch gets a gradient of zero
    statistics     of BatchNorm layers; None: the model has none
    init_sync      Collective: give all ranks rank 0's weights. False: they are equal, or received
                   later
    board             where the current phase is recorded
    generation_error  returns why the generation is over; "" while it is intact
    traffic           messages and bytes that this rank has sent in the current step, in the
                      exchange of exchange.py
    UsageError: more processes than micro-batches, or no backward pass ran.
    """

    counts = True  # see ShardedReplica

    def __init__(  # 11 parameters: independent values of the run, most with a default
        self,
        model: nn.Module,
        *,
        micro_batches: int,
        seed: int = 0,
        wire: Wire = "fp32",
        bucket_bytes: int = 25_000_000,
        unused: Unused = "raise",
        statistics: RunningStatistics | None = None,
        init_sync: bool = True,
        board: StatusBoard | None = None,
        generation_error: Callable[[], str] = static_group,
    ) -> None:
        self.leaves = micro_batches
        self.seed = seed
        self.bucket_bytes = bucket_bytes
        self.wire, self._wire_sums = wire, dict[Bucket, WireSum]()
        self.unused = unused
        self.model, self.statistics = (
            model,
            statistics or RunningStatistics(nn.Module(), micro_batches, {}),
        )
        self.workers_per_replica = 1
        self.buckets: GradientBuckets | None = None
        self._collect_parameters()
        self.device = self.parameters[0].device
        self.waits = WorkWaiter(generation_error, in_thread=self.device.type == "cpu")
        self.board = board or StatusBoard(None)
        self.traffic = Traffic()
        self._tree: SumTree[Gradients] = SumTree()
        self._current: Subtree | None = None  # the micro-batches whose sum is in .grad
        self._losses: list[torch.Tensor] = []
        self._computed: tuple[Any, Any] | None = (
            None  # marks before and after the micro-batches of the step
        )
        self._slice_sums: list[torch.Tensor] = []  # of the slices that this rank has summed
        self.rehearsed: float | None = None  # loss of the micro-batch in `rehearsal`
        self.rehearsed_finite = True  # its gradient
        self._hash_leaf: int | None = None  # the micro-batch whose gradient is hashed
        self.hashed_gradient: int | None = None  # 64 bits over the newest gradient that was hashed
        self._group: dist.ProcessGroup | None = None  # all replicas, once they agree on the buckets
        if init_sync:
            self._join_group()
            self._take_weights_of_rank_0([*model.parameters(), *model.buffers()])
        self._reducer = Reducer(self.device, generation_error)

    def _take_weights_of_rank_0(self, tensors: list[torch.Tensor]) -> None:
        """Collective. Weights that are equal already, as from one seed, are not sent: a link may
        be slow. On a GPU they are, since its links are faster than a hash."""
        size = dist.get_world_size()
        if size == 1 or (
            self.device.type == "cpu"
            and len(set(gather_json(size, sha256_of(tensors), self.waits.wait))) == 1
        ):
            return
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0)

    def _collect_parameters(self, order: list[int] | None = None) -> None:
        """Find the trained parameters, and make buckets in the order of their gradients."""
        refuse_unsupported(self.model)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        self._watch = GradientWatch(list(trained), self.parameters)
        if self.buckets:
            self.buckets.close()
        self.buckets = GradientBuckets(self.parameters, self.bucket_bytes, self._on_ready, order)

    def _prepare(self) -> GradientBuckets:
        """Return the buckets. Collective if the group, the parameters or their order are new."""
        for p in self.parameters:
            p.grad = None
        if [id(p) for p in self.model.parameters() if p.requires_grad] != [
            id(p) for p in self.parameters
        ]:
            self._collect_parameters()
            self._group = None
        assert self.buckets is not None
        if not all(bucket.is_current() for bucket in self.buckets.buckets):
            self._collect_parameters(self.buckets.order)
        if self._group is None or self.buckets.order is None:
            self._join_group()
        return self.buckets

    def _join_group(self) -> None:
        """Collective. Take the current group, refuse other parameters, agree on the buckets."""
        group, buckets = dist.group.WORLD, self.buckets
        assert group is not None and buckets is not None, "ElasticRuntime.join comes first"
        self._deal(equal_shares(group.size(), self.leaves), group)
        names = self._watch.names
        known = buckets.known_order()
        facts = gather_json(group.size(), [hash_of(names), hash_of(known)], self.waits.wait)
        refuse_different_parameters([trained for trained, _ in facts], names, self.waits.wait)
        source = next(
            (rank for rank, (_, order) in enumerate(facts) if order != hash_of(None)), None
        )
        if source is not None:
            order = torch.tensor(known or [0] * len(names))
            if len({order for _, order in facts}) > 1:
                self.waits.wait(
                    [dist.broadcast(order, group=group, group_src=source, async_op=True)], group
                )
            if order.tolist() != buckets.order:
                self._collect_parameters(order.tolist())
        self._group = group

    def _deal(self, shares: tuple[int, ...], group: dist.ProcessGroup) -> None:
        """Set the numbers of micro-batches by rank, and those of this rank."""
        self.shares, self.own_leaves = shares, leaves_of_rank(group.rank(), shares)

    def release_groups(self) -> None:
        """Release the group of a generation that is over, and the partial sums of its step.

        A complete gradient stays: the members of the next group may have committed its step.
        """
        self._group, self._tree, self._current = None, SumTree(), None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def backward(self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        """Run the backward pass of a micro-batch, scaled, and keep its unscaled loss."""
        assert self.buckets is not None
        if self.waits.generation_error():
            return  # `micro_batches` raises; the gradient may be incomplete
        self.board.enter("backward")
        self._watch.before_backward()
        (scaler.scale(loss) if scaler else loss).backward()
        if self.unused == "zero":
            self._add_zeros([self.parameters[i] for i in self.buckets.missing()])
        self._watch.refuse_missing(self.buckets.missing(), self.buckets.repeated)
        self._watch.after_backward()
        self._losses.append(loss.detach())

    def skip(self) -> bool:
        """Add zeros in place of the micro-batch's gradient, and no loss; return True: it is
        done."""
        if not self.waits.generation_error():
            self.board.enter("backward")
            self._watch.before_backward()
            self._add_zeros(self.parameters)
            self._watch.after_backward()
        return True

    def _add_zeros(self, parameters: list[nn.Parameter]) -> None:
        """Add gradients of zero by autograd, whose hooks count them and fill and send the
        buckets."""
        if parameters:
            torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])

    def losses(self) -> list[float]:
        return (
            [float(loss) for loss in torch.stack(self._losses).flatten().tolist()]
            if self._losses
            else []
        )

    def hash_gradient_of(self, leaf: int | None) -> None:
        """Set `hashed_gradient` in the next step, on the rank of this micro-batch; None: of
        none."""
        self._hash_leaf = leaf

    def micro_batches(
        self, step: int, meanwhile: Callable[[], None] = lambda: None, shares: tuple[int, ...] = ()
    ) -> Iterator[int]:
        """Collective. Yield this replica's micro-batches of `step`, each for forward and backward.

        After the loop .grad is the sum over all K micro-batches of all replicas.

        meanwhile  called after the last micro-batch, while gradients are still being sent
        shares     number of micro-batches by rank, the same on all ranks; (): equal shares
        """
        if self._reducer.start_step() and self.buckets:
            self._collect_parameters(self.buckets.order)
        buckets = self._prepare()
        assert self._group is not None
        self._deal(shares or equal_shares(self._group.size(), self.leaves), self._group)
        own = self.own_leaves
        self._tree, self._current, self._losses, self.traffic = SumTree(), None, [], Traffic()
        self._slice_sums = []
        encodes = self.wire != "fp32"
        self._wire_sums = {
            b: WireSum(self.wire, row_lengths(b.parameters), (self.seed, step), self.shares)
            for b in buckets.buckets
            if encodes
        }
        self.statistics.start_step()
        start = time_mark(self.device)
        for k in own:
            leaf = Subtree(k, 1)
            if self._current and (encodes or not self._current.sibling_of(leaf)):
                self._store_subtree()
            seed_generators(splitmix64(self.seed, step, k) >> 1, self.device)
            self._current = Subtree(self._current.first, 2) if self._current else leaf
            self._watch.start(step, k)
            buckets.start_pass(
                # Autograd adds the last leaf to its sibling in the buckets.
                fill=encodes or k // 2 == own[-1] // 2,
                send=encodes or k == own[-1],
                sums=k == self._hash_leaf,
            )
            yield k
            if k == self._hash_leaf:
                self.hashed_gradient = total_of(buckets.word_sums)
            if reason := self.waits.generation_error():
                raise PeersLostError(reason, "Replica.micro_batches")
            self._watch.end()
            self.statistics.end_micro_batch(k)
        self._computed = start, time_mark(self.device)
        meanwhile()
        self._reducer.drain()
        self._tree = SumTree()
        if self._reducer.failure:
            raise self._reducer.failure
        self.statistics.exchange(self._group, self.waits.wait)

    def is_gradient_finite(self) -> bool:
        """Return whether this rank's part of the gradient is finite; False also if its sum
        overflows."""
        return not self._slice_sums or bool(torch.stack(self._slice_sums).isfinite().all())

    @property
    def replica_leaves(self) -> list[int]:
        """The micro-batches of this replica in the newest step."""
        return self.own_leaves

    def rehearsal(self, step: int, k: int = 0) -> Iterator[int]:
        """Yield micro-batch `k` of `step`; then restore buffers, drop gradients."""
        buckets = self._prepare()
        saved = [
            (m, name, b, b.clone())
            for m in self.model.modules()
            for name, b in own_buffers(m).items()
            if b is not None
        ]
        for bucket in buckets.buckets:
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                # So that a zero_grad before the backward pass shows; -0.0 + x has the bits of x.
                p.grad = view.fill_(-0.0)
        self._losses = []
        seed_generators(splitmix64(self.seed, step, k) >> 1, self.device)
        self._watch.start(step, k, thorough=True)
        buckets.start_pass(sums=True)
        yield k
        if reason := self.waits.generation_error():
            raise PeersLostError(reason, "Replica.rehearsal")
        self._watch.end()
        self.hashed_gradient = total_of(buckets.word_sums)
        self.rehearsed_finite = all(
            bool(p.grad.isfinite().all()) for p in self.parameters if p.grad is not None
        )
        self.rehearsed = float(self._losses[0])
        for p in self.parameters:
            p.grad = None
        for module, name, buffer, before in saved:
            own_buffers(module)[name] = buffer.copy_(before)

    def grad_norm_squared(self) -> None:
        """Return None; a ShardedReplica returns the squared norm summed over its workers."""

    def digest(self) -> int:
        return digest_of(self.parameters)

    def measured_s(self) -> tuple[float, float] | None:
        """Return the mean seconds of the step's own micro-batches, without waiting for other ranks,
        and of the exchange after them."""
        return (
            (seconds_between(*self._computed) / len(self.own_leaves), self.exposed_s())
            if self._computed
            else None
        )

    def exposed_s(self) -> float:
        """Return the seconds of communication after the last gradient of this step was computed."""
        return self._reducer.exposed_s()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self._reducer.close()
        self._group = None
        if self.buckets:
            self.buckets.close()

    def _store_subtree(self) -> None:
        """Move the sum in .grad to the tree, so that the next leaf starts without gradients."""
        assert self._current is not None
        if self._wire_sums:
            self._reducer.drain()  # the leaf is encoded, and its buckets can be filled again
        else:
            self._tree.add(
                self._current, Gradients([p.grad for p in self.parameters if p.grad is not None])
            )
        for p in self.parameters:
            p.grad = None
        self._current = None

    def _on_ready(self, bucket: Bucket) -> None:
        assert self.buckets is not None
        if bucket is self.buckets.buckets[-1]:
            self.board.enter("reducing")
        assert self._current is not None
        self._reducer.submit(partial(self._reduce, bucket, self._current.first))

    def _reduce(self, bucket: Bucket, k: int) -> None:
        """Collective. Sum a bucket over all replicas, in place; before leaf `k` is the last one,
        only encode it."""
        assert self._group is not None
        self.board.enter_collective(bucket.buffer.nbytes)
        if not bucket.is_current():
            raise UsageError(
                "the memory of the gradients changed between two micro-batches of a step",
                "by model.to(...) or an assignment to .data in the micro-batch loop",
                "do it between the steps",
            )
        if wire_sum := self._wire_sums.get(bucket):
            gradients = bucket.views_of(bucket.buffer)
            wire_sum.add(k, wire_sum.encode(k, gradients))
            if k != self.own_leaves[-1]:
                return
            own = wire_sum.all_reduce(gradients, self._group, self.waits, self.traffic)
        else:
            own = self._all_reduce(bucket)
        self._slice_sums.append(
            own.sum(dtype=torch.float64 if own.dtype == torch.float64 else torch.float32).double()
        )

    def _all_reduce(self, bucket: Bucket) -> torch.Tensor:
        """Collective. Sum a bucket, in place; return the slice that this rank has summed."""
        group, buffer, partials = self._group, bucket.buffer, self._partial_sums(bucket)
        assert group is not None
        is_exact = not buffer.is_cuda and buffer.dtype in (torch.float32, torch.float64)
        if is_exact and is_one_addition(self.shares):
            # gloo's all-reduce has the same bits; it takes less time and memory.
            self.waits.wait([dist.all_reduce(buffer, group=group, async_op=True)], group)
            return buffer.tensor_split(2)[group.rank()]
        return tree_all_reduce(partials, self.shares, group, buffer, self.waits, self.traffic)

    def _partial_sums(self, bucket: Bucket) -> list[tuple[Subtree, torch.Tensor]]:
        """Return this rank's partial sums of a bucket; the last one is in the bucket."""
        assert self._current is not None
        subtree, earlier = self._current, list(self._tree.stack)
        while earlier and earlier[-1][0].sibling_of(subtree):
            left, sums = earlier.pop()
            foreach_add_(bucket.views_of(bucket.buffer), [sums.tensors[i] for i in bucket.indices])
            subtree = Subtree(left.first, 2 * left.leaves)
        partials = [
            (left, bucket.flatten([sums.tensors[i] for i in bucket.indices]))
            for left, sums in earlier
        ]
        return [*partials, (subtree, bucket.buffer)]
