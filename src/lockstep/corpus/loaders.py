"""Micro-batches: of pairs, and of rows of equal length from a stream of documents or chats.

`CutRows` concatenates the documents: row i holds positions i * length .. (i + 1) * length.
`PackedRows` packs whole chats into rows. A label is the next token of the same document.
A loader gathers 2,000 tokens from memory-mapped arrays in 0.3 ms.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.corpus import cache
from lockstep.corpus.documents import in_groups
from lockstep.corpus.encoded_pairs import EncodedPairs
from lockstep.corpus.prepared import versions
from lockstep.corpus.token_stream import Ints, TokenStream
from lockstep.data.manifest import NOT_SHARED
from lockstep.data.order import BucketOrder, UniformOrder, permute, splitmix64
from lockstep.files import add_checksum, read_json, verify_checksum, write_atomic, write_json

INDEX_FORMAT = 2  # increment it when `pack_rows` changes
CPU = torch.device("cpu")
IGNORE_INDEX = -100  # label of positions without a loss (models/llama.py)
Row = tuple[Ints, Ints, Ints]  # tokens, labels, documents


def to_device(arrays: Iterable[Ints], device: torch.device) -> Iterator[Tensor]:
    for array in arrays:
        tensor = torch.from_numpy(array)
        if device.type == "cuda":
            tensor = tensor.pin_memory()
        yield tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class PairBatch:
    """source (B, S): text, END; target (B, T): BEGIN, text; labels (B, T): text, END.

    count  tokens of the target, END included
    """

    source: Tensor
    target: Tensor
    labels: Tensor
    count: int


@dataclass(frozen=True)
class PairLoader:
    """Micro-batches of `pairs` in `order`, on `device`. Stateless: steps in any order. Padded to
    the longest sentence, or with `fixed_shapes`, for torch.compile, to the shape of the bucket."""

    pairs: EncodedPairs
    order: BucketOrder
    device: torch.device
    fixed_shapes: bool = False

    sample_kind: ClassVar[str] = "pairs"

    def samples(self, step: int, k: int) -> list[int]:
        """Return the numbers of the training pairs of micro-batch `k`."""
        return sorted(self.order.ids(step, k).tolist())

    def samples_in_row(self, step: int, k: int, row: int) -> list[int]:
        return [int(self.order.ids(step, k)[row])]

    def micro_batch(self, step: int, k: int) -> PairBatch:
        shape = self.order.shape(step, k)
        ids = self.order.ids(step, k)
        lengths = [shape.length, shape.length]
        if not self.fixed_shapes:
            lengths = self.pairs.lengths[ids].max(axis=0).tolist()
        arrays = self.pairs.gather(ids, shape.rows, *lengths)
        source, target, labels = to_device(arrays, self.device)
        count = int(self.pairs.lengths[ids, 1].sum())
        return PairBatch(source, target, labels, count)


@dataclass(frozen=True)
class TextBatch:
    """tokens, labels, documents (or None): (B, T) int64, as for `Llama.forward`.

    count  labels that are not ignored
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None
    count: int


@dataclass(frozen=True)
class CutRows:
    """Rows cut from a stream. The tokens after the last full row are dropped."""

    stream: TokenStream
    length: int

    def __len__(self) -> int:
        return max(0, self.stream.tokens - 1) // self.length

    def row(self, i: int) -> Row:
        """Return (tokens, labels, documents) of row i, each (length,)."""
        return window(self.stream, i * self.length, self.length)

    def members(self, i: int) -> list[int]:
        """Return the numbers of the documents in row i."""
        return sorted({*self.stream.documents_at(i * self.length, (i + 1) * self.length).tolist()})


def window(stream: TokenStream, start: int, length: int) -> Row:
    """Return (tokens, labels, documents) at positions start .. start + length - 1, or to the end of
    the stream. The label of a document's last token is IGNORE_INDEX."""
    end = min(start + length, stream.tokens)
    ids = stream.read(start, min(end + 1, stream.tokens))
    documents = stream.documents_at(start, min(end + 1, stream.tokens))
    labels = np.full(end - start, IGNORE_INDEX, np.int64)
    follows = documents[1:] == documents[: len(documents) - 1]
    labels[: len(follows)] = np.where(follows, ids[1:], IGNORE_INDEX)
    return ids[: end - start], labels, documents[: end - start]


