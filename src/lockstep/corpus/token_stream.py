"""Token ids of many documents, concatenated in files: written as a stream, read by mmap.

    train.00000.ids, ...       SHARD_TOKENS ids each; 16 bits if the vocabulary allows it, else 32
    train.00000.counts, ...    loss mask, one byte per id: 1 for ids with a loss; optional
    train.offsets              documents + 1 64-bit integers: the first position of each document
    train.json                 {"documents", "tokens", "bits", "shard_tokens", "counted"}

Writing and reading need memory for a few documents only.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.files import open_unpublished, publish, read_json, write_json

Ints = npt.NDArray[np.int64]
SHARD_TOKENS = 1 << 26  # 128 MiB of ids
ONE_FILE = 1 << 62


class TokenStreamWriter:
    """Writes a stream to `folder`. It is complete when `close` returns."""

    def __init__(
        self,
        folder: Path,
        name: str,
        vocab_size: int,
        *,
        has_loss_mask: bool = False,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        self.folder = folder
        self.name = name
        self.has_loss_mask = has_loss_mask
        self.shard_tokens = shard_tokens
        self.bits = 16 if vocab_size <= 1 << 16 else 32
        self.tokens = 0
        self.documents = 0
        self.paths = [folder / f"{name}.offsets"]
        self._offsets = open_unpublished(self.paths[0])
        self._write_offset()
        self._files: dict[str, BinaryIO] = {}

    def add(self, ids: Iterable[int], loss_mask: Iterable[bool] | None = None) -> None:
        """Append a document. `loss_mask`: which ids have a loss, if the stream has a mask."""
        row = array("H" if self.bits == 16 else "I", ids)
        columns = {"ids": row}
        if self.has_loss_mask:
            columns["counts"] = array("B", loss_mask or ())
        position = 0
        while position < len(row):
            space = self.shard_tokens - self.tokens % self.shard_tokens
            if space == self.shard_tokens:
                self._next_shard(columns)
            for kind, values in columns.items():
                self._files[kind].write(values[position : position + space].tobytes())
            written = min(space, len(row) - position)
            position += written
            self.tokens += written
        self.documents += 1
        self._write_offset()

    def _write_offset(self) -> None:
        self._offsets.write(self.tokens.to_bytes(8, sys.byteorder))

    def _next_shard(self, kinds: Iterable[str]) -> None:
        for file in self._files.values():
            publish(file)
        for kind in kinds:
            path = self.folder / f"{self.name}.{self.tokens // self.shard_tokens:05d}.{kind}"
            self._files[kind] = open_unpublished(path)
            self.paths.append(path)

    def close(self) -> list[Path]:
        """Sync all files to disk; return their paths."""
        for file in [*self._files.values(), self._offsets]:
            publish(file)
        header = {
            "documents": self.documents,
            "tokens": self.tokens,
            "bits": self.bits,
            "counted": self.has_loss_mask,
            "shard_tokens": self.shard_tokens,
        }
        write_json(self.folder / f"{self.name}.json", header)
        return [*self.paths, self.folder / f"{self.name}.json"]


@dataclass(frozen=True)
class TokenStream:
    """A stream on disk. offsets: (documents + 1,) int64; ids, loss_mask: one array per file."""

    tokens: int
    shard_tokens: int
    offsets: Ints
    ids: list[npt.NDArray[Any]]
    loss_mask: list[npt.NDArray[Any]]

    @classmethod
    def open(cls, folder: Path, name: str) -> TokenStream:
        """Map the files of a stream. DataError if a file is missing or has the wrong size."""
        try:
            header = read_json(folder / f"{name}.json")
            tokens, shard_tokens = header["tokens"], header["shard_tokens"]
            sizes = [min(shard_tokens, tokens - first) for first in range(0, tokens, shard_tokens)]

            def files(ending: str, kind: type[np.generic]) -> list[npt.NDArray[Any]]:
                return [
                    map_array(folder / f"{name}.{number:05d}.{ending}", kind, size)
                    for number, size in enumerate(sizes)
                ]

            offsets = map_array(folder / f"{name}.offsets", np.int64, header["documents"] + 1)
            ids = files("ids", np.uint16 if header["bits"] == 16 else np.uint32)
            loss_mask = files("counts", np.uint8) if header["counted"] else []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"the tokens of {name} cannot be read: {error}",
                str(folder),
                "remove the folder to prepare it again",
            ) from None
        return cls(tokens, shard_tokens, offsets, ids, loss_mask)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, start: int, end: int) -> Ints:
        return self._gather(self.ids, start, end)

    def read_loss_mask(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        return self._gather(self.loss_mask, start, end).astype(bool)

    def _gather(self, shards: list[npt.NDArray[Any]], start: int, end: int) -> Ints:
        parts = [np.zeros(0, np.int64)]
        for number in range(start // self.shard_tokens, len(shards)):
            first = number * self.shard_tokens
            if first >= end:
                break
            parts.append(shards[number][max(0, start - first) : end - first].astype(np.int64))
        return np.concatenate(parts)

    def documents_at(self, start: int, end: int) -> Ints:
        first = int(np.searchsorted(self.offsets, start, side="right")) - 1
        last = int(np.searchsorted(self.offsets, end - 1, side="right"))
        return first + np.searchsorted(
            self.offsets[first + 1 : last], np.arange(start, end), side="right"
        )


def map_array(path: Path, kind: type[np.generic], length: int) -> npt.NDArray[Any]:
    """Map a file as an array of `length` numbers. ValueError if its size differs."""
    size, expected = path.stat().st_size, length * np.dtype(kind).itemsize
    if size != expected:
        raise ValueError(f"{path.name} has {size} bytes, not {expected}")
    return np.memmap(path, kind, "r") if length else np.zeros(0, kind)
