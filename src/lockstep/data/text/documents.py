"""The documents of a run that trains a Llama, one after another, never all at once.

    stdlib       the source text of this Python's standard library: on every machine, nothing to download
    text         files: each a document, or a JSON object a line with its text in `data.column` (.jsonl); plain or .gz
    huggingface  a dataset of the hub or of a local folder, with a column `data.column`

A long file is cut at the ends of lines into documents of PIECE_BYTES, so that the memory does not grow with it. Where no files are named
for validation and test, documents are held out by the hash of their text: the same ones on every machine and in every order, and two equal
documents are on one side. Where that leaves a split empty, because there are only a few, the last part of each document is held out.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from lockstep.config import schema as config
from lockstep.data.pairs.textfiles import json_in, lines_of, text_in
from lockstep.errors import ConfigError, DataError

T = TypeVar("T")
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
PIECE_BYTES = 1 << 20
ENDS_BYTES = 1 << 16


@dataclass(frozen=True)
class Document:
    """A text and where it comes from, for people."""

    name: str
    text: str


def documents(data: config.Data, inside: bool | None = None) -> Iterator[tuple[Split, Document]]:
    """Every document with its split, in a fixed order; empty ones are left out. DataError: a source is missing, damaged or no text.

    inside  hold out parts of documents, not whole ones; None: as `held_inside` says
    """
    named = splits_of(data)
    held: list[Split] = [split for split in SPLITS[1:] if split not in named]
    if inside is None:
        inside = held_inside(data)
    for split in named:
        for document in read(data, split, named[split]):
            if not document.text.strip():
                continue
            if split != "train":
                yield split, document
            elif inside:
                yield from cut(document, data.held_out_share, held)
            else:
                chosen = choose_split(document.text, data.held_out_share)
                yield ("train" if chosen in named else chosen), document


def splits_of(data: config.Data) -> dict[Split, str]:
    """The splits that the source has by itself; of a dataset with its names for them. DataError: one is missing, or named for two."""
    given: dict[Split, str] = {split: "".join(getattr(data, split)[:1]) for split in SPLITS}
    if data.kind == "huggingface":
        if several := [split for split in SPLITS if len(getattr(data, split)) > 1]:
            raise ConfigError(f"data.{several[0]} names several splits", f"data.dataset={data.dataset}", "name one, or none")
        # `datasets` takes 1 to 4 s to import and pulls in pandas: only those who ask for it pay.
        reader = importlib.import_module("lockstep.data.pairs.huggingface")
        found: dict[Split, str] = reader.splits_of(data.dataset, data.subset, given)
        return found
    if data.kind not in ("text", "chat"):
        return {"train": ""}  # made here, whatever files a recipe names
    owner: dict[Path, Split] = {}
    for split in SPLITS:
        for path in files_of(data, split):
            if owner.setdefault(path.resolve(), split) != split:
                what = f"{path} is in data.{owner[path.resolve()]} and in data.{split}"
                raise DataError(what, f"data.kind={data.kind}", "leave one out; without files for validation, documents are held out")
    return {split: name for split, name in given.items() if name or split == "train"}


def held_inside(data: config.Data) -> bool:
    """Whether the source has too few documents to hold out whole ones: by their hashes, one of the splits would be empty.

    Reads documents until all splits have one.
    """
    named = splits_of(data)
    needed = {"train", *(split for split in SPLITS[1:] if split not in named)}
    if data.held_out_share == 0 or len(needed) == 1:
        return False
    for split, _ in documents(data, inside=False):
        needed.discard(split)
        if not needed:
            return False
    return True


def cut(document: Document, share: float, held: Sequence[Split]) -> Iterator[tuple[Split, Document]]:
    """A document in parts: the beginning to train on, then a share of its letters for each of `held`. Cut behind a line, else a word."""
    text, begin = document.text, 0
    for number, split in enumerate(("train", *held)):
        end = round(len(text) * (1 - share * (len(held) - number)))
        if number < len(held):
            low = max(begin + 1, end - round(len(text) * share / 2))
            end = text.rfind("\n", low, end) + 1 or text.rfind(" ", low, end) + 1 or max(begin, end)
        if text[begin:end].strip():
            yield split, Document(f"{document.name}, characters {begin:,} to {end:,}", text[begin:end])
        begin = end


def choose_split(text: str, held_out_share: float) -> Split:
    """Which split a document of this text belongs to, where the source has only one."""
    place: float = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") / 2**64
    return "validation" if place < held_out_share else "test" if place < 2 * held_out_share else "train"


def read(data: config.Data, split: Split, named: str) -> Iterator[Document]:
    """The documents of one split of the source, which a dataset calls `named`."""
    if data.kind == "stdlib":
        yield from read_stdlib(Path(sysconfig.get_paths()["stdlib"]))
    elif data.kind == "text":
        for path in files_of(data, split):
            yield from read_file(path, data.column)
    else:
        reader = importlib.import_module("lockstep.data.pairs.huggingface")
        rows = reader.read_column(data.dataset, data.subset, named, data.column)
        yield from (Document(f"{data.dataset} {split} {i}", text) for i, text in rows)


def source_of(data: config.Data) -> dict[str, Any]:
    """What the documents are read from, without reading it: it is compared when a prepared run resumes. DataError when a file is gone.

    Of files their names, their sizes and a hash of both ends, in order; not the folders in which they lie.
    """
    if data.kind == "stdlib":
        return {"python": sys.version.split()[0]}
    if data.kind == "huggingface":
        path = Path(data.dataset)
        return {"dataset": path.resolve().name if path.is_dir() else data.dataset, "subset": data.subset}
    found: dict[str, list[list[str | int]]] = {}
    if data.kind not in ("text", "chat"):
        return found  # made here, whatever files a recipe names
    for split in SPLITS:
        for path in files_of(data, split) if getattr(data, split) else []:
            try:
                found.setdefault(split, []).append([path.name, path.stat().st_size, sha256_of_ends(path)])
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}", f"data.{split}", "is the path right?") from None
    return found


def sha256_of_ends(path: Path) -> str:
    """Hex sha256 over the first and the last ENDS_BYTES of a file."""
    with open(path, "rb") as file:
        first = file.read(ENDS_BYTES)
        file.seek(max(0, path.stat().st_size - ENDS_BYTES))
        return hashlib.sha256(first + file.read(ENDS_BYTES)).hexdigest()


def files_of(data: config.Data, split: Split) -> list[Path]:
    """The files of a split, in the order of their names within each pattern. DataError when a pattern names none."""
    found: list[Path] = []
    for pattern in getattr(data, split):
        paths = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
        if not paths:
            raise DataError(f"there is no file {pattern}", f"data.{split}", "is the path right? * stands for any name, ** for any folders")
        found += paths
    return found


def read_stdlib(root: Path) -> Iterator[Document]:
    """The .py files under `root` without installed packages. Those in other encodings, which test the decoder, are left out."""
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] in ("site-packages", "dist-packages"):
            continue
        try:
            yield Document(str(inside), path.read_bytes().decode())
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", "data.kind=stdlib", "mend the installation of Python") from None


def read_file(path: Path, column: str) -> Iterator[Document]:
    """The documents of a file. DataError: it cannot be read, is no UTF-8, or a line is no object with that column."""
    if path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        yield from (Document(where, column_of(line, column, where)) for where, line in records_of(path))
        return
    for number, piece in enumerate(pieces_of(path), start=1):
        name = f"{path}, piece {number:,}" if number > 1 else str(path)
        yield Document(name, text_in(piece, name))


def records_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """(file and line number for messages, the line) of each line of a file that is not empty."""
    for number, line in enumerate(lines_of(path), start=1):
        if line := line.removeprefix(b"\xef\xbb\xbf").strip():
            yield f"{path}, line {number:,}", line


def column_of(line: bytes, column: str, where: str) -> str:
    """The text in a line of JSON."""
    found = json_in(line, where)
    text = found.get(column) if isinstance(found, dict) else None
    if not isinstance(text, str):
        has = ", ".join(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise DataError(f"no text in the column {column!r}, but {has}", where, "set data.column to a column that is there")
    return text


def pieces_of(path: Path) -> Iterator[bytes]:
    """A file in pieces of whole lines, PIECE_BYTES or one line at most."""
    yield from (b"".join(lines) for lines in in_groups(lines_of(path), PIECE_BYTES, size=len))


def in_groups(
    items: Iterable[T], most: int, *, size: Callable[[T], int] = lambda _: 1, kind: Callable[[T], object] = lambda _: 0
) -> Iterator[list[T]]:
    """Items in their order, in groups of one kind and of sizes that make up `most` at most; a larger item is a group of its own."""
    group: list[T] = []
    held = 0
    for item in items:
        if group and (held + size(item) > most or kind(item) != kind(group[0])):
            yield group
            group, held = [], 0
        group.append(item)
        held += size(item)
    if group:
        yield group
