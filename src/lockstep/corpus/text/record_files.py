"""Records in files: JSON lines, a JSON array, Parquet, and datasets that `save_to_disk` has
written.

Each record becomes a line of JSON, so that all kinds of files have the same checks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.corpus.pairs.textfiles import lines_of
from lockstep.errors import ConfigError, DataError
from lockstep.files import parse_json, read_json
from lockstep.units import join_names

Record = tuple[str, bytes]  # file and number for messages, a line of JSON
PARQUET, ARROW = ".parquet", ".arrow"
STATE, DATASET_DICT = (
    "state.json",
    "dataset_dict.json",
)  # of one dataset on disk, and of several splits
AGAIN = "copy the file again"


def json_lines(path: Path) -> Iterator[Record]:
    """Yield each line that is not empty."""
    for number, line in enumerate(lines_of(path), start=1):
        if line := line.removeprefix(b"\xef\xbb\xbf").strip():
            yield f"{path}, line {number:,}", line


def records_of(path: Path) -> Iterator[Record]:
    """Yield the records of a file of any kind. DataError: it cannot be read."""
    if path.suffix in (PARQUET, ARROW):
        yield from table_rows(path)
        return
    lines = json_lines(path)
    first = next(lines, None)
    if first is None:
        return
    if first[1].startswith(b"["):
        yield from array_items(path)
        return
    yield first
    yield from lines


def array_items(path: Path) -> Iterator[Record]:
    """Yield the items of a JSON array, which is read as a whole."""
    try:
        items = parse_json(b"".join(lines_of(path)).removeprefix(b"\xef\xbb\xbf").decode())
    except ValueError as error:
        what = f"the file starts as a JSON array, and is not one: {error}"
        raise DataError(
            what, str(path), "write one array of records, or one record per line"
        ) from None
    for number, item in enumerate(items, start=1):
        yield f"{path}, record {number:,}", json.dumps(item).encode()


def table_rows(path: Path) -> Iterator[Record]:
    """Yield the rows of a Parquet or Arrow file.

    A table gives each row the keys of all rows, so null keys count as absent.
    """
    if find_spec("pyarrow") is None:
        raise ConfigError(
            f"{path.name} needs the package pyarrow", str(path), 'pip install "lockstep-train[hub]"'
        )
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
                yield (
                    f"{path}, row {number:,}",
                    json.dumps(without_nulls(row), default=as_json_value).encode(),
                )
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{path.name} cannot be read after row {number:,}: {error}", str(path), AGAIN
        ) from None


def without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def as_json_value(value: Any) -> str | None:
    """Return a date or decimal as text; None for bytes, which are no text of a chat."""
    return None if isinstance(value, bytes) else str(value)


def dataset_files(folder: Path, key: str) -> list[Path]:
    """Return the files of a dataset that `save_to_disk` has written to `folder`. DataError: it is
    none.

    key  of the configuration, for messages
    """
    try:
        if (folder / STATE).exists():
            return [
                folder / str(file["filename"]) for file in read_json(folder / STATE)["_data_files"]
            ]
        splits = (
            read_json(folder / DATASET_DICT)["splits"] if (folder / DATASET_DICT).exists() else []
        )
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
    hint = f"name files in it: {key}={folder}/*.jsonl, .json or .parquet; a folder that save_to_disk has written is read, too"
    raise DataError(f"{folder} is a folder, and no dataset", key, hint)
