"""Rows of equal length for a Llama, from a stream of documents.

`CutRows` concatenates the documents: row i holds positions i * length .. (i + 1) * length.
`PackedRows` packs whole chats into rows. A label is the next token of the same document.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.data.order import UniformOrder, permute, splitmix64
from lockstep.data.text.token_stream import Ints, TokenStream

IGNORE_INDEX = -100  # label of positions without a loss (models/llama.py)


@dataclass(frozen=True)
class TextBatch:
    """tokens, labels, documents (or None): (B, T) int64, as for `Llama.forward`."""

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None


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

    def label_counts(self, ids: Ints) -> Ints:
        """Return the number of labels that are not ignored in each row."""
        start = ids * self.length
        return self.length - self.stream.ends_in(start, start + self.length)


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
    """Rows of whole documents of a stream with a loss mask; none is longer than `length` + 1."""

    def __init__(self, stream: TokenStream, length: int, *, seed: int) -> None:
        self.stream, self.length = stream, length
        sizes = np.diff(stream.offsets) - 1  # the last token is only a label
        self.members = pack(sizes, length, seed)
        spans = itertools.pairwise(map(int, stream.offsets))
        trained = np.array([int(stream.read_loss_mask(start + 1, end).sum()) for start, end in spans])
        self._label_counts = np.array([int(trained[members].sum()) for members in self.members], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.members)

    def row(self, i: int) -> tuple[Ints, Ints, Ints]:
        tokens, labels = np.zeros(self.length, np.int64), np.full(self.length, IGNORE_INDEX, np.int64)
        documents = np.full(self.length, len(self.members[i]), np.int64)  # padding is a separate document
        position = 0
        for number, member in enumerate(self.members[i]):
            start, end = (int(self.stream.offsets[member + n]) for n in (0, 1))
            ids, loss_mask = self.stream.read(start, end), self.stream.read_loss_mask(start, end)
            span = slice(position, position + len(ids) - 1)
            tokens[span], documents[span] = ids[:-1], number
            labels[span] = np.where(loss_mask[1:], ids[1:], IGNORE_INDEX)
            position += len(ids) - 1
        return tokens, labels, documents

    def label_counts(self, ids: Ints) -> Ints:
        return self._label_counts[ids]


def pack(sizes: npt.NDArray[np.int64], length: int, seed: int) -> list[list[int]]:
    """Pack documents of `sizes` (documents,) into rows by best fit decreasing; return the document
    numbers of each row. A permutation of `seed` orders equal sizes."""
    shuffled = permute(np.arange(len(sizes)), len(sizes), splitmix64(seed, 0xBED)) if len(sizes) else np.zeros(0, np.int64)
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

    def tokens_in_step(self, step: int) -> int:
        return int(self.rows.label_counts(self.order.step_ids(step)).sum())

    def micro_batch(self, step: int, k: int) -> TextBatch:
        return batch_of([self.rows.row(int(i)) for i in self.order.ids(step, k)], self.device)


def batch_of(rows: list[tuple[Ints, Ints, Ints]], device: torch.device) -> TextBatch:
    tokens, labels, documents = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
    several = bool((documents != documents[:, :1]).any())
    if device.type == "cuda":
        tokens, labels, documents = (tensor.pin_memory().to(device, non_blocking=True) for tensor in (tokens, labels, documents))
    return TextBatch(tokens, labels, documents if several else None)
