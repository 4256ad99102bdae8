"""The source of a run's data: its files and splits; and documents, as a stream.

    stdlib       source code of Python's standard library: available everywhere, no download
    text         files, plain or .gz: one document each, or .jsonl with the text in `data.column`
    huggingface  a dataset of the hub or of a local folder, with the text in `data.column`

Long files are cut at line ends into documents of at most PIECE_BYTES, to bound the memory. Without
files for validation and test, documents are held out by the hash of their text, so equal documents
are in one split; if a split would be empty, the last part of each document is held out instead.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

from lockstep.config import schema as config
from lockstep.corpus import cldr
from lockstep.corpus.files import Record, dataset_files, decode_text, lines_of, records_of
from lockstep.errors import DataError

T = TypeVar("T")
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
PIECE_BYTES = 1 << 20
ENDS_BYTES = 1 << 16
HashFiles = Callable[[list[Path]], dict[Path, str]]


@dataclass(frozen=True)
class Document:
    name: str
    text: str


def documents(
    data: config.DataOptions, inside: bool | None = None
) -> Iterator[tuple[Split, Document]]:
    """Yield every document that is not empty, with its split, in a fixed order. DataError.

    inside  hold out parts of documents instead of whole ones; None: as `held_inside` decides
    """
    named = splits_of(data)
    missing: list[Split] = [split for split in SPLITS[1:] if split not in named]
    if inside is None:
        inside = held_inside(data)
    for split in named:
        for document in read(data, split, named[split]):
            if not document.text.strip():
                continue
            if split != "train":
                yield split, document
            elif inside:
                yield from split_document(document, data.held_out_share, missing)
            else:
                chosen = choose_split(document.text, data.held_out_share)
                yield ("train" if chosen in named else chosen), document


def splits_of(data: config.DataOptions) -> dict[Split, str]:
    """Return the splits of the source, with the dataset's name of each. DataError: used twice."""
    if data.kind == "huggingface":
        return dict(import_module("lockstep.corpus.huggingface").splits_of(data))
    owner: dict[Path, str] = {}
    files = files_of(data)
    for split, paths in files.items():
        for path in paths:
            if owner.setdefault(path.resolve(), split) != split:
                raise DataError(
                    f"{path} is both in data.{owner[path.resolve()]} and in data.{split}",
                    f"data.kind={data.kind}",
                    "remove one of them; without files for validation, documents are held out",
                )
    return dict.fromkeys(["train", *(split for split in SPLITS[1:] if split in files)], "")


def held_inside(data: config.DataOptions) -> bool:
    """Whether the source has too few documents to hold out whole ones: a split would be empty."""
    named = splits_of(data)
    needed = {"train", *(split for split in SPLITS[1:] if split not in named)}
    if data.held_out_share == 0 or len(needed) == 1:
        return False
    for split, _ in documents(data, inside=False):
        needed.discard(split)
        if not needed:
            return False
    return True


def split_document(
    document: Document, share: float, held_out: Sequence[Split]
) -> Iterator[tuple[Split, Document]]:
    """Yield a document in parts, cut after a line, else after a word: the start for training, then
    a share of its characters for each of `held_out`."""
    text, start = document.text, 0
    for number, split in enumerate(("train", *held_out)):
        end = round(len(text) * (1 - share * (len(held_out) - number)))
        if number < len(held_out):
            low = max(start + 1, end - round(len(text) * share / 2))
            end = text.rfind("\n", low, end) + 1 or text.rfind(" ", low, end) + 1 or max(start, end)
        if text[start:end].strip():
            yield (
                split,
                Document(f"{document.name}, characters {start:,} to {end:,}", text[start:end]),
            )
        start = end


def choose_split(text: str, held_out_share: float) -> Split:
    """Return the split of a document by the hash of its text, for a source without splits."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    position = int.from_bytes(digest, "big") / 2**64
    if position < held_out_share:
        return "validation"
    return "test" if position < 2 * held_out_share else "train"


def read(data: config.DataOptions, split: Split, named: str) -> Iterator[Document]:
    """Yield the documents of one split. `named`: the dataset's name of it."""
    if data.kind == "stdlib":
        yield from read_stdlib(Path(sysconfig.get_paths()["stdlib"]))
    elif data.kind == "text":
        for path in files_of(data).get(split, ()):
            yield from read_file(path, data.column)
    else:
        reader = import_module("lockstep.corpus.huggingface")
        yield from texts_of(reader.records(data, named, [data.column]), data.column)


