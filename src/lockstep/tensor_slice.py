"""What one worker holds of a tensor: some of its rows, and some of its columns.

    whole    (4096, 1024)        as the model, its first values and its checkpoints know it
    tensor   rows 0-2047         what the tensor axis leaves (or columns: a product whose results are added)
    shard    rows 1024-2047      and of those what the shard axis leaves

Rows may be several ranges: where a matrix packs query, key and value, the tensor axis takes a part of each. So every layout is a set of
pieces of the same whole tensors, and one layout is turned into another by putting the pieces together and cutting anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Array = TypeVar("Array", bound=Any)  # of numpy or torch: this file imports neither, as commands that only read bytes want no torch


@dataclass(frozen=True)
class Piece:
    """A part of a tensor of `shape`.

    rows     ranges [start, stop) of its first dimension, in the order in which they are held
    columns  range of its second dimension; None: all
    """

    shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Piece:
        """All of it."""
        return cls(tuple(shape), ((0, shape[0] if shape else 1),))

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the part."""
        if not self.shape:
            return ()
        rest = self.shape[1:] if self.columns is None else (self.columns[1] - self.columns[0], *self.shape[2:])
        return sum(stop - start for start, stop in self.rows), *rest

    @property
    def is_whole(self) -> bool:
        return self.size == self.shape

    def cut_rows(self, part: int, parts: int, groups: int = 1) -> Piece:
        """Part `part` of `parts`, as torch.chunk cuts: equal ones, the last ones shorter or empty.

        groups  equal blocks of rows, of each of which a part is taken
        """
        total = self.size[0]
        block = total // groups
        length = -(-block // parts)
        taken = [(g * block + min(block, part * length), g * block + min(block, (part + 1) * length)) for g in range(groups)]
        rows = [piece for start, stop in taken for piece in self._among_rows(start, stop)]
        return Piece(self.shape, tuple(rows), self.columns)

    def _among_rows(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows [start, stop) of those that are held, as ranges of the whole."""
        found, passed = [], 0
        for first, last in self.rows:
            low, high = max(start, passed), min(stop, passed + last - first)
            if low < high:
                found.append((first + low - passed, first + high - passed))
            passed += last - first
        return found

    def cut_columns(self, part: int, parts: int) -> Piece:
        """Part `part` of `parts` equal ones."""
        assert self.columns is None and self.shape[1] % parts == 0
        length = self.shape[1] // parts
        return Piece(self.shape, self.rows, (part * length, (part + 1) * length))

    def meets(self, other: Piece) -> bool:
        """Whether some numbers are in both."""
        (left, right), (first, last) = self.columns or (0, math.inf), other.columns or (0, math.inf)
        rows = any(start < end and begin < stop for start, stop in self.rows for begin, end in other.rows)
        return rows and left < last and first < right

    def of(self, whole: Array) -> Array:
        """This part of `whole`: a view where it is one range, else a copy."""
        assert tuple(whole.shape) == self.shape, (whole.shape, self.shape)
        if not self.shape:
            return whole
        if len(self.rows) == 1:
            rows: Array = whole[self.rows[0][0] : self.rows[0][1]]
        else:
            rows = whole[[row for start, stop in self.rows for row in range(start, stop)]]
        if self.columns is not None:
            rows = rows[:, self.columns[0] : self.columns[1]]
        return rows

    def copy_to(self, other: Piece, part: Array, target: Array) -> None:
        """Copy what both pieces have from `part`, the values of this one, into `target`, those of the other piece of the same tensor."""
        if not self.shape:
            target[...] = part
            return
        columns: list[tuple[slice, ...]] = [(), ()]
        if self.columns or other.columns:
            (left, right), (first, last) = self.columns or (0, self.shape[1]), other.columns or (0, self.shape[1])
            begin, end = max(left, first), max(left, first, min(right, last))
            columns = [(slice(begin - left, end - left),), (slice(begin - first, end - first),)]
        passed = 0
        for start, stop in self.rows:
            filled = 0
            for first_row, last_row in other.rows:
                low, high = max(start, first_row), min(stop, last_row)
                if low < high:
                    here = slice(passed + low - start, passed + high - start), *columns[0]
                    there = slice(filled + low - first_row, filled + high - first_row), *columns[1]
                    target[there] = part[here]
                filled += last_row - first_row
            passed += stop - start

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "rows": [list(one) for one in self.rows], "columns": self.columns and list(self.columns)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Piece:
        columns = value["columns"]
        rows = tuple((int(start), int(stop)) for start, stop in value["rows"])
        return cls(tuple(value["shape"]), rows, (int(columns[0]), int(columns[1])) if columns else None)
