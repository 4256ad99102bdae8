"""The slice of a tensor that one worker holds: some of its rows and some of its columns.

    whole    (4096, 1024)        the tensor as in the model, its initial weights and its checkpoints
    tensor   rows 0-2047         the chunk of this tensor rank (columns in a row-parallel layer)
    shard    rows 1024-2047      the chunk of that for this shard

Rows may be several ranges: where a matrix packs query, key and value, the tensor axis takes a part
of each. A checkpoint of one layout is loaded in another by copying between overlapping slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

# Of numpy or torch; this module imports neither: commands that only read bytes do not need torch.
Array = TypeVar("Array", bound=Any)


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a tensor of (global) `shape`.

    rows     ranges [start, stop) of the first dimension, in the order of the local tensor
    columns  range [start, stop) of the second dimension; None: all
    """

    shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int] | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorSlice:
        return cls(tuple(shape), ((0, shape[0] if shape else 1),))

    @property
    def local_shape(self) -> tuple[int, ...]:
        if not self.shape:
            return ()
        rest = (
            self.shape[1:]
            if self.columns is None
            else (self.columns[1] - self.columns[0], *self.shape[2:])
        )
        return sum(stop - start for start, stop in self.rows), *rest

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    def split_rows(self, part: int, parts: int, groups: int = 1) -> TensorSlice:
        """Return row chunk `part` of `parts` of each of `groups` equal blocks, as torch.chunk does.

        The last chunk may be shorter or empty. Packed matrices are blocks of rows.
        """
        total = self.local_shape[0]
        block = total // groups
        length = -(-block // parts)
        chunks = [
            (g * block + min(block, part * length), g * block + min(block, (part + 1) * length))
            for g in range(groups)
        ]
        rows = [rows for start, stop in chunks for rows in self._global_rows(start, stop)]
        return TensorSlice(self.shape, tuple(rows), self.columns)

    def _row_ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first local row, first row, end) of each range of rows."""
        passed = 0
        for start, stop in self.rows:
            yield passed, start, stop
            passed += stop - start

    def _global_rows(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the local rows [start, stop) as ranges of global rows."""
        ranges = [
            (max(first + start - local, first), min(first + stop - local, last))
            for local, first, last in self._row_ranges()
        ]
        return [(low, high) for low, high in ranges if low < high]

    def split_columns(self, part: int, parts: int) -> TensorSlice:
        """Return chunk `part` of `parts` equal ones along the columns."""
        assert self.columns is None and self.shape[1] % parts == 0
        length = self.shape[1] // parts
        return TensorSlice(self.shape, self.rows, (part * length, (part + 1) * length))

    def intersection(self, other: TensorSlice) -> TensorSlice:
        """Return the slice of the common elements, which may be empty."""
        columns = None
        if self.columns or other.columns:
            (left, right), (first, last) = (
                self.columns or (0, self.shape[1]),
                other.columns or (0, self.shape[1]),
            )
            columns = max(left, first), max(left, first, min(right, last))
        rows = [
            (max(start, begin), min(stop, end))
            for (start, stop), (begin, end) in product(self.rows, other.rows)
        ]
        return TensorSlice(
            self.shape, tuple((start, stop) for start, stop in rows if start < stop), columns
        )

    def of(self, whole: Array) -> Array:
        """Return this slice of `whole`: a view if it is one range of rows, else a copy."""
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

    def copy_to(self, other: TensorSlice, part: Array, target: Array) -> None:
        """Copy common elements from `part`, of this slice, to `target`, of the slice `other`."""
        if not self.shape:
            target[...] = part
            return
        columns: list[tuple[slice, ...]] = [(), ()]
        if self.columns or other.columns:
            (left, right), (first, last) = (
                self.columns or (0, self.shape[1]),
                other.columns or (0, self.shape[1]),
            )
            begin, end = max(left, first), max(left, first, min(right, last))
            columns = [(slice(begin - left, end - left),), (slice(begin - first, end - first),)]
        for (local, start, stop), (other_local, first_row, last_row) in product(
            self._row_ranges(), other._row_ranges()
        ):
            low, high = max(start, first_row), min(stop, last_row)
            if low < high:
                source = slice(local + low - start, local + high - start), *columns[0]
                destination = (
                    slice(other_local + low - first_row, other_local + high - first_row),
                    *columns[1],
                )
                target[destination] = part[source]

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "rows": [list(rows) for rows in self.rows],
            "columns": self.columns and list(self.columns),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TensorSlice:
        columns = value["columns"]
        rows = tuple((int(start), int(stop)) for start, stop in value["rows"])
        return cls(
            tuple(value["shape"]), rows, (int(columns[0]), int(columns[1])) if columns else None
        )
