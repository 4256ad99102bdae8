"""All-reduce in the order of the tree in ordered_sum.py: recursive halving, then doubling.

The sum of a node lies in equal slices on the ranks that computed its leaves. At a node, the slices
of the left and of the right half are cut to equal slices for the ranks of both, and each rank
receives what it lacks and adds. Where every rank has one subtree of the same size, a rank exchanges
half of its slice with one neighbor at distance 1, 2, 4, ...: log2(N) messages, the bytes of a ring,
the largest ones between nearest neighbors. The complete slices then return the same way.

Positions in a buffer are fractions of its length, in units of 1 / WHOLE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.ordered_sum import Subtree, assign_subtrees
from lockstep.runtime.work import WorkWaiter, start_p2p

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


@dataclass
class Traffic:
    """Messages and bytes that this rank has sent."""

    messages: int = 0
    bytes: int = 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        self.messages += len(tensors)
        self.bytes += sum(tensor.nbytes for tensor in tensors)


@lru_cache(maxsize=64)
def rounds_of_rank(rank: int, size: int, leaves: int) -> tuple[list[Round], list[Round]]:
    """Return the rounds (that add, that return the complete sum) of one rank."""
    assigned = assign_subtrees(size, leaves)
    merges = merges_of({subtree: owner for owner, subtrees in enumerate(assigned) for subtree in subtrees})
    reduce = [
        round_of(rank, [(merge.left, merge.total), (merge.right, merge.total)], merge)
        for merge in merges
        if any(part.rank == rank for part in merge.total.slices)
    ]
    # The sum returns through the tree of the main subtrees alone: each rank needs it once.
    mains = merges_of({subtrees[0]: owner for owner, subtrees in enumerate(assigned)})
    steps = [(merges[-1].total, mains[-1].total)] if mains else []
    gather = [round_of(rank, steps), *(round_of(rank, [(m.total, m.left), (m.total, m.right)]) for m in reversed(mains))]
    return reduce, [turn for turn in gather if turn.sends or turn.receives]


def merges_of(owners: dict[Subtree, int]) -> list[Merge]:
    """Return the additions of the tree over subtrees that ranks own, children first."""
    merges: list[Merge] = []
    end = max(subtree.first + subtree.leaves for subtree in owners)

    def visit(node: Subtree) -> Sum | None:
        if node in owners:
            return Sum(node, [Slice(owners[node], 0, WHOLE)])
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
    centers = {part.rank: part.start + part.stop for part in (*right.slices, *left.slices)}
    ranks = sorted(centers, key=lambda rank: centers[rank])
    return [Slice(rank, i * WHOLE // len(ranks), (i + 1) * WHOLE // len(ranks)) for i, rank in enumerate(ranks)]


def round_of(rank: int, steps: Iterable[tuple[Sum, Sum]], merge: Merge | None = None) -> Round:
    """Return the messages of `rank` that bring each first sum into the slices of the second."""
    sends = [message for before, after in steps for message in overlaps(rank, before.node, before, after)]
    receives = [message for before, after in steps for message in overlaps(rank, before.node, after, before)]
    return Round(sends, receives, merge)


def overlaps(rank: int, node: Subtree, own: Sum, others: Sum) -> Iterator[Message]:
    """Yield the parts of this rank's slice of `own` that other ranks have in `others`."""
    for mine in [part for part in own.slices if part.rank == rank]:
        for other in others.slices:
            start, stop = max(mine.start, other.start), min(mine.stop, other.stop)
            if other.rank != rank and start < stop:
                yield Message(node, other.rank, start, stop)


def tree_all_reduce(
    partials: Sequence[tuple[Subtree, Tensor]],
    leaves: int,
    group: dist.ProcessGroup,
    out: Tensor,
    waits: WorkWaiter,
    traffic: Traffic | None = None,
    tag: int = 0,
) -> Tensor:
    """Collective. Write the sum of all leaves, added in tree order, to `out` on every rank.

    Return the slice of `out` whose sum this rank has computed.

    partials  [(subtree, its sum (length,))] of this rank's leaves, as assigned; overwritten
    out       (length,); may be one of the partial sums
    tag       see `start_exchange`
    """
    rank, length, sums = group.rank(), out.numel(), dict(partials)
    reduce, gather = rounds_of_rank(rank, group.size(), leaves)
    own = slice(0, length)

    def between(start: int, stop: int) -> slice:
        return slice(start * length // WHOLE, stop * length // WHOLE)

    def transfer(turn: Round, tensor_of: Callable[[Message], Tensor]) -> None:
        sends, receives = ([(message.peer, tensor_of(message)) for message in messages] for messages in turn[:2])
        waits.wait(start_exchange(sends, receives, group, traffic, tag), group)

    for turn in reduce:
        assert turn.merge is not None
        left, right, total = turn.merge
        own = next(between(part.start, part.stop) for part in total.slices if part.rank == rank)
        missing = out.new_empty(0 if left.node in sums and right.node in sums else own.stop - own.start)

        def part_of_sum(message: Message, own: slice = own, missing: Tensor = missing) -> Tensor:
            part = between(message.start, message.stop)
            if message.node in sums:
                return sums[message.node][part]
            return missing[part.start - own.start : part.stop - own.start]

        transfer(turn, part_of_sum)
        held = [sums.pop(half.node) for half in (left, right) if half.node in sums]
        held[0][own].add_(held[1][own] if len(held) > 1 else missing)
        sums[total.node] = held[0]
    (total_sum,) = sums.values()
    if total_sum is not out:
        out[own].copy_(total_sum[own])
    for turn in gather:
        transfer(turn, lambda message: out[between(message.start, message.stop)])
    return out[own]


def start_exchange(
    sends: Iterable[tuple[int, Tensor]],
    receives: Iterable[tuple[int, Tensor]],
    group: dist.ProcessGroup,
    traffic: Traffic | None = None,
    tag: int = 0,
) -> list[dist.Work]:
    """Start to send (to rank, tensor) and receive (from rank, tensor); skip empty tensors.

    A gloo receive takes only a message with its tag. If a rank skips a unit by mistake, the others
    wait until it reports the error; without tags they would receive the next unit instead.
    """
    sends, receives = ([(peer, tensor) for peer, tensor in transfers if tensor.numel()] for transfers in (sends, receives))
    if traffic:
        traffic.add([tensor for _, tensor in sends])
    return start_p2p(sends, receives, group, tag)
