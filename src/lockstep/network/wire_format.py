"""The formats of `parallel.wire`: how the gradients of micro-batches and their sum travel.

    fp32  4 bytes per element
    bf16  2 bytes per element, rounded to nearest even
    int8  1 byte per element and an fp32 scale per block; blocks are parts of one row of a
          parameter. Rows without blocks, such as biases and norms, travel as bf16

FORMATS is the only place that lists them: configuration, codec, sums, planner and benches follow.

Only whole micro-batches (leaves) and the complete sum are rounded. A partial sum contains different
leaves on different numbers of ranks: it travels as fp32, or as its leaves if these are smaller.

A buffer is encoded section by section, block by block, each block behind its scale. So a slice of
whole blocks is a range of bytes. Pure, and without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lockstep.network.tree_exchange import WHOLE, Message, Slice

Wire = Literal["fp32", "bf16", "int8"]

MAX_BLOCK, MIN_BLOCK = 256, 32  # elements that share a scale
USUAL_BLOCK = 100  # of a model, where its rows are not known
SCALE_BYTES = 4


class WireFormat(NamedTuple):
    """How parallel/wire_sum.py writes elements.

    dtype        of torch, to which elements are rounded
    bytes        of an element
    most_leaves  a sum of at most so many leaves travels as its leaves, a larger one as fp32;
                 0: sums are exact, and nothing is encoded
    largest      the element of a block that is rounded to this has the block's scale; 0: no blocks
    is_random    elements are rounded up or down at random, to whole numbers
    """

    dtype: str
    bytes: int
    most_leaves: int
    largest: int = 0
    is_random: bool = False

    @property
    def is_exact(self) -> bool:
        return not self.most_leaves

    @property
    def share(self) -> float:
        """Bytes of a gradient on its way, as a share of those of fp32."""
        scale = SCALE_BYTES / USUAL_BLOCK if self.largest else 0.0
        return (self.bytes + scale) / 4


FORMATS: dict[Wire, WireFormat] = {
    "fp32": WireFormat("float32", 4, most_leaves=0),
    "bf16": WireFormat("bfloat16", 2, most_leaves=1),
    "int8": WireFormat("int8", 1, most_leaves=2, largest=127, is_random=True),
}
WITHOUT_BLOCKS: Wire = "bf16"  # the format of rows without blocks


class Section(NamedTuple):
    """Adjacent elements of one format, in blocks of one length; 1: without scales."""

    wire: Wire
    block: int
    elements: int

    @property
    def encoded_bytes(self) -> int:
        scales = self.elements // self.block if self.block > 1 else 0
        return FORMATS[self.wire].bytes * self.elements + SCALE_BYTES * scales


Sections = tuple[Section, ...]


def block_of(wire: Wire, row: int) -> tuple[int, Wire]:
    """Return how many elements of a row share a scale, and the format of the row: a divisor, so
    that blocks fill whole rows."""
    if not FORMATS[wire].largest:
        return 1, wire
    for block in range(min(row, MAX_BLOCK), MIN_BLOCK - 1, -1):
        if row % block == 0:
            return block, wire
    return 1, WITHOUT_BLOCKS


def wire_order(wire: Wire, parts: Sequence[tuple[int, int]]) -> tuple[list[int], Sections]:
    """Return (order of the parts in an encoded buffer, its sections): parts with equal blocks
    adjoin.

    Rows without blocks come first, at an even byte of each slice.

    parts  (elements, elements of a row) of each parameter
    """
    blocks = [block_of(wire, row) for _, row in parts]
    elements = dict.fromkeys(sorted(blocks), 0)
    for (count, _), block in zip(parts, blocks, strict=True):
        elements[block] += count
    order = sorted(range(len(parts)), key=blocks.__getitem__)
    return order, tuple(Section(name, block, n) for (block, name), n in elements.items())


def element_count(sections: Sections) -> int:
    return sum(section.elements for section in sections)


def encoded_bytes(sections: Sections) -> int:
    return sum(section.encoded_bytes for section in sections)


def between(sections: Sections, elements: slice) -> Sections:
    """Return the sections of these elements, whole blocks."""
    inside = list[Section]()
    first = 0
    for section in sections:
        last = first + section.elements
        overlap = min(elements.stop, last) - max(elements.start or 0, first)
        if overlap > 0:
            inside.append(section._replace(elements=overlap))
        first = last
    return tuple(inside)


def align(sections: Sections, position: int) -> int:
    """Return the start of the block that contains the element at `position`."""
    first = 0
    for section in sections:
        if position < first + section.elements:
            return position - (position - first) % section.block
        first += section.elements
    return position


def blocks_of(sections: Sections, part: Slice | Message) -> slice:
    """Return the elements in a part of the buffer, cut at borders of blocks."""
    length = element_count(sections)
    return slice(
        align(sections, part.start * length // WHOLE), align(sections, part.stop * length // WHOLE)
    )


def wire_conflict(
    wire: Wire, tensor: int, pipeline: int, reduces_once: bool
) -> tuple[str, str, str] | None:
    """Return (what, keys, hint) when other values of the run exclude the format."""
    if wire not in FORMATS:
        return f"unknown format wire={wire!r}", "parallel.wire", f"try {', '.join(FORMATS)}"
    added = "which adds gradients outside of the tree"
    excluded = {
        "layout.tensor": f"{tensor}, {added}" if tensor > 1 else "",
        "layout.pipeline": f"{pipeline}, {added}" if pipeline > 1 else "",
        "fsdp.reduce": "per_step, which sends sums of several micro-batches" * reduces_once,
    }
    for key, value in excluded.items():
        if value and not FORMATS[wire].is_exact:
            return (
                f"parallel.wire={wire} is not supported with {key}={value}",
                f"parallel.wire {key}",
                f"leave {key} out, or set wire=fp32",
            )
    return None
