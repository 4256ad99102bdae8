"""The ordered sum of gradients that travel in a format of network/wire_format.py.

Each leaf is encoded where it is computed, before anything is added to it, and decoded where it is
added. The owner of a slice adds all leaves of the slice, in fp32 and in tree order, and encodes the
sum; every rank, the owner too, uses what it decodes from that. So the sum has the same bits for any
number of ranks and of shards, one included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.data.order import splitmix64
from lockstep.errors import UsageError
from lockstep.network.subtrees import Subtree
from lockstep.network.tree_exchange import Message, owner_rounds
from lockstep.network.wire_format import (
    FORMATS,
    Sections,
    Wire,
    between,
    blocks_of,
    element_count,
    encoded_bytes,
    wire_order,
)
from lockstep.parallel.exchange import Traffic, start_exchange
from lockstep.parallel.ordered_sum import FlatSum, SumTree
from lockstep.parallel.wire_codec import decode, encode
from lockstep.runtime.torch_private import foreach_copy_
from lockstep.runtime.work import WorkWaiter

Parts = Iterable[tuple[Message, Sequence[Tensor]]]


@dataclass
class LeafSum:
    """A sum of leaves: encoded, one by one, or if they are many added in fp32. Adding may overwrite
    the left operand.

    most     leaves that are kept encoded
    tensors  uint8, one per leaf; or one of fp32
    """

    most: int
    sections: Sections
    tensors: list[Tensor]

    @property
    def is_encoded(self) -> bool:
        return self.tensors[0].dtype == torch.uint8

    @classmethod
    def empty(cls, most: int, sections: Sections, leaves: int, device: torch.device) -> LeafSum:
        if leaves > most:
            return cls(most, sections, [torch.empty(element_count(sections), device=device)])
        leaf = torch.empty(encoded_bytes(sections), dtype=torch.uint8, device=device)
        return cls(most, sections, [torch.empty_like(leaf) for _ in range(leaves)])

    def slice(self, elements: slice) -> LeafSum:
        """Return a view of these elements, whole blocks."""
        part = byte_range(self.sections, elements) if self.is_encoded else elements
        tensors = [tensor[part] for tensor in self.tensors]
        return LeafSum(self.most, between(self.sections, elements), tensors)

    def decoded(self) -> Tensor:
        """Return the sum, fp32 (elements,)."""
        if not self.is_encoded:
            return self.tensors[0]
        total, *others = [decode(tensor, self.sections) for tensor in self.tensors]
        for leaf in others:
            total += leaf
        return total

    def __add__(self, right: LeafSum) -> LeafSum:
        leaves = [*self.tensors, *right.tensors]
        if not (self.is_encoded and right.is_encoded and len(leaves) <= self.most):
            leaves = [self.decoded().add_(right.decoded())]
        return LeafSum(self.most, self.sections, leaves)


def row_lengths(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return (elements, elements of a row) of each parameter; shards cut between rows."""
    return [(p.numel(), p.numel() // len(p) if p.dim() else 1) for p in parameters]


def byte_range(sections: Sections, elements: slice) -> slice:
    first = encoded_bytes(between(sections, slice(elements.start)))
    return slice(first, first + encoded_bytes(between(sections, elements)))


class WireSum(FlatSum):
    """The sum of one buffer in one step, which travels encoded; its parts are the parameters.

    parts          (elements, elements of a row) of the parameters in the buffer
    seed_and_step  decide with the number of a leaf how it is rounded
    """

    def __init__(
        self,
        wire: Wire,
        parts: Sequence[tuple[int, int]],
        seed_and_step: tuple[int, int],
        shares: tuple[int, ...],
    ) -> None:
        super().__init__(shares)
        self.wire = wire
        self.most = FORMATS[wire].most_leaves
        self.seed_and_step = seed_and_step
        self.leaves = sum(shares)
        self.sizes = [elements for elements, _ in parts]
        self.order, self.sections = wire_order(wire, parts)

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        return torch.split(flat, self.sizes)

    def encode(self, k: int, parts: Sequence[Tensor]) -> Tensor:
        """Return leaf `k`, encoded. UsageError: its gradients are not fp32."""
        flat = torch.cat([parts[i].reshape(-1) for i in self.order])
        if flat.dtype != torch.float32:
            raise UsageError(
                f"parallel.wire={self.wire} encodes gradients of torch.float32, these are {flat.dtype}",
                "the dtype of the trained parameters",
                "train float32 parameters, or set parallel.wire=fp32",
            )
        return encode(flat, self.sections, self._key(k))

    def add(self, k: int, flat: Tensor) -> None:
        self.tree.add(Subtree(k, 1), LeafSum(self.most, self.sections, [flat]))

    def compact(self) -> None:
        """Do nothing: an encoded leaf has its own storage."""

    def all_reduce(
        self,
        out: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        waits: WorkWaiter,
        traffic: Traffic | None = None,
        tag: int = 0,
    ) -> Tensor:
        """Collective. See FlatSum."""
        plan = owner_rounds(group.rank() if group else 0, self.shares)
        elements = partial(blocks_of, self.sections)

        def transfer(sends: Parts, receives: Parts) -> None:
            to_send, to_receive = (
                [(m.peer, tensor) for m, tensors in parts for tensor in tensors]
                for parts in (sends, receives)
            )
            if group is not None:
                waits.wait(start_exchange(to_send, to_receive, group, traffic, tag), group)

        device = out[0].device
        own = elements(plan.own)
        own_sections = between(self.sections, own)
        sums = dict(self.tree.stack)
        received = [
            (m, LeafSum.empty(self.most, own_sections, m.node.leaves, device))
            for m in plan.exchange.receives
        ]
        transfer(
            [(m, sums[m.node].slice(elements(m)).tensors) for m in plan.exchange.sends],
            [(m, part.tensors) for m, part in received],
        )
        summands = [(m.node, part) for m, part in received]
        summands += [(node, part.slice(own)) for node, part in sums.items()]
        whole: SumTree[LeafSum] = SumTree()
        for node, part in sorted(summands, key=itemgetter(0)):
            whole.add(node, part)
        encoded = torch.empty(encoded_bytes(self.sections), dtype=torch.uint8, device=device)
        encoded[byte_range(self.sections, own)] = encode(
            whole.total().decoded(), own_sections, self._key(self.leaves)
        )
        for turn in plan.gather:
            sent, taken = (
                [(m, [encoded[byte_range(self.sections, elements(m))]]) for m in messages]
                for messages in turn[:2]
            )
            transfer(sent, taken)
        total = decode(encoded, self.sections)
        ordered = [out[i] for i in self.order]
        parts = total.split([part.numel() for part in ordered])
        foreach_copy_(ordered, [part.view_as(o) for o, part in zip(ordered, parts, strict=True)])
        self.tree = SumTree()
        return total[own]

    def _key(self, number: int) -> int:
        """Return the key for rounding leaf `number`; number K: the complete sum."""
        return splitmix64(*self.seed_and_step, number, self.leaves)


def sum_in_format(
    wire: Wire,
    rows: Callable[[], Sequence[tuple[int, int]]],
    seed_and_step: tuple[int, int],
    shares: tuple[int, ...],
) -> FlatSum:
    """Return the empty sum of a buffer that travels in the format `wire`. rows: see `row_lengths`,
    where it is encoded."""
    if FORMATS[wire].is_exact:
        return FlatSum(shares)
    return WireSum(wire, rows(), seed_and_step, shares)
