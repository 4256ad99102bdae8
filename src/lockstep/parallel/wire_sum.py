"""The ordered sum of gradients that travel in a format of network/wire_format.py.

Each leaf is encoded where it is computed, before anything is added to it, and decoded where it is
added. The owner of a slice adds all leaves of the slice, in fp32 and in tree order, and encodes the
sum; every rank, the owner too, uses what it decodes from that. So the sum has the same bits for any
number of ranks and of shards, one included.

int8 rounds up or down at random, so that rounding has no bias. The random number is a hash of the
key, the element, its position in the block and the block's scale: there is no state, and the block
and the key decide all bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    SCALE_BYTES,
    Section,
    Sections,
    Wire,
    WireFormat,
    between,
    blocks_of,
    element_count,
    encoded_bytes,
    wire_order,
)
from lockstep.parallel.ordered_sum import FlatSum, SumTree, start_exchange
from lockstep.runtime.torch_private import foreach_copy_
from lockstep.runtime.work import WorkWaiter

CHUNK = 1 << 18  # elements that are encoded together: less memory than whole buffers, few calls
NOISE = 2.0**-32  # of an int32, in units of a code: up to half a unit, up or down
SMALLEST_SCALE = 2.0**-126  # of a block of zeros: no division by zero, nor by a denormal number
FACTORS = -1640531535, -2048144777, 2146121005  # odd, as int32: 0x9E3779B1, 0x85EBCA77, 0x7FEB352D
POSITION_FACTOR = 0x1CE4E5B9BF58476D
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
                f"parallel.wire={self.wire} encodes gradients "
                f"of torch.float32, these are {flat.dtype}",
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
                waits.wait(start_exchange(to_send, to_receive, group, tag), group)

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


def encode(flat: Tensor, sections: Sections, key: int) -> Tensor:
    """Return the encoded elements, uint8 (bytes,). A block with an infinity or NaN decodes to NaN
    or infinities.

    flat  (elements,), fp32
    key   decides how int8 rounds; 64 bits
    """
    encoded = torch.empty(encoded_bytes(sections), dtype=torch.uint8, device=flat.device)
    for section, values, codes, scales in split(flat, encoded, sections):
        if scales is None:
            codes.copy_(values)
            continue
        keys = position_keys(key, section.block, flat.device)
        blocks = CHUNK // section.block
        scratch = torch.empty(2, blocks, section.block, dtype=torch.int32, device=flat.device)
        chunks = (tensor.split(blocks) for tensor in (values, codes, scales))
        for part, out, out_scales in zip(*chunks, strict=True):
            scale = encode_blocks(part, out, FORMATS[section.wire], keys, scratch)
            out_scales.copy_(scale.view(torch.uint8))
    return encoded


def decode(encoded: Tensor, sections: Sections) -> Tensor:
    """Return the elements, fp32 (elements,)."""
    flat = torch.empty(element_count(sections), device=encoded.device)
    for _, values, codes, scales in split(flat, encoded, sections):
        values.copy_(codes)
        if scales is not None:
            aligned = scales.clone(memory_format=torch.contiguous_format)
            values.mul_(aligned.view(torch.float32))
    return flat


def split(
    flat: Tensor, encoded: Tensor, sections: Sections
) -> Iterator[tuple[Section, Tensor, Tensor, Tensor | None]]:
    """Yield views of each section: its values, its codes, and the bytes of its scales; of blocks
    (blocks, elements)."""
    values = flat.split([section.elements for section in sections])
    rows = encoded.split([section.encoded_bytes for section in sections])
    for section, own, row in zip(sections, values, rows, strict=True):
        dtype = getattr(torch, FORMATS[section.wire].dtype)
        if section.block == 1:
            yield section, own, row.view(dtype), None
            continue
        blocks = own.view(-1, section.block)
        row_bytes = SCALE_BYTES + section.block * FORMATS[section.wire].bytes
        scales, codes = row.view(-1, row_bytes).tensor_split([SCALE_BYTES], 1)
        yield section, blocks, codes.view(dtype), scales


def encode_blocks(
    values: Tensor, codes: Tensor, wire: WireFormat, keys: Tensor, scratch: Tensor
) -> Tensor:
    """Write the codes of each block, (n, block); return their scales, fp32 (n, 1).

    keys     of the positions in a block: (block,) int32
    scratch  (2, at least n, block), int32; new memory would take longer than the arithmetic
    """
    noise, other = scratch[:, : len(values)]
    floats = other.view(torch.float32)
    largest = torch.abs(values, out=floats).amax(dim=1, keepdim=True)
    scales = largest.div_(wire.largest).clamp_min_(SMALLEST_SCALE)
    if not wire.is_random:
        codes.copy_(torch.div(values, scales, out=floats))
        return scales
    torch.mul(values.view(torch.int32), FACTORS[0], out=noise)
    noise.add_(scales.view(torch.int32) * FACTORS[1]).add_(keys)
    noise.bitwise_xor_(torch.bitwise_right_shift(noise, 15, out=other)).mul_(FACTORS[2])
    torch.div(values, scales, out=floats).add_(noise, alpha=NOISE)
    codes.copy_(floats.round_().clamp_(-wire.largest, wire.largest))
    return scales


def position_keys(key: int, block: int, device: torch.device) -> Tensor:
    """Return a number for each position in a block: (block,) int32."""
    mixed = (torch.arange(block, device=device) + (key >> 1)) * POSITION_FACTOR
    return ((mixed ^ mixed >> 31) * POSITION_FACTOR >> 32).to(torch.int32)
