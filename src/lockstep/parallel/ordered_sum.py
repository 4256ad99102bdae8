"""Sum the K micro-batches of a step in one fixed binary tree, for any number of ranks.

Floating-point addition is not associative: an all-reduce gives different bits for each number of
processes. Here the leaves are the K micro-batches, and additions follow the tree over [0, K):

    leaves_of_rank   a rank computes a contiguous block of leaves
    subtrees         a block is a list of subtrees: [3, 6) of 8 is leaf 3 and [4, 6)
    SumTree          merges equal neighbors on arrival: at most log2(K) partial sums
    tree_all_reduce  rank j finishes the tree for slice j; the slices are all-gathered. The traffic
                     of a ring all-reduce while each rank holds one subtree
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.parallel.groups import start_exchange
from lockstep.runtime.work import WorkWaiter


def leaves_of_rank(rank: int, size: int, leaves: int) -> range:
    """Return the leaves of `rank`: contiguous blocks of equal size, the first ones one larger."""
    each, rest = divmod(leaves, size)
    first = rank * each + min(rank, rest)
    return range(first, first + each + (rank < rest))


def refuse_idle_ranks(size: int, leaves: int) -> None:
    """UsageError: some process would have no micro-batch."""
    if size > leaves:
        raise UsageError(
            f"{size} processes are running, a step has {leaves} micro-batches",
            "each process needs at least one micro-batch",
            f"start {leaves} processes or fewer, or set batch.micro_batches={size}",
        )


@dataclass(frozen=True)
class Subtree:
    """The whole subtree over leaves [first, first + leaves)."""

    first: int
    leaves: int

    def sibling_of(self, right: Subtree) -> bool:
        """Return whether `right` is the right half of the same parent."""
        return self.leaves == right.leaves and self.first + self.leaves == right.first and self.first % (2 * self.leaves) == 0


def subtrees(block: range) -> list[Subtree]:
    """Split a block into the largest aligned power-of-two ranges of leaves, left to right."""
    parts, first = [], block.start
    while first < block.stop:
        leaves = first & -first or 1 << (block.stop - first).bit_length()
        while first + leaves > block.stop:
            leaves >>= 1
        parts.append(Subtree(first, leaves))
        first += leaves
    return parts


Value = TypeVar("Value")


@dataclass
class SumTree(Generic[Value]):
    """Partial sums of adjacent subtrees, left to right, merged on arrival.

    If K is not a power of two, several subtrees remain; `total` adds them from the right, as if the
    missing leaves of the full tree were zeros.
    """

    stack: list[tuple[Subtree, Value]] = field(default_factory=list)

    def add(self, subtree: Subtree, value: Value) -> None:
        self.stack.append((subtree, value))
        while len(self.stack) > 1 and self.stack[-2][0].sibling_of(self.stack[-1][0]):
            (left, x), (_, y) = self.stack[-2:]
            self.stack[-2:] = [(Subtree(left.first, 2 * left.leaves), x + y)]  # type: ignore[operator]

    def total(self) -> Value:
        value = self.stack[-1][1]
        for _, left in reversed(self.stack[:-1]):
            value = left + value  # type: ignore[operator]
        return value


@dataclass
class PartialSum:
    """A slice of a sum; adding overwrites the left operand."""

    tensor: Tensor

    def __add__(self, right: PartialSum) -> PartialSum:
        self.tensor.add_(right.tensor)
        return self


def tree_all_reduce(partials: list[tuple[Subtree, Tensor]], leaves: int, group: dist.ProcessGroup, out: Tensor, waits: WorkWaiter) -> None:
    """Collective. Write the sum of all leaves, added in tree order, to `out` on every rank.

    partials  [(subtree, its sum (length,))] of this rank's leaves; overwritten
    out       (length,); may be one of the partial sums
    """
    rank, size = group.rank(), group.size()
    if size == 1:
        total = SumTree([(subtree, PartialSum(value)) for subtree, value in partials]).total().tensor
        if total is not out:
            out.copy_(total)
        return
    if out.is_cuda:
        tree_all_reduce_collectives(partials, leaves, group, out)
        return
    slice_len = -(-out.numel() // size)
    slices = [slice(j * slice_len, (j + 1) * slice_len) for j in range(size)]  # the last ones may be short or empty
    parts = [out[piece] for piece in slices]
    own = parts[rank]
    by_rank = [subtrees(leaves_of_rank(r, size, leaves)) for r in range(size)]
    rows = [[torch.empty_like(own) for _ in trees] for trees in by_rank]
    rows[rank] = [value[slices[rank]] for _, value in partials]
    waits.wait(start_exchange([[value[piece] for _, value in partials] for piece in slices], rows, group), group)
    total = sum_of_rows(by_rank, rows).total().tensor
    if total.data_ptr() != own.data_ptr():
        own.copy_(total)
    waits.wait(start_exchange([[own]] * size, [[part] for part in parts], group), group)


def sum_of_rows(by_member: list[list[Subtree]], rows: list[list[Tensor]]) -> SumTree[PartialSum]:
    """Add the rows of each member's subtrees, which are adjacent, in tree order."""
    tree: SumTree[PartialSum] = SumTree()
    for member_subtrees, member_rows in zip(by_member, rows, strict=True):
        for subtree, row in zip(member_subtrees, member_rows, strict=True):
            tree.add(subtree, PartialSum(row))
    return tree


def tree_all_reduce_collectives(partials: list[tuple[Subtree, Tensor]], leaves: int, group: dist.ProcessGroup, out: Tensor) -> None:
    """Collective. `tree_all_reduce` by two collectives, which NCCL queues on the device."""
    size, length = group.size(), out.numel()
    slice_len = -(-length // size)
    even = length == size * slice_len
    if even and len(partials) == 1:
        sent = partials[0][1]
    else:
        padded = [value if even else torch.nn.functional.pad(value, (0, size * slice_len - length)) for _, value in partials]
        sent = torch.stack([value.view(size, slice_len) for value in padded], dim=1).view(-1)  # (size, subtrees, slice)
    by_rank = [subtrees(leaves_of_rank(r, size, leaves)) for r in range(size)]
    received = sent.new_empty(sum(map(len, by_rank)) * slice_len)
    dist.all_to_all_single(received, sent, [len(trees) * slice_len for trees in by_rank], [len(partials) * slice_len] * size, group=group)
    tree: SumTree[Tensor] = SumTree()
    for subtree, row in zip((subtree for trees in by_rank for subtree in trees), received.view(-1, slice_len), strict=True):
        tree.add(subtree, row)
    gathered = out if even else sent.new_empty(size * slice_len)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, tree.total(), group=group)
    if not even:
        out.copy_(gathered[:length])
