"""Rows of equal length for a Llama, from a stream of documents.

`CutRows` lays the documents end to end and cuts: row i holds positions i * length .. (i + 1) * length, whatever document they belong to.
`PackedRows` puts whole chats into a row, the longest first, each where it leaves least room (best fit decreasing).
Either way a row knows its documents, and a label is what follows in the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.data.order import UniformOrder, mix, permute
from lockstep.data.text.token_stream import Ints, Stream

IGNORED = -100  # a label that counts nothing (models/llama.py)


@dataclass(frozen=True)
class TextBatch:
    """tokens, labels, documents: (B, T) int64 as `Llama.forward` takes them; documents None where each row is of one document."""

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None


class Rows(Protocol):
    """Numbered rows of `length` positions."""

    @property
    def length(self) -> int: ...

    def __len__(self) -> int: ...

    def row(self, i: int) -> tuple[Ints, Ints, Ints]:
        """(tokens, labels, documents) of row i, each (length,)."""

    def counts(self, ids: Ints) -> Ints:
        """How many labels count in each of the rows."""


@dataclass(frozen=True)
class CutRows:
    """Rows cut from a stream; what is left behind the last whole row is left out."""

    stream: Stream
    length: int

    def __len__(self) -> int:
        return max(0, self.stream.tokens - 1) // self.length

    def row(self, i: int) -> tuple[Ints, Ints, Ints]:
        return window(self.stream, i * self.length, self.length)

    def counts(self, ids: Ints) -> Ints:
        begin = ids * self.length
        return self.length - self.stream.ends_in(begin, begin + self.length)


def window(stream: Stream, begin: int, length: int) -> tuple[Ints, Ints, Ints]:
    """(tokens, labels, documents) at positions begin .. begin + length - 1, fewer at the end of the stream.

    The label of a document's last token is IGNORED: nothing follows it.
    """
    end = min(begin + length, stream.tokens)
    ids = stream.read(begin, min(end + 1, stream.tokens))
    documents = stream.documents_at(begin, min(end + 1, stream.tokens))
    labels = np.full(end - begin, IGNORED, np.int64)
    follows = documents[1:] == documents[: len(documents) - 1]
    labels[: len(follows)] = np.where(follows, ids[1:], IGNORED)
    return ids[: end - begin], labels, documents[: end - begin]


class PackedRows:
    """Rows of whole documents of a stream that has `counts`; none is longer than `length` + 1."""

    def __init__(self, stream: Stream, length: int, *, seed: int) -> None:
        self.stream, self.length = stream, length
        sizes = np.diff(stream.offsets) - 1  # the last token has nothing to predict
        self.members = pack(sizes, length, seed)
        learnt = np.array(
            [int(stream.read_counts(int(a) + 1, int(b)).sum()) for a, b in zip(stream.offsets, stream.offsets[1:], strict=False)]
        )
        self._counts = np.array([int(learnt[members].sum()) for members in self.members], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.members)

    def row(self, i: int) -> tuple[Ints, Ints, Ints]:
        tokens, labels = np.zeros(self.length, np.int64), np.full(self.length, IGNORED, np.int64)
        documents = np.full(self.length, len(self.members[i]), np.int64)  # what is left over is a document of its own
        at = 0
        for number, member in enumerate(self.members[i]):
            begin, end = (int(self.stream.offsets[member + n]) for n in (0, 1))
            ids, counts = self.stream.read(begin, end), self.stream.read_counts(begin, end)
            there = slice(at, at + len(ids) - 1)
            tokens[there], documents[there] = ids[:-1], number
            labels[there] = np.where(counts[1:], ids[1:], IGNORED)
            at += len(ids) - 1
        return tokens, labels, documents

    def counts(self, ids: Ints) -> Ints:
        return self._counts[ids]


def pack(sizes: npt.NDArray[np.int64], length: int, seed: int) -> list[list[int]]:
    """Numbers of documents for each row: the longest first, each into the row that it leaves least room in (best fit decreasing).

    sizes  (documents,), none above `length`. Documents of one size come in the order of a permutation of `seed`.
    """
    shuffled = permute(np.arange(len(sizes)), len(sizes), mix(seed, 0xBED)) if len(sizes) else np.zeros(0, np.int64)
    order = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    has_room = 0  # bit r: there is a row with room r
    for document in order.tolist():
        size = int(sizes[document])
        fitting = has_room >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                has_room ^= 1 << room
            rows[row].append(document)
        else:
            room, row = length, len(rows)
            rows.append([document])
        by_room[room - size].append(row)
        has_room |= 1 << (room - size)
    return rows


@dataclass(frozen=True)
class RowLoader:
    """Micro-batches of rows in `order`, on `device`. Holds no position: any step may be asked for at any time."""

    rows: Rows
    order: UniformOrder
    device: torch.device

    def tokens(self, step: int) -> int:
        """Labels of the whole step that count, over all micro-batches."""
        ids = np.concatenate([self.order.ids(step, k) for k in range(self.order.micro_batches)])
        return int(self.rows.counts(ids).sum())

    def micro_batch(self, step: int, k: int) -> TextBatch:
        return batch_of([self.rows.row(int(i)) for i in self.order.ids(step, k)], self.device)


def batch_of(rows: list[tuple[Ints, Ints, Ints]], device: torch.device) -> TextBatch:
    """Rows of one length, together on the device."""
    tokens, labels, documents = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
    several = bool((documents != documents[:, :1]).any())
    if device.type == "cuda":
        tokens, labels, documents = (tensor.pin_memory().to(device, non_blocking=True) for tensor in (tokens, labels, documents))
    return TextBatch(tokens, labels, documents if several else None)
