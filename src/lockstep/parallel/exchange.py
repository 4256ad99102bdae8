"""Play the rounds of network/tree_exchange.py on tensors: an all-reduce in the order of the
tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from lockstep.network.subtrees import Subtree
from lockstep.network.tree_exchange import WHOLE, Message, Round, rounds_of_rank
from lockstep.runtime.work import WorkWaiter, start_p2p


@dataclass
class Traffic:
    """Messages and bytes that this rank has sent."""

    messages: int = 0
    bytes: int = 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        self.messages += len(tensors)
        self.bytes += sum(tensor.nbytes for tensor in tensors)


def tree_all_reduce(
    partials: Sequence[tuple[Subtree, Tensor]],
    shares: tuple[int, ...],
    group: dist.ProcessGroup | None,
    out: Tensor,
    waits: WorkWaiter,
    traffic: Traffic | None = None,
    tag: int = 0,
) -> Tensor:
    """Collective. Write the sum of all leaves, added in tree order, to `out` on every rank.

    Return the slice of `out` whose sum this rank has computed.

    partials  [(subtree, its sum (length,))] of this rank's leaves, as assigned; overwritten
    shares    numbers of leaves, by rank of the group
    out       (length,); may be one of the partial sums
    group     None: this rank has all leaves
    tag       see `start_exchange`
    """
    rank, length, sums = group.rank() if group else 0, out.numel(), dict(partials)
    reduce, gather = rounds_of_rank(rank, shares)
    own = slice(0, length)

    def between(start: int, stop: int) -> slice:
        return slice(start * length // WHOLE, stop * length // WHOLE)

    def transfer(turn: Round, tensor_of: Callable[[Message], Tensor]) -> None:
        sends, receives = (
            [(message.peer, tensor_of(message)) for message in messages] for messages in turn[:2]
        )
        if group is not None:
            waits.wait(start_exchange(sends, receives, group, traffic, tag), group)

    for turn in reduce:
        assert turn.merge is not None
        left, right, total = turn.merge
        own = next(between(part.start, part.stop) for part in total.slices if part.rank == rank)
        missing = out.new_empty(
            0 if left.node in sums and right.node in sums else own.stop - own.start
        )

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
    sends, receives = (
        [(peer, tensor) for peer, tensor in transfers if tensor.numel()]
        for transfers in (sends, receives)
    )
    if traffic:
        traffic.add([tensor for _, tensor in sends])
    return start_p2p(sends, receives, group, tag)
