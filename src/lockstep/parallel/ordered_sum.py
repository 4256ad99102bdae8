"""The sum of the K micro-batches of a step in one fixed binary tree, whoever computed them.

Floating-point addition is not associative: an all-reduce gives other bits for every number of processes. Here the leaves are the K
micro-batches, whatever process they ran in, and additions follow the tree over [0, K):

    share    a process takes a contiguous block of leaves
    runs     a block is a list of whole subtrees: [3, 6) of 8 is leaf 3 and the subtree [4, 6)
    Tree     adds runs left to right and merges equal neighbours at once (a binary counter): log2(K) partial sums at most
    exchange each process sends slice j of its partial sums to process j, which finishes the tree for its slice; the slices are gathered

The bytes on the wire are those of a ring all-reduce while each process holds one run; an uneven share costs a few runs more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from lockstep.errors import UsageError
from lockstep.runtime.work import Waits


def share(rank: int, size: int, leaves: int) -> range:
    """The leaves of `rank` among `size` processes: contiguous blocks whose lengths differ by one at most."""
    each, rest = divmod(leaves, size)
    first = rank * each + min(rank, rest)
    return range(first, first + each + (rank < rest))


def refuse_empty_shares(size: int, leaves: int) -> None:
    """UsageError when some process would have no micro-batch."""
    if size > leaves:
        raise UsageError(
            f"{size} processes are running, a step has {leaves} micro-batches",
            "a process without a micro-batch has nothing to do",
            f"start {leaves} processes or fewer, or set batch.micro_batches={size}",
        )


@dataclass(frozen=True)
class Span:
    """The whole subtree over leaves [first, first + leaves)."""

    first: int
    leaves: int

    def sibling_of(self, right: Span) -> bool:
        """True when `right` is the other half of the same parent, so that the two are to be added."""
        return self.leaves == right.leaves and self.first + self.leaves == right.first and self.first % (2 * self.leaves) == 0


def runs(block: range) -> list[Span]:
    """The whole subtrees that make up a block of leaves, left to right."""
    found, first = [], block.start
    while first < block.stop:
        leaves = first & -first or 1 << (block.stop - first).bit_length()
        while first + leaves > block.stop:
            leaves >>= 1
        found.append(Span(first, leaves))
        first += leaves
    return found


Value = TypeVar("Value")


@dataclass
class Tree(Generic[Value]):
    """Partial sums of adjacent subtrees, left to right; what can be merged is merged when it comes.

    The tree over K leaves, K no power of two, ends with several subtrees; `total` adds those from the right, as the missing leaves of
    the full tree would be zeros.
    """

    stack: list[tuple[Span, Value]] = field(default_factory=list)

    def add(self, span: Span, value: Value) -> None:
        self.stack.append((span, value))
        while len(self.stack) > 1 and self.stack[-2][0].sibling_of(self.stack[-1][0]):
            (left, x), (_, y) = self.stack[-2:]
            self.stack[-2:] = [(Span(left.first, 2 * left.leaves), x + y)]  # type: ignore[operator]

    def total(self) -> Value:
        value = self.stack[-1][1]
        for _, left in reversed(self.stack[:-1]):
            value = left + value  # type: ignore[operator]
        return value


@dataclass
class Part:
    """A slice of a sum, in memory that may be used up; adding reuses the left side's memory."""

    tensor: torch.Tensor

    def __add__(self, right: Part) -> Part:
        self.tensor.add_(right.tensor)
        return self


def exchange(mine: list[tuple[Span, torch.Tensor]], leaves: int, group: dist.ProcessGroup, out: torch.Tensor, waits: Waits) -> None:
    """Collective. Put the sum of all `leaves` leaves, added in tree order, into `out` on every process.

    mine  this process's runs and their sums, each of shape (length,): those of `runs(share(rank, size, leaves))`; they are used up
    out   (length,); may be one of the sums in `mine`
    waits how to wait for what is sent and received
    """
    rank, size = group.rank(), group.size()
    if size == 1:
        total = Tree([(span, Part(value)) for span, value in mine]).total().tensor
        if total is not out:
            out.copy_(total)
        return
    if out.is_cuda:
        exchange_by_collectives(mine, leaves, group, out)
        return
    slice_len = -(-out.numel() // size)
    slices = [slice(j * slice_len, (j + 1) * slice_len) for j in range(size)]  # the last ones may be short, or empty
    others = [j for j in range(size) if j != rank]
    spans = [runs(share(r, size, leaves)) for r in range(size)]
    own = slices[rank]
    rows = {r: [value[own] for _, value in mine] if r == rank else [torch.empty_like(out[own]) for _ in spans[r]] for r in range(size)}
    works = [dist.irecv(row, group=group, group_src=r) for r in others for row in rows[r] if row.numel()]
    works += [dist.isend(value[slices[r]], group=group, group_dst=r) for r in others for _, value in mine if value[slices[r]].numel()]
    waits.finish(works, group)
    tree: Tree[Part] = Tree()
    for r in range(size):
        for span, row in zip(spans[r], rows[r], strict=True):
            tree.add(span, Part(row))
    total = tree.total().tensor
    if total.data_ptr() != out[own].data_ptr():
        out[own].copy_(total)
    works = [dist.irecv(out[slices[r]], group=group, group_src=r) for r in others if out[slices[r]].numel()]
    works += [dist.isend(out[own], group=group, group_dst=r) for r in others if out[own].numel()]
    waits.finish(works, group)


def exchange_by_collectives(mine: list[tuple[Span, torch.Tensor]], leaves: int, group: dist.ProcessGroup, out: torch.Tensor) -> None:
    """Collective. The same with two collectives, which NCCL queues on the device; on a CPU they copy more than they need to."""
    size, length = group.size(), out.numel()
    slice_len = -(-length // size)
    even = length == size * slice_len
    if even and len(mine) == 1:
        sent = mine[0][1]
    else:
        padded = [value if even else torch.nn.functional.pad(value, (0, size * slice_len - length)) for _, value in mine]
        sent = torch.stack([value.view(size, slice_len) for value in padded], dim=1).view(-1)  # (size, runs, slice)
    spans = [runs(share(r, size, leaves)) for r in range(size)]
    received = sent.new_empty(sum(map(len, spans)) * slice_len)
    dist.all_to_all_single(received, sent, [len(some) * slice_len for some in spans], [len(mine) * slice_len] * size, group=group)
    tree: Tree[torch.Tensor] = Tree()
    for span, row in zip((span for some in spans for span in some), received.view(-1, slice_len), strict=True):
        tree.add(span, row)
    gathered = out if even else sent.new_empty(size * slice_len)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, tree.total(), group=group)
    if not even:
        out.copy_(gathered[:length])
