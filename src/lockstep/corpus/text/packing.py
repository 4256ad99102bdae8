"""Rows of equal length for a Llama, from a stream of documents.

`CutRows` concatenates the documents: row i holds positions i * length .. (i + 1) * length.
`PackedRows` packs whole chats into rows. A label is the next token of the same document.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.corpus.text.token_stream import Ints, TokenStream
from lockstep.data.order import UniformOrder, permute, splitmix64
from lockstep.files import add_checksum, read_json, verify_checksum, write_atomic, write_json

INDEX_FORMAT = 2  # increment it when `pack_rows` changes
IGNORE_INDEX = -100  # label of positions without a loss (models/llama.py)


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

    def row(self, i: int) -> tuple[Ints, Ints, Ints]:
        """Return (tokens, labels, documents) of row i, each (length,)."""
        return window(self.stream, i * self.length, self.length)

    def members(self, i: int) -> list[int]:
        """Return the numbers of the documents in row i."""
        return sorted({*self.stream.documents_at(i * self.length, (i + 1) * self.length).tolist()})


def window(stream: TokenStream, start: int, length: int) -> tuple[Ints, Ints, Ints]:
    """Return (tokens, labels, documents) at positions start .. start + length - 1, or to the end of
    the stream. The label of a document's last token is IGNORE_INDEX."""
    end = min(start + length, stream.tokens)
    ids = stream.read(start, min(end + 1, stream.tokens))
    documents = stream.documents_at(start, min(end + 1, stream.tokens))
    labels = np.full(end - start, IGNORE_INDEX, np.int64)
    follows = documents[1:] == documents[: len(documents) - 1]
    labels[: len(follows)] = np.where(follows, ids[1:], IGNORE_INDEX)
    return ids[: end - start], labels, documents[: end - start]


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

    def members(self, i: int) -> list[int]:
        return [int(member) for member in self._members[self._first[i] : self._first[i + 1]]]

    def row(self, i: int) -> tuple[Ints, Ints, Ints]:
        tokens, labels = (
            np.zeros(self.length, np.int64),
            np.full(self.length, IGNORE_INDEX, np.int64),
        )
        members = self.members(i)
        documents = np.full(self.length, len(members), np.int64)  # padding is a separate document
        position = 0
        for number, member in enumerate(members):
            start, end = (int(self.stream.offsets[member + n]) for n in (0, 1))
            ids, loss_mask = self.stream.read(start, end), self.stream.read_loss_mask(start, end)
            span = slice(position, position + len(ids) - 1)
            tokens[span], documents[span] = ids[:-1], number
            labels[span] = np.where(loss_mask[1:], ids[1:], IGNORE_INDEX)
            position += len(ids) - 1
        return tokens, labels, documents


def save_packed_rows(
    folder: Path, stream: TokenStream, length: int, seed: int, source: str
) -> tuple[str, str]:
    """For rank 0: write the index of the rows of prepared data, unless `folder` has it. Return the
    name of the file and its sha256.

    source  identifies the prepared data
    """
    key = hashlib.sha256(json.dumps([INDEX_FORMAT, source, length, seed]).encode()).hexdigest()[:16]
    path = folder / f"rows-{key}.npy"
    try:
        return path.name, str(verify_checksum(read_json(path.with_suffix(".json")))["digest"])
    except (FileNotFoundError, ValueError, KeyError):  # absent or damaged
        content = io.BytesIO()
        np.save(content, pack_rows(stream, length, seed))
        write_atomic(path, content.getvalue())
        digest = hashlib.sha256(content.getbuffer()).hexdigest()
        write_json(path.with_suffix(".json"), add_checksum({"digest": digest}))
        return path.name, digest


def pack_rows(stream: TokenStream, length: int, seed: int) -> Ints:
    """Return the index of `PackedRows`: for each row the number of its first member, and the number
    of members; the members, which are document numbers."""
    rows = pack(
        np.diff(stream.offsets) - 1, length, seed
    )  # the last token of a document is only a label
    members = np.fromiter(itertools.chain.from_iterable(rows), np.int64, len(stream))
    return np.concatenate([np.cumsum([0, *map(len, rows)]), members])


def pack(sizes: npt.NDArray[np.int64], length: int, seed: int) -> list[list[int]]:
    """Pack documents of `sizes` (documents,) into rows by best fit decreasing; return the document
    numbers of each row. A permutation of `seed` orders equal sizes."""
    shuffled = (
        permute(np.arange(len(sizes)), len(sizes), splitmix64(seed, 0xBED))
        if len(sizes)
        else np.zeros(0, np.int64)
    )
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
            rows[row].append(document)
        else:
            space, row = length, len(rows)
            rows.append([document])
        rows_by_space[space - size].append(row)
        spaces |= 1 << (space - size)
    return rows


@dataclass(frozen=True)
class RowLoader:
    """Micro-batches of rows in `order`, on `device`. Stateless: steps in any order."""

    rows: CutRows | PackedRows
    order: UniformOrder
    device: torch.device

    sample_kind: ClassVar[str] = "documents"

    def samples(self, step: int, k: int) -> list[int]:
        """Return the numbers of the training documents in the rows of micro-batch `k`."""
        return sorted(
            {number for i in self.order.ids(step, k).tolist() for number in self.rows.members(i)}
        )

    def micro_batch(self, step: int, k: int) -> TextBatch:
        return batch_of([self.rows.row(int(i)) for i in self.order.ids(step, k)], self.device)


def batch_of(rows: list[tuple[Ints, Ints, Ints]], device: torch.device) -> TextBatch:
    tokens, labels, documents = (
        torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)
    )
    several = bool((documents != documents[:, :1]).any())
    count = int((labels != IGNORE_INDEX).sum())
    if device.type == "cuda":
        tokens, labels, documents = (
            tensor.pin_memory().to(device, non_blocking=True)
            for tensor in (tokens, labels, documents)
        )
    return TextBatch(tokens, labels, documents if several else None, count)
