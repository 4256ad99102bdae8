"""The gradients of a whole replica: hooks on the parameters fill buckets, which are summed at once.

A hook on each parameter counts the gradients that the backward pass has added (buckets.py). When a
bucket of the last micro-batch is complete, a Reducer adds it over all replicas (ordered_sum.py)
while the backward pass continues. The group of all replicas can change between generations; the
buckets stay.

The gradients of earlier micro-batches are added in the tree of ordered_sum.py: two sibling leaves
by autograd, larger subtrees by SumTree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.network.subtrees import Subtree, is_one_addition
from lockstep.network.wire_format import FORMATS
from lockstep.parallel.buckets import Bucket, GradientBuckets
from lockstep.parallel.digest import total_of
from lockstep.parallel.gradient_source import GradientSource, Pass, PassPhase, StepPlan, SumOptions
from lockstep.parallel.gradient_watch import (
    GradientWatch,
    hash_of,
    refuse_different_parameters,
    refuse_unsupported,
)
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.ordered_sum import SumTree, dtypes_added_once, tree_all_reduce
from lockstep.parallel.reducer import Reducer
from lockstep.parallel.wire_sum import WireSum, row_lengths
from lockstep.runtime.process_group import gather_json
from lockstep.runtime.torch_private import foreach_add_, modules_of, unique_parameters


@dataclass
class Gradients:
    """The gradients of all parameters; adding overwrites the left operand."""

    tensors: list[Tensor]

    def __add__(self, right: Gradients) -> Gradients:
        foreach_add_(self.tensors, right.tensors)
        return self


class BucketSource(GradientSource):
    """Buckets of a whole model. UsageError: parameters that cannot be summed, or no backward pass
    ran."""

    def __init__(self, model: nn.Module, groups: ProcessGroups, options: SumOptions) -> None:
        self.model = model
        self.options = options
        self._make_buckets()
        device = self.parameters[0].device
        super().__init__(groups, Reducer(device, groups.waits.generation_error), options)
        self._tree: SumTree[Gradients] = SumTree()
        self._current: Subtree | None = None  # the micro-batches whose sum is in .grad
        self._wire_sums: dict[Bucket, WireSum] = {}
        self._added_once = set[torch.dtype]()  # by an all-reduce between two ranks

    def _make_buckets(self, order: list[int] | None = None) -> None:
        """Find the trained parameters, and make buckets in the order of their gradients."""
        refuse_unsupported(self.model)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._found = ids_of_trained(self.model)
        self.names = list(trained)
        self.parameters = list(trained.values())
        self._watch = GradientWatch(self.names, self.parameters)
        self.buckets = GradientBuckets(
            self.parameters, self.options.bucket_bytes, self._on_ready, order
        )

    def _replace_buckets(self, order: list[int] | None = None) -> None:
        self.buckets.close()
        self._make_buckets(order)

    def reset(self) -> None:
        if self.reducer.start_step():  # a thread that was left behind may write to the old memory
            self._replace_buckets(self.buckets.order)
        self._forget_sums()
        for p in self.parameters:
            p.grad = None

    def _forget_sums(self) -> None:
        self._tree = SumTree()
        self._current = None

    def follow_parameters(self) -> bool:
        buckets = self.buckets
        if ids_of_trained(self.model) != self._found:
            self._replace_buckets()
            return True
        if not all(bucket.is_current() for bucket in buckets.buckets):
            self._replace_buckets(buckets.order)
        return buckets.order is None

    def agree(self) -> None:
        """Collective. Refuse other parameters, take the buckets of the first rank that knows the
        order of its gradients, and agree on how buckets are summed."""
        buckets = self.buckets
        group = dist.group.WORLD
        wait = self.groups.waits.wait
        assert group is not None, "ElasticRuntime.join comes first"
        names = self.names
        known = buckets.known_order()
        facts = gather_json(group.size(), [hash_of(names), hash_of(known)], wait)
        refuse_different_parameters([trained for trained, _ in facts], names, wait)
        orders = [order for _, order in facts]
        source = next((rank for rank, own in enumerate(orders) if own != hash_of(None)), None)
        if source is not None:
            order = torch.tensor(known or [0] * len(names))
            if len(set(orders)) > 1:
                wait([dist.broadcast(order, group=group, group_src=source, async_op=True)])
            if order.tolist() != buckets.order:
                self._replace_buckets(order.tolist())
        flat = [bucket.buffer for bucket in self.buckets.buckets]
        self._added_once = dtypes_added_once(flat, self.groups.replica_group, self.groups.waits)

    def start_step(self, plan: StepPlan) -> None:
        super().start_step(plan)
        wire = self.options.wire
        self._wire_sums = {
            bucket: WireSum(wire, row_lengths(bucket.parameters), plan.key, plan.shares)
            for bucket in self.buckets.buckets
            if not FORMATS[wire].is_exact
        }

    def start_pass(self, now: Pass, phase: PassPhase, where: str, *, is_hashed: bool) -> None:
        super().start_pass(now, phase, where, is_hashed=is_hashed)
        buckets = self.buckets
        leaf = Subtree(now.k, 1)
        encodes = bool(self._wire_sums)
        if self._current and (encodes or not self._current.sibling_of(leaf)):
            self._store_subtree()
        self._current = Subtree(self._current.first, 2) if self._current else leaf
        is_rehearsal = phase is PassPhase.REHEARSING
        if is_rehearsal:
            for bucket in buckets.buckets:
                for p, view in zip(bucket.parameters, bucket.views, strict=True):
                    # So that a zero_grad before the backward pass shows; -0.0 + x is x.
                    p.grad = view.fill_(-0.0)
        self._watch.start(thorough=is_rehearsal)
        buckets.start_pass(
            # Autograd adds the last leaf to its sibling in the buckets.
            fill=not is_rehearsal and (encodes or now.k // 2 == self.plan.passes[-1].k // 2),
            send=not is_rehearsal and (encodes or now.last),
            sums=is_hashed,
        )

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    def backward(self, loss: Tensor) -> None:
        if self.groups.waits.generation_error():
            return  # the replica raises it; the gradient may be incomplete
        self._before_backward()
        loss.backward()
        buckets = self.buckets
        if self.options.unused == "zero":
            self._add_zeros([self.parameters[i] for i in buckets.missing()])
        self.refuse_missing([self.names[i] for i in buckets.missing()], self.where)
        self._watch.refuse_wrong([self.names[i] for i in buckets.repeated], self.where)
        self._watch.mark()

    def _before_backward(self) -> None:
        self.count_backward("backward")
        self._watch.refuse_changes(f"{self.where}, before backward()")

    def skip(self) -> bool:
        if not self.groups.waits.generation_error():
            self.groups.board.enter("backward")
            self._before_backward()
            self._add_zeros(self.parameters)
            self._watch.mark()
        super().skip()
        return True

    def _add_zeros(self, parameters: list[nn.Parameter]) -> None:
        """Add gradients of zero by autograd, whose hooks count them and fill and send the
        buckets."""
        if parameters:
            torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])

    def end_pass(self) -> None:
        super().end_pass()
        self._watch.refuse_changes(f"{self.where}, after backward()")

    def finish_step(self) -> None:
        self._forget_sums()

    def pass_hash(self) -> int:
        return total_of(self.buckets.word_sums)

    def is_pass_finite(self) -> bool:
        return all(bool(p.grad.isfinite().all()) for p in self.parameters if p.grad is not None)

    def release(self) -> None:
        super().release()
        self._forget_sums()

    def close(self) -> None:
        super().close()
        self.buckets.close()

    def _store_subtree(self) -> None:
        """Move the sum in .grad to the tree, so that the next leaf starts without gradients."""
        assert self._current is not None
        if self._wire_sums:
            self.reducer.drain()  # the leaf is encoded, and its buckets can be filled again
        else:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            self._tree.add(self._current, Gradients(gradients))
        for p in self.parameters:
            p.grad = None
        self._current = None

    def _on_ready(self, bucket: Bucket) -> None:
        assert self._current is not None
        if bucket is self.buckets.buckets[-1]:
            self.groups.board.enter("reducing")
        self.reducer.submit(partial(self._reduce, bucket, self._current.first))

    def _reduce(self, bucket: Bucket, k: int) -> None:
        """Collective. Sum a bucket over all replicas, in place; before leaf `k` is the last one,
        only encode it."""
        self.groups.board.enter_collective(bucket.buffer.nbytes)
        if not bucket.is_current():
            raise UsageError(
                "the memory of the gradients changed between two micro-batches of a step",
                "by model.to(...) or an assignment to .data in the micro-batch loop",
                "do it between the steps",
            )
        if wire_sum := self._wire_sums.get(bucket):
            gradients = bucket.views_of(bucket.buffer)
            wire_sum.add(k, wire_sum.encode(k, gradients))
            if k != self.plan.passes[-1].k:
                return
            own = wire_sum.all_reduce(gradients, self.plan.group, self.groups.waits)
        else:
            own = self._all_reduce(bucket)
        self.note_slice(own)

    def _all_reduce(self, bucket: Bucket) -> Tensor:
        """Collective. Sum a bucket, in place; return the slice that this rank has summed."""
        plan = self.plan
        buffer = bucket.buffer
        waits = self.groups.waits
        partials = self._partial_sums(bucket)
        is_exact = buffer.dtype in self._added_once
        if plan.group is not None and is_exact and is_one_addition(plan.shares):
            # The backend's all-reduce has the same bits; it takes less time and memory.
            waits.wait([dist.all_reduce(buffer, group=plan.group, async_op=True)], plan.group)
            return buffer.tensor_split(2)[plan.group.rank()]
        return tree_all_reduce(partials, plan.shares, plan.group, buffer, waits)

    def _partial_sums(self, bucket: Bucket) -> list[tuple[Subtree, Tensor]]:
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


def ids_of_trained(model: nn.Module) -> list[int]:
    return [id(p) for p in unique_parameters(modules_of(model)) if p.requires_grad]