@dataclass(frozen=True)
class WindowRows:
    """Windows over a held-out stream, each half a row after the previous one. Each token is scored
    once, in a window with at least half a row of context; tokens that were scored before have the
    label IGNORE_INDEX."""

    stream: TokenStream
    length: int

    @cached_property
    def starts(self) -> list[int]:
        """The first position of each window."""
        starts: list[int] = []
        scored = 0  # end of the positions that are already scored
        for start in range(0, max(1, self.stream.tokens - 1), self.length - self.length // 2):
            end = min(start + self.length, self.stream.tokens)
            if end <= scored:
                break
            starts.append(start)
            scored = end
        return starts

    def __len__(self) -> int:
        return len(self.starts)

    def length_of(self, i: int) -> int:
        return min(self.length, self.stream.tokens - self.starts[i])

    def row(self, i: int) -> Row:
        start = self.starts[i]
        tokens, labels, documents = window(self.stream, start, self.length)
        if i:
            labels[: self.starts[i - 1] + self.length - start] = IGNORE_INDEX
        return tokens, labels, documents


class PackedRows:
    """Rows of whole documents of a stream with a loss mask; none is longer than `length` + 1.

    index  from `pack_rows`, in memory or mapped
    """

    def __init__(self, stream: TokenStream, length: int, index: Ints) -> None:
        self.stream, self.length = stream, length
        rows = len(index) - len(stream)
        self._first = index[:rows]
        self._members = index[rows:]

    def __len__(self) -> int:
        return len(self._first) - 1

    def length_of(self, i: int) -> int:
        return self.length

    def members(self, i: int) -> list[int]:
        members: list[int] = self._members[self._first[i] : self._first[i + 1]].tolist()
        return members

    def row(self, i: int) -> Row:
        bounds = [self.stream.offsets[member : member + 2].tolist() for member in self.members(i)]
        return fill_row(self.stream, bounds, self.length)


def fill_row(stream: TokenStream, bounds: Sequence[Sequence[int]], length: int) -> Row:
    """Return a row of the documents between these positions of a stream, with their loss masks."""
    tokens = np.zeros(length, np.int64)
    labels = np.full(length, IGNORE_INDEX, np.int64)
    documents = np.full(length, len(bounds), np.int64)  # padding is a separate document
    position = 0
    for number, (start, end) in enumerate(bounds):
        ids = stream.read(start, end)
        span = slice(position, position + len(ids) - 1)
        tokens[span] = ids[:-1]
        labels[span] = ids[1:]
        documents[span] = number
        if stream.loss_mask:  # that of chats
            labels[span][~stream.read_loss_mask(start, end)[1:]] = IGNORE_INDEX
        position = span.stop
    return tokens, labels, documents


class DocumentRows:
    """Rows of one document, padded; a longer document is cut into several rows."""

    def __init__(self, stream: TokenStream, length: int) -> None:
        self.stream, self.length = stream, length
        sizes = np.diff(stream.offsets) - 1  # the last token of a document is only a label
        self._last = np.cumsum(-(-sizes // length))  # row of each document, + 1

    def __len__(self) -> int:
        return int(self._last[-1]) if len(self._last) else 0

    def length_of(self, i: int) -> int:
        return self.length

    def members(self, i: int) -> list[int]:
        return [int(np.searchsorted(self._last, i, side="right"))]

    def row(self, i: int) -> Row:
        (member,) = self.members(i)
        first, end = self.stream.offsets[member : member + 2].tolist()
        number = i - int(self._last[member - 1]) if member else i
        start = first + number * self.length
        end = min(start + self.length + 1, end)
        tokens, labels, _ = fill_row(self.stream, [(start, end)], self.length)
        return tokens, labels, np.zeros(self.length, np.int64)  # padding after it has no effect


def save_packed_rows(
    folder: Path, stream: TokenStream, length: int, seed: int, source: str
) -> tuple[str, str]:
    """For rank 0: write the index of the rows of prepared data, unless `folder` has it. Return the
    name of the file and its sha256.

    source  identifies the prepared data
    """
    key = hashlib.sha256(json.dumps([INDEX_FORMAT, source, length, seed]).encode()).hexdigest()[:16]
    path = folder / f"rows-{key}.npy"
    description = path.with_suffix(".json")
    with suppress(FileNotFoundError, ValueError, KeyError):  # absent or damaged
        return path.name, str(verify_checksum(read_json(description))["digest"])
    entry, folders = cache.entry_of(lambda: [path.name, *versions()]), {"rows": folder}
    if not cache.take(entry, folders):
        content = io.BytesIO()
        np.save(content, pack_rows(stream, length, seed))
        write_atomic(path, content.getvalue())
        digest = hashlib.sha256(content.getbuffer()).hexdigest()
        write_json(description, add_checksum({"digest": digest}))
        cache.keep(entry, folders, [path, description], NOT_SHARED)
    return path.name, str(read_json(description)["digest"])


def pack_rows(stream: TokenStream, length: int, seed: int) -> Ints:
    """Return the index of `PackedRows`: for each row the number of its first member, and the number
    of members; the members, which are document numbers."""
    sizes = np.diff(stream.offsets) - 1  # the last token of a document is only a label
    rows = pack(sizes, length, seed)
    members = np.fromiter(itertools.chain.from_iterable(rows), np.int64, len(stream))
    return np.concatenate([np.cumsum([0, *map(len, rows)]), members])


def pack(sizes: npt.NDArray[np.int64], length: int, seed: int) -> list[list[int]]:
    """Pack documents of `sizes` (documents,) into rows by best fit decreasing; return the document
    numbers of each row. A permutation of `seed` orders equal sizes."""
    shuffled = np.arange(len(sizes))
    if len(sizes):
        shuffled = permute(shuffled, len(sizes), splitmix64(seed, 0xBED))
    order = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    rows: list[list[int]] = []
    rows_by_space: list[list[int]] = [[] for _ in range(length + 1)]
    spaces = 0  # bit s is set if a row has space s
    for document in order.tolist():
        size = int(sizes[document])
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces ^= 1 << space
        else:
            space = length
            row = len(rows)
            rows.append([])
        rows[row].append(document)
        rows_by_space[space - size].append(row)
        spaces |= 1 << (space - size)
    return rows


@dataclass(frozen=True)
class RowLoader:
    """Micro-batches of rows in `order`, on `device`. Stateless: steps in any order."""

    rows: CutRows | PackedRows | DocumentRows
    order: UniformOrder
    device: torch.device

    sample_kind: ClassVar[str] = "documents"

    def samples(self, step: int, k: int) -> list[int]:
        """Return the numbers of the training documents in the rows of micro-batch `k`."""
        rows = self.order.ids(step, k).tolist()
        return sorted({number for i in rows for number in self.rows.members(i)})

    def samples_in_row(self, step: int, k: int, row: int) -> list[int]:
        return self.rows.members(int(self.order.ids(step, k)[row]))

    def micro_batch(self, step: int, k: int) -> TextBatch:
        rows = self.order.ids(step, k).tolist()
        return batch_of([self.rows.row(i) for i in rows], self.device)


def batch_of(rows: list[Row], device: torch.device) -> TextBatch:
    arrays = [np.stack(column) for column in zip(*rows, strict=True)]
    has_several = bool((arrays[2] != arrays[2][:, :1]).any())
    count = int((arrays[1] != IGNORE_INDEX).sum())
    tokens, labels, documents = to_device(arrays, device)
    return TextBatch(tokens, labels, documents if has_several else None, count)


class HeldOutBatches(Dataset[TextBatch]):
    """The rows in which a split is scored, in batches of at most `rows_per_batch` rows of one
    length."""

    def __init__(
        self,
        rows: PackedRows | WindowRows | DocumentRows,
        rows_per_batch: int,
        device: torch.device = CPU,
    ) -> None:
        self.rows = rows
        self.batches = list(in_groups(range(len(rows)), rows_per_batch, kind=rows.length_of))
        self.device = device

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> TextBatch:
        return batch_of([self.rows.row(number) for number in self.batches[i]], self.device)
