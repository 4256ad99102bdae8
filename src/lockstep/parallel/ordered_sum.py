"""Sum the K micro-batches of a step in one fixed binary tree, for any number of ranks.

Floating-point addition is not associative: an all-reduce gives different bits for each number of
processes. Here the leaves are the K micro-batches, and additions follow the tree over [0, K):

    assign_subtrees  which rank computes which leaves: few whole subtrees per rank, equal numbers of
                     leaves
    SumTree          merges equal neighbors on arrival: at most log2(K) partial sums
    exchange.py      adds the partial sums of all ranks in tree order
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from lockstep.errors import UsageError


class Subtree(NamedTuple):
    """The whole subtree over leaves [first, first + leaves)."""

    first: int
    leaves: int

    def sibling_of(self, right: Subtree) -> bool:
        """Return whether `right` is the right half of the same parent."""
        return self.leaves == right.leaves and self.first + self.leaves == right.first and self.first % (2 * self.leaves) == 0

    def halves(self) -> tuple[Subtree, Subtree]:
        half = self.leaves // 2
        return Subtree(self.first, half), Subtree(self.first + half, half)


def whole_subtrees(block: range) -> list[Subtree]:
    """Split a block into the largest aligned power-of-two ranges of leaves, left to right."""
    parts, first = [], block.start
    while first < block.stop:
        leaves = first & -first or 1 << (block.stop - first).bit_length()
        while first + leaves > block.stop:
            leaves >>= 1
        parts.append(Subtree(first, leaves))
        first += leaves
    return parts


@lru_cache(maxsize=64)
def assign_subtrees(size: int, leaves: int) -> tuple[tuple[Subtree, ...], ...]:
    """Assign the leaves to `size` ranks: of each rank its main subtree, then small extra ones.

    No rank has more than ceil(K / N) leaves. Every subtree beyond the first costs a transfer, so
    each rank gets one aligned block, and only the leaves that are left over are cut up.
    """
    refuse_idle_ranks(size, leaves)
    most = -(-leaves // size)
    block = 1 << most.bit_length() - 1
    aligned = leaves // block * block
    blocks = [*(Subtree(first, block) for first in range(0, aligned, block)), *whole_subtrees(range(aligned, leaves))]
    while len(blocks) < size:
        widest = max(range(len(blocks)), key=lambda i: (blocks[i].leaves, i))
        blocks[widest : widest + 1] = blocks[widest].halves()
    assigned = [[main] for main in blocks[:size]]
    extras = blocks[size:]
    while extras:
        extra = extras.pop(0)
        rank = next((r for r, own in enumerate(assigned) if sum(subtree.leaves for subtree in own) + extra.leaves <= most), None)
        if rank is None:
            extras = [*extra.halves(), *extras]
        else:
            assigned[rank].append(extra)
    return tuple(map(tuple, assigned))


def leaves_of_rank(rank: int, size: int, leaves: int) -> list[int]:
    """Return the leaves of `rank`, ascending."""
    return [k for subtree in assign_subtrees(size, leaves)[rank] for k in range(subtree.first, subtree.first + subtree.leaves)]


def is_one_addition(size: int, leaves: int) -> bool:
    """Return whether the ranks add one subtree each, once: addition commutes, so any all-reduce does."""
    return size == 2 and sum(map(len, assign_subtrees(size, leaves))) == 2


def refuse_idle_ranks(size: int, leaves: int) -> None:
    """UsageError: some process would have no micro-batch."""
    if size > leaves:
        raise UsageError(
            f"{size} processes are running, a step has {leaves} micro-batches",
            "each process needs at least one micro-batch",
            f"start {leaves} processes or fewer, or set batch.micro_batches={size}",
        )


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


def merged_subtrees(leaves: Iterable[int]) -> list[Subtree]:
    """Return the subtrees that remain when these leaves, ascending, are added to a SumTree."""
    tree: SumTree[int] = SumTree()
    for k in leaves:
        tree.add(Subtree(k, 1), 0)
    return [subtree for subtree, _ in tree.stack]
