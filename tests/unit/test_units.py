"""Quantities with units."""

from __future__ import annotations

import pytest

from lockstep.units import (
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)


def test_quantities_are_parsed_and_formatted() -> None:
    assert (parse_bytes("25 MB"), parse_bytes("1GiB"), parse_bytes(7)) == (25_000_000, 2**30, 7)
    assert (parse_seconds("90 s"), parse_seconds("1.5 min"), parse_seconds(0.5)) == (
        90.0,
        90.0,
        0.5,
    )
    assert (format_bytes(61 * 2**30), format_count(41_200), format_duration(0.02)) == (
        "61.0 GiB",
        "41.2 k",
        "0.02 s",
    )


def test_rates_are_bytes_per_second() -> None:
    assert (parse_rate("1 MB/s"), parse_rate("1MiB/s"), parse_rate(1e6)) == (1e6, 2.0**20, 1e6)
    assert (parse_rate("100 Mbit/s"), parse_rate("100Gbit/s"), parse_rate("1e3 kbit/s")) == (
        12.5e6,
        12.5e9,
        125e3,
    )
    assert parse_seconds("50 us") == parse_seconds("50us") == pytest.approx(5e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100 Mb/s", "may mean bits or bytes"),
        ("100 MB", "unknown unit 'MB'"),
        ("5 parsecs/s", "unknown unit 'parsecs/s'"),
        ("0 MB/s", "no rate from 1 B/s"),
        ("1e-300 B/s", "no rate from 1 B/s"),
        ("2000 TB/s", "no rate from 1 B/s"),
        ("-1 MB/s", "not a quantity such as '100 Mbit/s'"),
        (-1.0, "no rate from 1 B/s"),
        ("fast", "not a quantity"),
        (True, "not a quantity"),
        (float("inf"), "finite"),
    ],
)
def test_what_is_not_a_rate_is_refused(text: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rate(text)


def test_short_times_have_four_digits() -> None:
    times = [35, 0, 5e-5, 0.00875, 1.23456, 10_000, 0.99999, 1e-9]
    assert [format_seconds(time) for time in times] == [
        "35 s",
        "0 us",
        "50 us",
        "8.75 ms",
        "1.235 s",
        "10000 s",
        "1 s",
        "0.001 us",
    ]
