"""Parse and format quantities: "25 MB", "90 s", "100 Mbit/s", "41.2 k".

MB is decimal and MiB binary (SI, IEC). A bare number is in the base unit (bytes, seconds, bytes
per second).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SECONDS = {"US": 1e-6, "MS": 1e-3, "S": 1.0, "MIN": 60.0, "H": 3600.0, "D": 86400.0}
COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
RATES = {f"{unit}/S": float(size) for unit, size in BYTES.items()}
RATES |= {
    "BIT/S": 1 / 8,
    "KBIT/S": 1e3 / 8,
    "MBIT/S": 1e6 / 8,
    "GBIT/S": 1e9 / 8,
    "TBIT/S": 1e12 / 8,
}

MAX_NAMES = 5


def parse_quantity(text: object, units: dict[str, float], example: str) -> float:
    """Return `text` in the base unit. ValueError when it is not a quantity."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return finite(text)
    match = re.fullmatch(
        r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*(?:/[A-Za-z]+)?)\s*", str(text)
    )
    if not match:
        raise ValueError(f"{str(text)[:40]!r} is not a quantity such as {example!r}")
    number, unit = match.groups()
    if unit and unit.upper() not in units:
        raise ValueError(
            f"{str(text)[:40]!r} has the unknown unit {unit[:20]!r}; "
            f"use one of {', '.join(units)}, for example {example!r}"
        )
    return finite(float(number) * (units[unit.upper()] if unit else 1.0))


def finite(number: float) -> float:
    """Return `number` as a float. ValueError for infinity, NaN, and an int that is too large."""
    try:
        if math.isfinite(number):
            return float(number)
    except OverflowError:
        pass
    raise ValueError("must be a finite number")


def parse_bytes(text: object) -> int:
    """Return the bytes in "25 MB", "1 GiB" or 4096; from 1000 bytes on, round down."""
    count = parse_quantity(text, {k: float(v) for k, v in BYTES.items()}, "25 MB")
    if count < 1000 and not count.is_integer():
        raise ValueError(f"{count:g} is not a whole number of bytes")
    return int(count)


def parse_seconds(text: object) -> float:
    return parse_quantity(text, SECONDS, "90 s")


def parse_count(text: object) -> float:
    """Return the number in "20B", "300 M" or 2e10."""
    return parse_quantity(text, COUNTS, "20B")


def parse_rate(text: object) -> float:
    """Return the bytes per second in "1 MB/s", "100 Mbit/s" or 1e6: from 1 B/s to 1,000 TB/s."""
    if re.search(r"b/s\s*$", str(text)):
        raise ValueError(
            f"{str(text)[:40]!r} may mean bits or bytes: "
            "write bit/s or B/s, for example '100 Mbit/s'"
        )
    rate = parse_quantity(text, RATES, "100 Mbit/s")
    if not 1 <= rate <= 1e15:
        raise ValueError(
            f"{str(text)[:40]!r} is no rate from 1 B/s to 1000 TB/s, for example '100 Mbit/s'"
        )
    return rate


def format_bytes(count: float) -> str:
    """Return `count` bytes in the largest binary unit with a value of at least 1: 61.0 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float, decimals: int = 2) -> str:
    """Return `seconds` in a readable unit: 0.02 s, 90 s, 12 min, 3.5 h. decimals: below 10 s"""
    if seconds < 10:
        return f"{seconds:.{decimals}f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_seconds(seconds: float) -> str:
    """Return `seconds` with four digits in a readable unit: 35 s, 8.75 ms, 50 us."""
    unit, size = next(
        (pair for pair in (("s", 1.0), ("ms", 1e-3)) if seconds >= 0.99995 * pair[1]), ("us", 1e-6)
    )
    value = seconds / size
    text = f"{value:.{max(0, 4 - len(f'{value:.0f}'))}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def format_count(count: float) -> str:
    """Return `count` with a decimal prefix: 41.2 k, 2.6 M."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= size:
            return f"{count / size:.1f} {prefix}"
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.1f}"


def counted(count: int, noun: str) -> str:
    """Return "1 worker", "2 workers"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def shorten(value: object) -> str:
    """Return the repr of a value, cut to a length that fits a message."""
    try:
        text = repr(value)
    except (
        ValueError,
        RecursionError,
    ):  # an int with more digits than Python prints, or deep nesting
        return f"({type(value).__name__}, too large to print)"
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text):,} characters)"


def join_words(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def join_names(names: list[str]) -> str:
    """Return the first MAX_NAMES names, comma-separated, and how many more there are."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def words(text: str) -> frozenset[str]:
    """Return the words of a table of names."""
    return frozenset(text.split())
