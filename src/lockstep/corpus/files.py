"""Files of text: lines, and records in JSON lines, a JSON array, Parquet or Arrow files.

Only a line feed ends a line: splitlines also splits at U+2028 and others, which would shift one
side of parallel texts against the other. Unreadable input is an error with file, line and byte;
nothing is replaced.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.errors import DataError, UsageError, missing_package
from lockstep.files import parse_json, read_json
from lockstep.units import join_names, shorten

Record = tuple[str, Any]  # file and number for messages, a JSON value
PARQUET, ARROW = ".parquet", ".arrow"
# Of one dataset on disk, and of several splits.
STATE, DATASET_DICT = "state.json", "dataset_dict.json"
BYTE_ORDER_MARK = "\ufeff"


def read_lines(path: Path) -> list[str]:
    return split_lines(b"".join(lines_of(path)), str(path))


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, .gz or plain, with their line ends."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            yield from file
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            "data.train, data.validation, data.test",
            "check the path; if it is correct, copy or compress the file again",
        ) from None


def read_input_lines(path: Path | None) -> list[str]:
    """Return the lines of a file or standard input. UsageError, DataError."""
    try:
        content = path.read_bytes() if path else sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            f"--file, relative to {Path.cwd()}",
            "check the path",
        ) from None
    return split_lines(content, str(path or "standard input"))


def split_lines(content: bytes, name: str) -> list[str]:
    lines = decode_text(content, name).split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def decode_text(content: bytes, name: str) -> str:
    """Decode UTF-8 and remove the byte order mark. DataError if it is not UTF-8."""
    try:
        return content.decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start:,}",
            f"line {line:,}: {content[max(0, error.start - 20) : error.start + 20]!r}",
            "convert it first, for example: iconv -f latin1 -t utf-8",
        ) from None


def records_of(path: Path) -> Iterator[Record]:
    """Yield the records of a file of any kind. DataError: it cannot be read."""
    if path.suffix in (PARQUET, ARROW):
        yield from table_rows(path)
        return
    is_first = True
    for number, line in enumerate(lines_of(path), start=1):
        line = line.removeprefix(BYTE_ORDER_MARK.encode()).strip()
        if not line:
            continue
        if is_first and line.startswith(b"["):
            yield from array_items(path)
            return
        is_first = False
        where = f"{path}, line {number:,}"
        yield where, parse_json_line(line, where)


def parse_json_line(line: bytes, where: str) -> Any:
    try:
        return parse_json(line.decode())
    except ValueError as error:
        raise DataError(
            f"not JSON: {error}", f"{where}: {shorten(line)}", "write one JSON object per line"
        ) from None


def array_items(path: Path) -> Iterator[Record]:
    """Yield the items of a JSON array, which is read as a whole."""
    try:
        items = parse_json(b"".join(lines_of(path)).decode().removeprefix(BYTE_ORDER_MARK))
    except ValueError as error:
        raise DataError(
            f"the file starts as a JSON array, and is not one: {error}",
            str(path),
            "write one array of records, or one record per line",
        ) from None
    for number, item in enumerate(items, start=1):
        yield f"{path}, record {number:,}", item


def table_rows(path: Path) -> Iterator[Record]:
    """Yield the rows of a Parquet or Arrow file.

    A table gives each row the keys of all rows, so null keys count as absent.
    """
    if find_spec("pyarrow") is None:
        raise missing_package("pyarrow", "hub", str(path))
    import pyarrow.ipc  # optional
    import pyarrow.parquet

    number = 0
    try:
        if path.suffix == PARQUET:
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1000)
        else:
            batches = iter(pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))))
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number:,}", as_json(row)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{path.name} cannot be read after row {number:,}: {error}",
            str(path),
            "copy the file again",
        ) from None


def as_json(value: Any) -> Any:
    """Return a value of a table as JSON without null keys. A date or decimal becomes text; bytes,
    which are no text of a chat, become null."""
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items() if item is not None}
    if value is None or isinstance(value, bytes):
        return None
    return value if isinstance(value, bool | int | float | str) else str(value)


def dataset_files(folder: Path, key: str) -> list[Path]:
    """Return the files of a dataset that `save_to_disk` has written to `folder`. DataError: it is
    none.

    key  of the configuration, for messages
    """
    splits: list[str] = []
    try:
        if (folder / STATE).exists():
            files = read_json(folder / STATE)["_data_files"]
            return [folder / str(file["filename"]) for file in files]
        if (folder / DATASET_DICT).exists():
            splits = read_json(folder / DATASET_DICT)["splits"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the dataset in {folder} cannot be read: {error}",
            key,
            "save it again with save_to_disk",
        ) from None
    if splits:
        raise DataError(
            f"{folder} has the splits {join_names(splits)}",
            key,
            f"name one of them: {key}={folder / splits[0]}",
        )
    raise DataError(
        f"{folder} is a folder, and no dataset",
        key,
        f"name files in it: {key}={folder}/*.jsonl, .json or .parquet; a folder that save_to_disk "
        "has written is read, too",
    )
