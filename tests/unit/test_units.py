"""Quantities with units."""

from __future__ import annotations

from lockstep.units import format_bytes, format_count, format_duration, parse_bytes, parse_seconds


def test_quantities_are_parsed_and_formatted() -> None:
    assert (parse_bytes("25 MB"), parse_bytes("1GiB"), parse_bytes(7)) == (25_000_000, 2**30, 7)
    assert (parse_seconds("90 s"), parse_seconds("1.5 min"), parse_seconds(0.5)) == (90.0, 90.0, 0.5)
    assert (format_bytes(61 * 2**30), format_count(41_200), format_duration(0.02)) == ("61.0 GiB", "41.2 k", "0.02 s")
