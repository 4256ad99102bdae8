"""Sum the K micro-batches of a step in one fixed binary tree, for any number of ranks.

Floating-point addition is not associative: an all-reduce gives different bits for each number of
processes. Here the leaves are the K micro-batches, and additions follow the tree over [0, K):

    network/subtrees.py  which rank computes which leaves
    SumTree              merges equal neighbors on arrival: at most log2(K) partial sums
    tree_all_reduce      adds the partial sums of all ranks, in rounds (network/tree_exchange.py)
    FlatSum              the sum of one buffer, from its leaves to the result on all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.network.subtrees import Subtree
from lockstep.network.tree_exchange import WHOLE, Message, Round, rounds_of_rank
from lockstep.runtime.process_group import gather_json
from lockstep.runtime.work import WorkWaiter, start_p2p

Value = TypeVar("Value")
GLOO_ADDS = {torch.float32, torch.float64}  # each pair of numbers once, on a CPU
PROBED_ELEMENTS = 2**22  # at most, of a buffer: under 200 MB of memory


@dataclass
class SumTree(Generic[Value]):
    """Partial sums of adjacent subtrees, left to right, merged on arrival. Tensors are added in
    place, to the left operand.

    If K is not a power of two, several subtrees remain; `total` adds them from the right, as if the
    missing leaves of the full tree were zeros.
    """

    stack: list[tuple[Subtree, Value]] = field(default_factory=list)

    def add(self, subtree: Subtree, value: Value) -> None:
        self.stack.append((subtree, value))
        # As a carry in a binary counter: two equal neighbors make one subtree of twice the size.
        while len(self.stack) > 1 and self.stack[-2][0].sibling_of(self.stack[-1][0]):
            (left, x), (_, y) = self.stack[-2:]
            x += y  # type: ignore[operator]
            self.stack[-2:] = [(Subtree(left.first, 2 * left.leaves), x)]

    def total(self) -> Value:
        value = self.stack[-1][1]
        for _, left in reversed(self.stack[:-1]):
            left += value  # type: ignore[operator]
            value = left
        return value


class FlatSum:
    """The sum of one buffer over the leaves of a step, which travels as it is.

    shares  number of leaves by rank
    """

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self.tree: SumTree[Any] = SumTree()

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """Return the parts of a buffer that `encode` and `all_reduce` take."""
        return [flat]

    def encode(self, k: int, parts: Sequence[Tensor]) -> Tensor:
        """Return leaf `k` as it travels."""
        flat = [part.reshape(-1) for part in parts]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def add(self, k: int, flat: Tensor) -> None:
        """Add leaf `k`, which may be overwritten."""
        self.tree.add(Subtree(k, 1), flat)

    def compact(self) -> None:
        """Copy partial sums out of larger storages, which can then be freed."""
        self.replace(
            (subtree, flat.clone() if flat.untyped_storage().nbytes() > flat.nbytes else flat)
            for subtree, flat in self.tree.stack
        )

    def replace(self, partials: Iterable[tuple[Subtree, Tensor]]) -> None:
        """Take other partial sums, from left to right."""
        tree = SumTree[Any]()
        for subtree, flat in partials:
            tree.add(subtree, flat)
        self.tree = tree

    def all_reduce(
        self,
        out: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        waits: WorkWaiter,
        tag: int = 0,
    ) -> Tensor:
        """Collective. Write the sum of all leaves of all ranks to `out`, the parts of a buffer.

        Return the slice of it that this rank owns. group None: this rank has all leaves.
        """
        (whole,) = out
        partials = self.tree.stack
        self.tree = SumTree()
        return tree_all_reduce(partials, self.shares, group, whole, waits, tag)


def merged_subtrees(leaves: Iterable[int]) -> list[Subtree]:
    """Return the subtrees that remain when these leaves, ascending, are added to a SumTree."""
    tree: SumTree[int] = SumTree()
    for k in leaves:
        tree.add(Subtree(k, 1), 0)
    return [subtree for subtree, _ in tree.stack]


def tree_all_reduce(
    partials: Sequence[tuple[Subtree, Tensor]],
    shares: tuple[int, ...],
    group: dist.ProcessGroup | None,
    out: Tensor,
    waits: WorkWaiter,
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
    rank = group.rank() if group else 0
    length = out.numel()
    sums = dict(partials)
    reduce, gather = rounds_of_rank(rank, shares)
    own = slice(0, length)

    def between(start: int, stop: int) -> slice:
        return slice(start * length // WHOLE, stop * length // WHOLE)

    def transfer(turn: Round, tensor_of: Callable[[Message], Tensor]) -> None:
        sends = [(message.peer, tensor_of(message)) for message in turn[0]]
        receives = [(message.peer, tensor_of(message)) for message in turn[1]]
        if group is not None:
            waits.wait(start_exchange(sends, receives, group, tag), group)

    for turn in reduce:
        assert turn.merge is not None
        left, right, total = turn.merge
        own = next(between(part.start, part.stop) for part in total.slices if part.rank == rank)
        has_both = left.node in sums and right.node in sums
        missing = out.new_empty(0 if has_both else own.stop - own.start)

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


def dtypes_added_once(
    buffers: Sequence[Tensor], group: dist.ProcessGroup | None, waits: WorkWaiter
) -> set[torch.dtype]:
    """Collective of two replicas on GPUs. Return of which dtypes the backend's all-reduce between
    two ranks has the bits of one addition: on GPUs, those of which it has been tried."""
    if not buffers[0].is_cuda:
        return GLOO_ADDS
    if group is None or group.size() != 2 or "nccl" not in dist.get_backend_config(group):
        return set()
    own: dict[torch.dtype, bool] = {}
    for like in buffers:
        own[like.dtype] = adds_once(group, like, waits) and own.get(like.dtype, True)
    agreed = gather_json(group.size(), list(own.values()), waits.wait)
    return {dtype for dtype, *flags in zip(own, *agreed, strict=True) if all(flags)}


def adds_once(group: dist.ProcessGroup, like: Tensor, waits: WorkWaiter) -> bool:
    """Collective of two ranks. Try whether the backend's all-reduce of a buffer like this one has
    the bits of one addition here: of random numbers of many magnitudes, subnormal ones and zeros of
    both signs among them."""
    generator = torch.Generator(like.device).manual_seed(0)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    place: dict[str, Any] = {"generator": generator, "device": like.device}
    shape = 2, min(like.numel(), PROBED_ELEMENTS)
    halves = torch.randn(shape, dtype=dtype, **place)
    halves *= torch.exp2(torch.randint(-8, 9, shape, dtype=dtype, **place))
    halves = halves.to(like.dtype)
    halves[:, ::5] *= torch.finfo(like.dtype).tiny
    halves[:, ::7] *= 0
    total = halves[group.rank()].clone()
    waits.wait([dist.all_reduce(total, group=group, async_op=True)], group)
    return torch.equal(total.view(torch.uint8), (halves[0] + halves[1]).view(torch.uint8))


def start_exchange(
    sends: Iterable[tuple[int, Tensor]],
    receives: Iterable[tuple[int, Tensor]],
    group: dist.ProcessGroup,
    tag: int = 0,
) -> list[dist.Work]:
    """Start to send (to rank, tensor) and receive (from rank, tensor); skip empty tensors.

    A gloo receive takes only a message with its tag. If a rank skips a unit by mistake, the others
    wait until it reports the error; without tags they would receive the next unit instead.
    """
    sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
    receives = [(peer, tensor) for peer, tensor in receives if tensor.numel()]
    return start_p2p(sends, receives, group, tag)
