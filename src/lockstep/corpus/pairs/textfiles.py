"""Parallel text files: two aligned text files, one TSV, or one JSONL, each plain or .gz.

Only a line feed ends a line: splitlines also splits at U+2028 and others, which would shift one
side against the other. Unreadable input is an error with file, line and byte; nothing is replaced.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import DataError, UsageError
from lockstep.files import parse_json
from lockstep.units import shorten

Pairs = list[tuple[str, str]]


def read_pairs(paths: Sequence[str], source: str, target: str, split: str) -> Pairs:
    """Return the pairs of `split`, including empty lines, from a source and a target text file, or
    one .tsv or .jsonl. DataError: unreadable or not UTF-8, sides of different length or missing."""
    if len(paths) == 2:
        return pair_lines(Path(paths[0]), Path(paths[1]))
    kind = Path(paths[0]).name.removesuffix(".gz").rpartition(".")[2] if len(paths) == 1 else ""
    if kind == "tsv":
        return pairs_of_tsv(Path(paths[0]), source, target)
    if kind in ("jsonl", "json"):
        return pairs_of_jsonl(Path(paths[0]), source, target)
    what = f"data.{split} has {len(paths)} {'file' if len(paths) == 1 else 'files'}: {', '.join(paths) or 'none'}"
    raise DataError(
        what,
        "data.kind=files",
        "give two text files (source, then target), or one .tsv, or one .jsonl; each may end in .gz",
    )


def read_lines(path: Path) -> list[str]:
    return split_lines(b"".join(lines_of(path)), str(path))


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, .gz or plain, with their line ends."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            yield from file
    except (OSError, EOFError, ValueError, zlib.error) as error:
        hint = "check the path; if it is correct, copy or compress the file again"
        raise DataError(
            f"{path} cannot be read: {error}", "data.train, data.validation, data.test", hint
        ) from None


def read_input_lines(path: Path | None) -> list[str]:
    """Return the lines of a file or standard input. UsageError, DataError."""
    try:
        return split_lines(
            path.read_bytes() if path else sys.stdin.buffer.read(), str(path or "standard input")
        )
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            f"--file, relative to {Path.cwd()}",
            "check the path",
        ) from None


def split_lines(content: bytes, name: str) -> list[str]:
    lines = decode_text(content, name).split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def decode_text(content: bytes, name: str) -> str:
    """Decode UTF-8 and remove the byte order mark. DataError if it is not UTF-8."""
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start:,}"
        hint = "convert it first, for example: iconv -f latin1 -t utf-8"
        raise DataError(
            what, f"line {line:,}: {content[max(0, error.start - 20) : error.start + 20]!r}", hint
        ) from None


def parse_json_line(line: str | bytes, where: str) -> Any:
    try:
        return parse_json(line if isinstance(line, str) else line.decode())
    except ValueError as error:
        raise DataError(
            f"not JSON: {error}", f"{where}: {shorten(line)}", "write one JSON object per line"
        ) from None


def pair_lines(source: Path, target: Path) -> Pairs:
    a, b = read_lines(source), read_lines(target)
    if len(a) != len(b):
        what = f"the two sides have {len(a):,} and {len(b):,} lines"
        raise DataError(
            what,
            f"{source}\n{target}",
            "line n of one must translate line n of the other; look for unpaired lines",
        )
    return list(zip(a, b, strict=True))


def pairs_of_tsv(path: Path, source: str, target: str) -> Pairs:
    rows = [line.split("\t") for line in read_lines(path)]
    left, right, first = 0, 1, 0
    if rows and {source, target} <= set(rows[0]):
        left, right, first = rows[0].index(source), rows[0].index(target), 1
    elif rows and len(rows[0]) != 2:
        what = f"{path} has {len(rows[0])} columns and no header with {source!r} and {target!r}"
        raise DataError(
            what,
            f"line 1: {shorten(rows[0])}",
            "write two columns, or a first line with column names",
        )
    columns = len(rows[0]) if rows else 2
    for number, row in enumerate(rows, start=1):
        if len(row) != columns:
            what = f"{path} has {len(row)} columns in line {number:,}, {columns} in line 1"
            raise DataError(what, shorten(row), "look for a missing or extra tab")
    return [(row[left], row[right]) for row in rows[first:]]


def pairs_of_jsonl(path: Path, source: str, target: str) -> Pairs:
    """Read one JSON object per line. An empty line is an empty pair."""
    lines = [
        (f"{path}, line {number:,}", line) for number, line in enumerate(read_lines(path), start=1)
    ]
    return [
        sides_of(parse_json_line(line, where), source, target, where) if line.strip() else ("", "")
        for where, line in lines
    ]


def sides_of(record: Any, source: str, target: str, where: str) -> tuple[str, str]:
    """Return both texts of a record: {"en": .., "it": ..}, also under the key "translation", or
    {"source": .., "target": ..}. A null is an empty text. DataError: no such columns."""
    inner = record.get("translation", record) if isinstance(record, dict) else {}
    for left, right in ((source, target), ("source", "target")):
        if isinstance(inner, dict) and left in inner and right in inner:
            a, b = inner[left], inner[right]
            if all(text is None or isinstance(text, str) for text in (a, b)):
                return a or "", b or ""
            raise DataError(
                f"the texts are {type(a).__name__} and {type(b).__name__}",
                where,
                "both sides must be strings",
            )
    columns = ", ".join(map(str, inner)) if isinstance(inner, dict) and inner else shorten(record)
    raise DataError(
        f"no columns {source!r} and {target!r}, but {columns}",
        where,
        "set data.source and data.target to existing columns",
    )
