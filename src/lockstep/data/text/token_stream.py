"""Token ids of many documents, end to end in files of bounded size: written as they come, mapped when they are read.

    train.00000.ids, train.00001.ids, ...    SHARD_TOKENS ids each, 16 bits where the vocabulary allows it, else 32
    train.00000.counts, ...                  one byte for each id, where only some are learnt: 1 for those
    train.offsets                            documents + 1 numbers of 64 bits: where each document begins
    train.json                               {"documents", "tokens", "bits", "shard_tokens", "counted"}

Neither writing nor reading holds more than a few documents. To find a place among 10**9 tokens is a division, to find its document a
search of 20 steps; both read a few pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.files import read_json, write_json

Ints = npt.NDArray[np.int64]
SHARD_TOKENS = 1 << 26  # 128 MiB of ids


class Writer:
    """Writes a stream under `folder`. It is there when `close` has returned."""

    def __init__(self, folder: Path, name: str, vocabulary: int, *, counted: bool = False, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.name, self.counted, self.shard_tokens = folder, name, counted, shard_tokens
        self.bits = 16 if vocabulary <= 1 << 16 else 32
        self.tokens = self.documents = 0
        self.paths = [folder / f"{name}.offsets"]
        self._offsets = open(self.paths[0], "wb")  # noqa: SIM115
        self._offsets.write(np.zeros(1, np.int64).tobytes())
        self._files: dict[str, BinaryIO] = {}

    def add(self, ids: Iterable[int], counts: Iterable[bool] | None = None) -> None:
        """One more document; `counts` says which of its ids are learnt, when the stream has that."""
        row = np.fromiter(ids, np.uint16 if self.bits == 16 else np.uint32)
        columns = {"ids": row}
        if self.counted:
            columns["counts"] = np.fromiter(counts or (), np.uint8)
        at = 0
        while at < len(row):
            room = self.shard_tokens - self.tokens % self.shard_tokens
            if room == self.shard_tokens:
                self._next_shard(list(columns))
            for kind, values in columns.items():
                self._files[kind].write(values[at : at + room].tobytes())
            taken = min(room, len(row) - at)
            at, self.tokens = at + taken, self.tokens + taken
        self.documents += 1
        self._offsets.write(np.array([self.tokens], np.int64).tobytes())

    def _next_shard(self, kinds: list[str]) -> None:
        self._flush(self._files.values())
        for kind in kinds:
            path = self.folder / f"{self.name}.{self.tokens // self.shard_tokens:05d}.{kind}"
            self._files[kind] = open(path, "wb")  # noqa: SIM115
            self.paths.append(path)

    def close(self) -> list[Path]:
        """Flush all to the disk; the files."""
        self._flush([*self._files.values(), self._offsets])
        self._files = {}
        about = {"documents": self.documents, "tokens": self.tokens, "bits": self.bits, "counted": self.counted}
        write_json(self.folder / f"{self.name}.json", about | {"shard_tokens": self.shard_tokens})
        return [*self.paths, self.folder / f"{self.name}.json"]

    @staticmethod
    def _flush(files: Iterable[BinaryIO]) -> None:
        for file in files:
            file.flush()
            os.fsync(file.fileno())
            file.close()


@dataclass(frozen=True)
class Stream:
    """A stream as `Writer` left it. `offsets` (documents + 1,) int64."""

    tokens: int
    shard_tokens: int
    offsets: Ints
    ids: list[npt.NDArray[np.unsignedinteger]]
    counts: list[npt.NDArray[np.uint8]]

    @classmethod
    def open(cls, folder: Path, name: str) -> Stream:
        """DataError when a file is missing, or has another size than it should."""
        try:
            about = read_json(folder / f"{name}.json")
            tokens, shard_tokens = about["tokens"], about["shard_tokens"]
            sizes = [min(shard_tokens, tokens - first) for first in range(0, tokens, shard_tokens)]
            kind = np.uint16 if about["bits"] == 16 else np.uint32
            offsets = mapped(folder / f"{name}.offsets", np.int64, about["documents"] + 1)
            ids = [mapped(folder / f"{name}.{i:05d}.ids", kind, size) for i, size in enumerate(sizes)]
            counts = [mapped(folder / f"{name}.{i:05d}.counts", np.uint8, size) for i, size in enumerate(sizes) if about["counted"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"the tokens of {name} cannot be read: {error}", str(folder), "remove the folder to prepare it again") from None
        return cls(tokens, shard_tokens, offsets, ids, counts)

    def __len__(self) -> int:
        """Documents."""
        return len(self.offsets) - 1

    def read(self, begin: int, end: int) -> Ints:
        """The ids at positions begin .. end - 1."""
        return self._gather(self.ids, begin, end)

    def read_counts(self, begin: int, end: int) -> npt.NDArray[np.bool_]:
        """Which of the ids at positions begin .. end - 1 are learnt."""
        return self._gather(self.counts, begin, end).astype(bool)

    def _gather(self, shards: list[npt.NDArray[np.unsignedinteger]] | list[npt.NDArray[np.uint8]], begin: int, end: int) -> Ints:
        first, last = begin // self.shard_tokens, max(begin, end - 1) // self.shard_tokens
        parts = [
            shards[i][max(0, begin - i * self.shard_tokens) : end - i * self.shard_tokens] for i in range(first, min(last + 1, len(shards)))
        ]
        return np.concatenate([np.asarray(part, np.int64) for part in parts]) if parts else np.zeros(0, np.int64)

    def documents_at(self, begin: int, end: int) -> Ints:
        """The number of the document that each of the positions begin .. end - 1 belongs to."""
        first = int(np.searchsorted(self.offsets, begin, side="right")) - 1
        last = int(np.searchsorted(self.offsets, end - 1, side="right"))
        return first + np.searchsorted(self.offsets[first + 1 : last], np.arange(begin, end), side="right")

    def ends_in(self, begin: Ints, end: Ints) -> Ints:
        """How many documents end within positions begin .. end - 1, for each of many stretches."""
        return np.searchsorted(self.offsets[1:], end, side="right") - np.searchsorted(self.offsets[1:], begin, side="right")


def mapped(path: Path, kind: type[np.generic], length: int) -> npt.NDArray[Any]:
    """The numbers in a file, mapped. ValueError when there are not `length` of them."""
    if (size := path.stat().st_size) != length * np.dtype(kind).itemsize:
        raise ValueError(f"{path.name} has {size} bytes, not {length * np.dtype(kind).itemsize}")
    return np.memmap(path, kind, "r") if length else np.zeros(0, kind)
