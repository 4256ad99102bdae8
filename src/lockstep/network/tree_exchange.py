"""The messages of an all-reduce in the order of the tree in subtrees.py: recursive halving,
doubling.

The sum of a node lies in equal slices on the ranks that computed its leaves. At a node, the slices
of the left and of the right half are cut to equal slices for the ranks of both, and each rank
receives what it lacks and adds. Where every rank has one subtree of the same size, a rank exchanges
half of its slice with one neighbor at distance 1, 2, 4, ...: log2(N) messages, the bytes of a ring,
the largest ones between nearest neighbors. The complete slices then return the same way.

Positions in a buffer are fractions of its length, in units of 1 / WHOLE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from lockstep.network.subtrees import Subtree, assign_subtrees

WHOLE = 1 << 48


class Slice(NamedTuple):
    """A range of a buffer, on one rank."""

    rank: int
    start: int
    stop: int


class Sum(NamedTuple):
    """The sum of the leaves of `node`: equal slices on the ranks that computed them."""

    node: Subtree
    slices: list[Slice]


class Merge(NamedTuple):
    """An addition of the tree, each slice of it on one rank."""

    left: Sum
    right: Sum
    total: Sum


Step = tuple[Sum, Sum]  # a sum goes from the slices of the first into those of the second


class Message(NamedTuple):
    """A slice of the sum of `node`, to or from another rank."""

    node: Subtree
    peer: int
    start: int
    stop: int


class Round(NamedTuple):
    """Messages of one rank that travel together; when reducing, also the addition that follows."""

    sends: list[Message]
    receives: list[Message]
    merge: Merge | None = None


@lru_cache(maxsize=64)
def rounds_of_rank(rank: int, shares: tuple[int, ...]) -> tuple[list[Round], list[Round]]:
    """Return the rounds (that add, that return the complete sum) of one rank. shares: leaves by
    rank."""
    merges, returns = exchange_steps(shares)
    reduce = [
        round_of(rank, [(merge.left, merge.total), (merge.right, merge.total)], merge)
        for merge in merges
        if any(part.rank == rank for part in merge.total.slices)
    ]
    return reduce, rounds_of(rank, returns)


@lru_cache(maxsize=64)
def exchange_steps(shares: tuple[int, ...]) -> tuple[list[Merge], list[list[Step]]]:
    """Return the additions of all ranks, children first, then the steps that return the sum."""
    assigned = assign_subtrees(shares)
    merges = merges_of(
        {subtree: owner for owner, subtrees in enumerate(assigned) for subtree in subtrees}
    )
    # The sum returns through the tree of the main subtrees alone: each rank needs it once.
    mains = merges_of({subtrees[0]: owner for owner, subtrees in enumerate(assigned)})
    first = [(merges[-1].total, mains[-1].total)] if mains else []
    return merges, [
        first,
        *([(merge.total, merge.left), (merge.total, merge.right)] for merge in reversed(mains)),
    ]


class OwnerPlan(NamedTuple):
    """One rank's messages when the owner of each slice of the sum receives all its summands."""

    own: Slice
    exchange: Round
    gather: list[Round]


@lru_cache(maxsize=64)
def owner_rounds(rank: int, shares: tuple[int, ...]) -> OwnerPlan:
    """Return the messages of one rank when each subtree is sent to the owners of the slices at
    once.

    No sum of several ranks is sent but the complete one. If partial sums take more bytes than
    leaves (wire_format.py), this takes the fewest, in N - 1 messages per subtree instead of
    log2(N).
    """
    assigned = assign_subtrees(shares)
    _, (whole, *returns) = exchange_steps(shares)
    slices = whole[0][1].slices if whole else [Slice(rank, 0, WHOLE)]
    own = next(part for part in slices if part.rank == rank)
    exchange = Round([], [])
    for peer, start, stop in (part for part in slices if part.rank != rank):
        exchange.sends.extend(Message(node, peer, start, stop) for node in assigned[rank])
        exchange.receives.extend(
            Message(node, peer, own.start, own.stop) for node in assigned[peer]
        )
    return OwnerPlan(own, exchange, rounds_of(rank, returns))


def merges_of(owners: dict[Subtree, int]) -> list[Merge]:
    """Return the additions of the tree over subtrees that ranks own, children first."""
    merges: list[Merge] = []
    end = max(subtree.first + subtree.leaves for subtree in owners)

    def visit(node: Subtree) -> Sum | None:
        if node in owners:
            return Sum(node, [Slice(owners[node], 0, WHOLE)])
        # Past the last leaf, as K may be no power of two.
        if node.leaves == 1 or node.first >= end:
            return None
        left, right = map(visit, node.halves())
        if left and right:
            merges.append(Merge(left, right, Sum(node, merged_slices(left, right))))
            return merges[-1].total
        return left or right

    visit(Subtree(0, 1 << (end - 1).bit_length()))
    return merges


def merged_slices(left: Sum, right: Sum) -> list[Slice]:
    """Return equal slices for the ranks of both halves, each close to what its rank has."""
    # Ranks in the order of the middles of their slices: a new slice then overlaps the old one.
    centers = {part.rank: part.start + part.stop for part in (*right.slices, *left.slices)}
    ranks = sorted(centers, key=lambda rank: centers[rank])
    return [
        Slice(rank, i * WHOLE // len(ranks), (i + 1) * WHOLE // len(ranks))
        for i, rank in enumerate(ranks)
    ]


def round_of(rank: int, steps: Iterable[Step], merge: Merge | None = None) -> Round:
    """Return the messages of `rank` in these steps."""
    sends, receives = [], []
    for before, after in steps:
        for sender, receiver, start, stop in transfers(before, after):
            if sender == rank:
                sends.append(Message(before.node, receiver, start, stop))
            elif receiver == rank:
                receives.append(Message(before.node, sender, start, stop))
    return Round(sends, receives, merge)


def rounds_of(rank: int, turns: Iterable[Iterable[Step]]) -> list[Round]:
    """Return the rounds in which `rank` sends or receives."""
    rounds = [round_of(rank, steps) for steps in turns]
    return [turn for turn in rounds if turn.sends or turn.receives]


def transfers(before: Sum, after: Sum) -> Iterator[tuple[int, int, int, int]]:
    """Yield (sender, receiver, start, stop) of what brings a sum into the slices of another one."""
    # Both lists cover the buffer from left to right, so one pass over them finds all overlaps.
    sources, targets = iter(before.slices), iter(after.slices)
    source, target = next(sources), next(targets)
    while True:
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if source.rank != target.rank and start < stop:
            yield source.rank, target.rank, start, stop
        if stop == WHOLE:
            return
        if source.stop == stop:
            source = next(sources)
        if target.stop == stop:
            target = next(targets)
