"""The formats of `parallel.wire`: how the gradients of micro-batches and their sum travel.

    fp32  4 bytes per element
    bf16  2 bytes per element, rounded to nearest even
    int8  1 byte per element and an fp32 scale per block; blocks are parts of one row of a
          parameter. Rows without blocks, such as biases and norms, travel as bf16

Only whole micro-batches (leaves) and the complete sum are rounded. A partial sum contains different
leaves on different numbers of ranks: it travels as fp32, or as its leaves if these are smaller.

A buffer is encoded section by section, block by block, each block behind its scale. So a slice of
whole blocks is a range of bytes. Pure, and without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lockstep.network.tree_exchange import WHOLE, Message, Slice, owner_rounds, rounds_of_rank

Wire = Literal["fp32", "bf16", "int8"]

MAX_BLOCK, MIN_BLOCK = 256, 32  # elements that share a scale
SCALE_BYTES = 4
# A sum of at most so many leaves travels as its leaves, a larger one as fp32.
MOST_LEAVES: dict[Wire, int] = {"fp32": 0, "bf16": 1, "int8": 2}


class Section(NamedTuple):
    """Adjacent blocks of one length; length 1: bf16, without scales."""

    block: int
    elements: int

    @property
    def encoded_bytes(self) -> int:
        return (
            2 * self.elements
            if self.block == 1
            else self.elements // self.block * (SCALE_BYTES + self.block)
        )


Sections = tuple[Section, ...]


def block_length(wire: Wire, row: int) -> int:
    """Return how many elements of a row share a scale: a divisor, so that blocks fill whole
    rows."""
    if wire == "int8":
        return next(
            (block for block in range(min(row, MAX_BLOCK), MIN_BLOCK - 1, -1) if row % block == 0),
            1,
        )
    return 1


def wire_order(wire: Wire, parts: Sequence[tuple[int, int]]) -> tuple[list[int], Sections]:
    """Return (order of the parts in an encoded buffer, its sections): parts with equal blocks
    adjoin.

    bf16 comes first, at an even byte of each slice.

    parts  (elements, elements of a row) of each parameter
    """
    blocks = [block_length(wire, row) for _, row in parts]
    order = sorted(range(len(parts)), key=lambda i: blocks[i])
    elements = {
        block: sum(n for (n, _), other in zip(parts, blocks, strict=True) if other == block)
        for block in blocks
    }
    return order, tuple(Section(block, elements[block]) for block in sorted(elements))


def element_count(sections: Sections) -> int:
    return sum(section.elements for section in sections)


def encoded_bytes(sections: Sections) -> int:
    return sum(section.encoded_bytes for section in sections)


def between(sections: Sections, elements: slice) -> Sections:
    """Return the sections of these elements, whole blocks."""
    inside, first = [], 0
    for block, count in sections:
        overlap = min(elements.stop, first + count) - max(elements.start or 0, first)
        inside += [Section(block, overlap)] if overlap > 0 else []
        first += count
    return tuple(inside)


def align(sections: Sections, position: int) -> int:
    """Return the start of the block that contains the element at `position`."""
    first = 0
    for block, elements in sections:
        if position < first + elements:
            return position - (position - first) % block
        first += elements
    return position


def blocks_of(sections: Sections, part: Slice | Message) -> slice:
    """Return the elements in a part of the buffer, cut at borders of blocks."""
    length = element_count(sections)
    return slice(
        align(sections, part.start * length // WHOLE), align(sections, part.stop * length // WHOLE)
    )


def sent_bytes(wire: Wire, sections: Sections, rank: int, shares: tuple[int, ...]) -> int:
    """Return how many bytes a rank sends for the sum of a buffer. shares: leaves by rank."""
    if wire == "fp32":
        sends = (
            message
            for turns in rounds_of_rank(rank, shares)
            for turn in turns
            for message in turn.sends
        )
        return sum(
            4 * ((message.stop - message.start) * element_count(sections) // WHOLE)
            for message in sends
        )
    plan, total = owner_rounds(rank, shares), 0
    for message in plan.exchange.sends:
        part, count = between(sections, blocks_of(sections, message)), message.node.leaves
        total += (
            count * encoded_bytes(part) if count <= MOST_LEAVES[wire] else 4 * element_count(part)
        )
    return total + sum(
        encoded_bytes(between(sections, blocks_of(sections, m)))
        for turn in plan.gather
        for m in turn.sends
    )


def wire_conflict(
    wire: Wire, tensor: int, pipeline: int, reduces_once: bool
) -> tuple[str, str, str] | None:
    """Return (what, keys, hint) when other values of the run exclude the format."""
    if wire not in MOST_LEAVES:
        return f"unknown format wire={wire!r}", "parallel.wire", f"try {', '.join(MOST_LEAVES)}"
    excluded = {
        "layout.tensor": (f"{tensor}, which adds gradients outside of the tree", tensor > 1),
        "layout.pipeline": (f"{pipeline}, which adds gradients outside of the tree", pipeline > 1),
        "fsdp.reduce": ("per_step, which sends sums of several micro-batches", reduces_once),
    }
    for key, (value, is_set) in excluded.items():
        if is_set and wire != "fp32":
            return (
                f"parallel.wire={wire} is not supported with {key}={value}",
                f"parallel.wire {key}",
                f"leave {key} out, or set wire=fp32",
            )
    return None
