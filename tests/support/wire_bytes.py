"""The bytes of a sum in a wire format, counted message by message."""

from __future__ import annotations

from lockstep.network.tree_exchange import WHOLE, owner_rounds, rounds_of_rank
from lockstep.network.wire_format import (
    FORMATS,
    Sections,
    Wire,
    between,
    blocks_of,
    element_count,
    encoded_bytes,
)


def sent_bytes(wire: Wire, sections: Sections, rank: int, shares: tuple[int, ...]) -> int:
    """Return how many bytes a rank sends for the sum of a buffer. shares: leaves by rank."""
    if FORMATS[wire].is_exact:
        sends = [m for turns in rounds_of_rank(rank, shares) for turn in turns for m in turn.sends]
        return sum(4 * ((m.stop - m.start) * element_count(sections) // WHOLE) for m in sends)
    plan, total = owner_rounds(rank, shares), 0
    for message in plan.exchange.sends:
        part, count = between(sections, blocks_of(sections, message)), message.node.leaves
        is_encoded = count <= FORMATS[wire].most_leaves
        total += count * encoded_bytes(part) if is_encoded else 4 * element_count(part)
    return total + sum(
        encoded_bytes(between(sections, blocks_of(sections, m)))
        for turn in plan.gather
        for m in turn.sends
    )
