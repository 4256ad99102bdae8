"""Parallel text in files: two texts line by line, one TSV, or one JSONL, each plain or .gz.

Lines end at a line feed and nowhere else (Python's splitlines also cuts at U+2028 and others, which would shift one side against the
other). What cannot be read is refused with its file, line and byte; nothing is guessed or replaced.
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

Pairs = list[tuple[str, str]]


def read_pairs(paths: Sequence[str], source: str, target: str, split: str) -> Pairs:
    """The pairs of one split, as they stand, empty lines included.

    paths   (text, text) in the order source, target; or one .tsv or .jsonl; any of them with .gz behind it
    split   its name, for messages: train, validation, test
    DataError: wrong number or kind of files, a missing or damaged file, bytes that are no UTF-8, sides of different length,
    a line without both languages.
    """
    if len(paths) == 2:
        return pair_lines(Path(paths[0]), Path(paths[1]))
    kind = Path(paths[0]).name.removesuffix(".gz").rpartition(".")[2] if len(paths) == 1 else ""
    if kind == "tsv":
        return pairs_of_tsv(Path(paths[0]), source, target)
    if kind in ("jsonl", "json"):
        return pairs_of_jsonl(Path(paths[0]), source, target)
    what = f"data.{split} names {len(paths)} {'file' if len(paths) == 1 else 'files'}: {', '.join(paths) or 'none'}"
    hint = "give two text files (source, then target), or one .tsv, or one .jsonl; each may end in .gz"
    raise DataError(what, "of data.kind=files", hint)


def read_lines(path: Path) -> list[str]:
    """Lines of a UTF-8 text, without their ends and without a byte order mark. DataError as in `read_pairs`."""
    return split_lines(b"".join(lines_of(path)), str(path))


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, .gz or plain, with their ends."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            yield from file
    except (OSError, EOFError, ValueError, zlib.error) as error:
        hint = "is the path right? if it is, copy or pack the file again"
        raise DataError(f"{path} cannot be read: {error}", "data.train, data.validation, data.test", hint) from None


def given_lines(path: Path | None) -> list[str]:
    """Lines of a text that a command is given, in a file or on standard input. UsageError, DataError as in `read_pairs`."""
    try:
        return split_lines(path.read_bytes() if path else sys.stdin.buffer.read(), str(path or "standard input"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", f"--file, seen from {Path.cwd()}", "is the path right?") from None


def split_lines(content: bytes, name: str) -> list[str]:
    """The lines of a UTF-8 text. DataError when it is none."""
    lines = text_in(content, name).split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def text_in(content: bytes, name: str) -> str:
    """A UTF-8 text without its byte order mark. DataError when it is none."""
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start:,}"
        hint = "convert it first, for example: iconv -f latin1 -t utf-8"
        raise DataError(what, f"line {line:,}: {content[max(0, error.start - 20) : error.start + 20]!r}", hint) from None


def json_in(line: str | bytes, where: str) -> Any:
    """The value in a line of JSON. DataError when it is none."""
    try:
        return parse_json(line if isinstance(line, str) else line.decode())
    except ValueError as error:
        raise DataError(f"this is no JSON: {error}", f"{where}: {show(line)}", "one object a line") from None


def pair_lines(source: Path, target: Path) -> Pairs:
    """Line n of `source` with line n of `target`."""
    a, b = read_lines(source), read_lines(target)
    if len(a) != len(b):
        what = f"the two sides have {len(a):,} and {len(b):,} lines"
        raise DataError(what, f"{source}\n{target}", "line n of one must translate line n of the other; which lines have no partner?")
    return list(zip(a, b, strict=True))


def pairs_of_tsv(path: Path, source: str, target: str) -> Pairs:
    """Two columns, source and target; or a first line that names columns, two of them by the languages' codes."""
    rows = [line.split("\t") for line in read_lines(path)]
    left, right, first = 0, 1, 0
    if rows and {source, target} <= set(rows[0]):
        left, right, first = rows[0].index(source), rows[0].index(target), 1
    elif rows and len(rows[0]) != 2:
        what = f"{path} has {len(rows[0])} columns and no heading with {source!r} and {target!r}"
        raise DataError(what, f"line 1: {show(rows[0])}", "give two columns, or a first line with the columns' names")
    columns = len(rows[0]) if rows else 2
    for number, row in enumerate(rows, start=1):
        if len(row) != columns:
            what = f"{path} has {len(row)} columns in line {number:,}, {columns} in line 1"
            raise DataError(what, show(row), "is a tab missing or too many?")
    return [(row[left], row[right]) for row in rows[first:]]


def pairs_of_jsonl(path: Path, source: str, target: str) -> Pairs:
    """One JSON object a line; `sides_of` says which shapes it may have. Lines with nothing on them are an empty pair."""
    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}, line {number:,}"
        pairs.append(sides_of(json_in(line, where) if line.strip() else {source: "", target: ""}, source, target, where))
    return pairs


def sides_of(found: Any, source: str, target: str, where: str) -> tuple[str, str]:
    """Both texts of one record: {"translation": {"en": .., "it": ..}}, {"en": .., "it": ..} or {"source": .., "target": ..}.

    An absent text (null) counts as empty. DataError when the record has no such columns.
    """
    inner = found.get("translation", found) if isinstance(found, dict) else {}
    for left, right in ((source, target), ("source", "target")):
        if isinstance(inner, dict) and left in inner and right in inner:
            a, b = inner[left], inner[right]
            if all(text is None or isinstance(text, str) for text in (a, b)):
                return a or "", b or ""
            raise DataError(f"the texts are {type(a).__name__} and {type(b).__name__}", where, "both sides must be strings")
    columns = ", ".join(map(str, inner)) if isinstance(inner, dict) and inner else show(found)
    what = f"no columns {source!r} and {target!r}, but {columns}"
    raise DataError(what, where, "set data.source and data.target to columns that are there")


def show(value: object) -> str:
    """`value`, cut to a length that a message can carry."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
