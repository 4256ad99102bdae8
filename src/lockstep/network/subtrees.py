"""The binary tree over the K micro-batches of a step, and which rank computes which of its leaves.

The leaves are the micro-batches; a subtree covers an aligned power-of-two range of them. Each rank
gets few whole subtrees and equal numbers of leaves. Pure, and without torch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

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
