"""Where blocks lie, and how many bytes each format sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire_bytes import sent_bytes

from lockstep.network.subtrees import equal_shares
from lockstep.network.tree_exchange import WHOLE, Slice
from lockstep.network.wire_format import (
    Section,
    Wire,
    between,
    block_of,
    blocks_of,
    element_count,
    encoded_bytes,
    wire_conflict,
    wire_order,
)

ROWS = {
    1: 1,
    31: 1,
    32: 32,
    56: 56,
    64: 64,
    257: 1,
    512: 256,
    576: 192,
    704: 176,
    768: 256,
    2048: 256,
}


@pytest.mark.parametrize("row", ROWS)
def test_blocks_are_the_largest_that_fill_a_row(row: int) -> None:
    assert (block_of("int8", row)[0], block_of("bf16", row)[0]) == (ROWS[row], 1)


PARTS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from(list(ROWS))).map(
        lambda pair: (pair[0] * pair[1], pair[1])
    ),
    min_size=1,
)


@given(PARTS, st.integers(1, 9))
def test_slices_of_a_buffer_consist_of_whole_blocks_and_cover_it(
    parts: list[tuple[int, int]], ranks: int
) -> None:
    order, sections = wire_order("int8", parts)
    assert sorted(order) == list(range(len(parts)))
    assert [sections[0].block, element_count(sections)] == [
        min(ROWS[row] for _, row in parts),
        sum(n for n, _ in parts),
    ]
    slices = [
        blocks_of(sections, Slice(i, i * WHOLE // ranks, (i + 1) * WHOLE // ranks))
        for i in range(ranks)
    ]
    assert [part.start for part in slices] == [0, *(part.stop for part in slices[:-1])] and slices[
        -1
    ].stop == element_count(sections)
    inside = [section for part in slices for section in between(sections, part)]
    assert all(section.elements % section.block == 0 for section in inside)
    assert sum(section.encoded_bytes for section in inside) == encoded_bytes(sections)


@pytest.mark.parametrize(
    ("size", "leaves", "per_element"),  # (fp32, bf16, int8); a ring of fp32 sends 8 * (N - 1) / N
    [
        (2, 4, (4, 3, 1.5)),
        (4, 4, (6, 3, 1.5)),
        (8, 8, (7, 3.5, 1.75)),
        (4, 8, (6, 4.5, 2.25)),
        (8, 16, (7, 5.25, 2.625)),
    ],
)
def test_bytes_of_one_and_two_micro_batches_per_rank(
    size: int, leaves: int, per_element: tuple[float, ...]
) -> None:
    sections: dict[Wire, tuple[Section, ...]] = {
        "fp32": (Section("fp32", 1, 2**18),),
        "bf16": (Section("bf16", 1, 2**18),),
        "int8": (Section("int8", 256, 2**18),),
    }
    for (wire, parts), expected in zip(sections.items(), per_element, strict=True):
        scales = 260 / 256 if wire == "int8" else 1.0
        sent = [sent_bytes(wire, parts, rank, equal_shares(size, leaves)) for rank in range(size)]
        assert max(sent) == min(sent) == expected * scales * 2**18


def test_conflicting_values_are_named() -> None:
    assert wire_conflict("fp32", 2, 2, True) is None
    assert wire_conflict("int8", 1, 1, False) is None
    cases: list[tuple[Wire, int, int, bool]] = [
        ("bf16", 2, 1, False),
        ("int8", 1, 2, False),
        ("int8", 1, 1, True),
    ]
    keys = [conflict[1].split()[1] for case in cases if (conflict := wire_conflict(*case))]
    assert keys == ["layout.tensor", "layout.pipeline", "fsdp.reduce"]
    assert "'fp8'" in (wire_conflict("fp8", 1, 1, False) or ("",))[0]  # type: ignore[arg-type]
