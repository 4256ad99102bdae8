"""The binary tree over the K micro-batches of a step, and which rank computes which of its leaves.

The leaves are the micro-batches; a subtree covers an aligned power-of-two range of them. Each rank
gets few whole subtrees: equal numbers of leaves, or by its speed (shares.py). The tree, and so the
bits, are the same. Pure, and without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from lockstep.errors import UsageError


class Subtree(NamedTuple):
    """The whole subtree over leaves [first, first + leaves)."""

    first: int
    leaves: int

    def sibling_of(self, right: Subtree) -> bool:
        """Return whether `right` is the right half of the same parent."""
        return (
            self.leaves == right.leaves
            and self.first + self.leaves == right.first
            and self.first % (2 * self.leaves) == 0
        )

    def halves(self) -> tuple[Subtree, Subtree]:
        half = self.leaves // 2
        return Subtree(self.first, half), Subtree(self.first + half, half)


@lru_cache(maxsize=64)
def assign_subtrees(shares: tuple[int, ...]) -> tuple[tuple[Subtree, ...], ...]:
    """Assign the leaves to ranks, of which rank r computes `shares[r]`: of each its largest subtree
    first. Blocks of powers of two, the largest first, lie side by side without gaps.
    """
    assigned: list[list[Subtree]] = [[] for _ in shares]
    first = 0
    for leaves in powers_of_two_down_from(max(shares)):
        # The bits of a share are its subtrees. Larger ones first: so each starts at a multiple of
        # its size.
        for own in (own for share, own in zip(shares, assigned, strict=True) if share & leaves):
            own.append(Subtree(first, leaves))
            first += leaves
    return tuple(map(tuple, assigned))


@lru_cache(maxsize=64)
def equal_shares(size: int, leaves: int) -> tuple[int, ...]:
    """Return the numbers of leaves of `size` equal ranks: at most ceil(K / N), in few subtrees."""
    refuse_idle_ranks(size, leaves)
    most = -(-leaves // size)
    # The largest single subtree of a rank: one subtree is one transfer.
    block = 1 << most.bit_length() - 1
    # Blocks, so that each rank has one.
    halved = max(0, size - leaves // block - (leaves % block).bit_count())
    whole = leaves // block - halved if halved else size
    return fit_shares((most,) * whole + (block // 2,) * (size - whole), leaves)


def fit_shares(limits: Sequence[int], leaves: int) -> tuple[int, ...]:
    """Return numbers of leaves of at least 1 and at most `limits`, whose sum is `leaves`.

    Every subtree beyond a rank's first costs a transfer, so large blocks are dealt out first.
    """
    shares = [0] * len(limits)
    rest = leaves
    idle = len(limits)
    for block in powers_of_two_down_from(max(limits)):
        # Ranks without a leaf first: their first subtree costs no transfer. A leaf is left for
        # each.
        for rank in sorted(range(len(limits)), key=lambda rank: shares[rank] > 0):
            if shares[rank] + block <= limits[rank] and rest - block >= idle - (shares[rank] == 0):
                idle -= shares[rank] == 0
                shares[rank] += block
                rest -= block
    assert rest == 0, f"{leaves} leaves do not fit {limits}"
    return tuple(shares)


def powers_of_two_down_from(number: int) -> list[int]:
    """Return the powers of two up to `number`, the largest first."""
    return [1 << bit for bit in reversed(range(number.bit_length()))]


def leaves_of_rank(rank: int, shares: tuple[int, ...]) -> list[int]:
    """Return the leaves of `rank`, ascending."""
    return [
        k
        for subtree in assign_subtrees(shares)[rank]
        for k in range(subtree.first, subtree.first + subtree.leaves)
    ]


def is_one_addition(shares: tuple[int, ...]) -> bool:
    """Return whether the ranks add one subtree each, once: addition commutes, so any all-reduce
    does."""
    return len(shares) == 2 and sum(map(len, assign_subtrees(shares))) == 2


def refuse_idle_ranks(size: int, leaves: int) -> None:
    """UsageError: some process would have no micro-batch."""
    if size > leaves:
        raise UsageError(
            f"{size} processes are running, a step has {leaves} micro-batches",
            "each process needs at least one micro-batch",
            f"start {leaves} processes or fewer, or set micro_batches={size}",
        )