def source_of(data: config.DataOptions, hashes: HashFiles | None = None) -> dict[str, Any]:
    """Return a description of the source, to be compared when a prepared run resumes. Of files:
    names without folders, sizes and hashes. DataError: missing.

    hashes  returns the hash of each file; None: hash both ends of it
    """
    if data.kind == "stdlib":
        return {"python": sys.version.split()[0]}
    if data.kind == "cldr":
        return {"cldr": cldr.fingerprint(data.source, data.target)}
    source: dict[str, Any] = {}
    files = files_of(data)
    if data.kind == "huggingface":
        path = Path(data.dataset)
        source = {"dataset": path.resolve().name if path.is_dir() else data.dataset}
        names = [list(getattr(data, split)) for split in SPLITS]
        source |= {"subset": data.subset, "splits": names}
    try:
        digests = (hashes or hashes_of_ends)([path for paths in files.values() for path in paths])
        listed = {
            split: [[path.name, path.stat().st_size, digests[path]] for path in paths]
            for split, paths in files.items()
        }
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror}",
            f"data.kind={data.kind}",
            "is the path right?",
        ) from None
    return source | listed


def content_of(data: config.DataOptions, hashes: HashFiles) -> dict[str, Any] | None:
    """Return JSON values that differ whenever anything differs that the source gives; None: that
    is unknown. They read all of it. DataError: missing.

    hashes  returns the hash of each file
    """
    if data.kind == "huggingface":
        files = import_module("lockstep.corpus.huggingface").cached_files(data)
        digests = hashes([path for paths in files.values() for path in paths])
        listed = {split: [digests[path] for path in paths] for split, paths in files.items()}
        return {"dataset": data.dataset, "rows": listed} if all(listed.values()) else None
    content: dict[str, Any] = {"source": source_of(data, hashes)}
    if data.kind == "text":  # the held-out documents have their names
        content["names"] = list(map(str, chain.from_iterable(files_of(data).values())))
    if data.kind == "stdlib":
        hashed = hashlib.sha256()
        for document in read(data, "train", ""):
            hashed.update(json.dumps([document.name, document.text]).encode())
        content["documents"] = hashed.hexdigest()
    return content


def hashes_of_ends(paths: list[Path]) -> dict[Path, str]:
    hashes = {}
    for path in paths:
        with open(path, "rb") as file:
            first = file.read(ENDS_BYTES)
            file.seek(max(0, path.stat().st_size - ENDS_BYTES))
            hashes[path] = hashlib.sha256(first + file.read(ENDS_BYTES)).hexdigest()
    return hashes


def files_of(data: config.DataOptions) -> dict[str, list[Path]]:
    """Return the files of each split that has some, sorted within each pattern; of a local dataset
    all of them. DataError: no match."""
    if data.kind == "huggingface":
        paths = sorted(path for path in Path(data.dataset).rglob("*") if path.is_file())
        return {"dataset_files": paths} if Path(data.dataset).is_dir() else {}
    if data.kind not in ("files", "text", "chat"):
        return {}  # generated: ignores the files of a recipe
    patterns = {split: getattr(data, split) for split in SPLITS}
    return {
        split: [path for pattern in given for path in matching(data, split, pattern)]
        for split, given in patterns.items()
        if given
    }


def matching(data: config.DataOptions, split: str, pattern: str) -> list[Path]:
    if data.kind == "files":
        return [Path(pattern)]
    if data.kind == "chat" and Path(pattern).is_dir():
        return dataset_files(Path(pattern), f"data.{split}")
    paths = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
    if not paths:
        raise DataError(
            f"there is no file {pattern}",
            f"data.{split}",
            "check the path; * matches any name, ** any folders",
        )
    return paths


def read_stdlib(root: Path) -> Iterator[Document]:
    """Yield the .py files under `root`, without installed packages and files that are not UTF-8."""
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] in ("site-packages", "dist-packages"):
            continue
        try:
            yield Document(str(inside), path.read_bytes().decode())
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror}",
                "data.kind=stdlib",
                "repair the installation of Python",
            ) from None


def read_file(path: Path, column: str) -> Iterator[Document]:
    if path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        yield from texts_of(records_of(path), column)
        return
    for number, lines in enumerate(in_groups(lines_of(path), PIECE_BYTES, size=len), start=1):
        name = f"{path}, piece {number:,}" if number > 1 else str(path)
        yield Document(name, decode_text(b"".join(lines), name))


def texts_of(records: Iterable[Record], column: str) -> Iterator[Document]:
    """Yield the text of each record. A null is an empty text. DataError: there is no text."""
    for where, record in records:
        if not isinstance(record, dict):
            columns = type(record).__name__
        elif isinstance(text := record.get(column, 0), str | None):
            yield Document(where, text or "")
            continue
        else:
            columns = ", ".join(map(str, record))
        raise DataError(
            f"no text in the column {column!r}, but {columns}",
            where,
            "set data.column to one of its columns",
        )


def in_groups(
    items: Iterable[T],
    limit: int,
    *,
    size: Callable[[T], int] = lambda _: 1,
    kind: Callable[[T], object] = lambda _: 0,
) -> Iterator[list[T]]:
    """Yield groups of consecutive items of one kind, of total size `limit` or one item."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and (total + size(item) > limit or kind(item) != kind(group[0])):
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group
