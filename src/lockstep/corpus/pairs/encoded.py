"""Token ids of one split in memory-mapped arrays: access to a pair takes a few microseconds.

For each side, `ids` holds the concatenated ids of all sentences without special ids, and `offsets`
(sentences + 1,) the first position of each. Processes of one machine share the pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.corpus.tokenizer import BEGIN, END, PAD
from lockstep.errors import DataError
from lockstep.files import open_unpublished, publish

Ints = npt.NDArray[np.int64]
SIDES = ("source", "target")


def write_side(
    folder: Path, split: str, side: str, rows: Iterable[list[int]], vocab_size: int
) -> list[Path]:
    """Write and sync one side of a split, with 16-bit ids if possible; return the files."""
    ids, ends = array("H" if vocab_size <= 1 << 16 else "I"), array("q", [0])
    for row in rows:
        ids.extend(row)
        ends.append(len(ids))
    paths = []
    for name, values in (("ids", ids), ("offsets", ends)):
        path = folder / f"{split}.{side}.{name}.npy"
        file = open_unpublished(path)
        np.save(file, np.asarray(values))
        publish(file)
        paths.append(path)
    return paths


class EncodedPairs:
    """Token ids of a split. lengths: (n, 2) int32, source and target, END included."""

    def __init__(self, ids: list[npt.NDArray[np.unsignedinteger]], offsets: list[Ints]) -> None:
        self._ids, self._offsets = ids, offsets
        self.lengths: npt.NDArray[np.int32] = np.stack(
            [np.diff(o) + 1 for o in offsets], axis=1
        ).astype(np.int32)

    @classmethod
    def open(cls, folder: Path, split: str) -> EncodedPairs:
        """Map a split. DataError if a file is missing or the arrays are inconsistent."""
        arrays: dict[str, list[npt.NDArray[np.unsignedinteger]]] = {"ids": [], "offsets": []}
        for name, loaded in arrays.items():
            for side in SIDES:
                path = folder / f"{split}.{side}.{name}.npy"
                try:
                    loaded.append(np.load(path, mmap_mode="r"))
                except (OSError, ValueError) as error:
                    what = f"{path} cannot be opened: {error}"
                    raise DataError(
                        what,
                        "a file of the prepared corpus",
                        "remove its folder to prepare it again",
                    ) from None
        offsets = [np.asarray(o, dtype=np.int64) for o in arrays["offsets"]]
        if len({len(o) for o in offsets}) > 1 or any(
            o[-1] != len(i) for o, i in zip(offsets, arrays["ids"], strict=True)
        ):
            raise DataError(
                f"the arrays of {split} are inconsistent",
                str(folder),
                "remove the folder to prepare the corpus again",
            )
        return cls(arrays["ids"], offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(
        self, ids: Ints, rows: int, source_length: int, target_length: int
    ) -> tuple[Ints, Ints, Ints]:
        """Return source (rows, S), target (rows, T) and labels (rows, T), int64, padded with PAD.

        source = sentence, END; target = BEGIN, sentence; labels = sentence, END. ValueError if
        there are more ids than rows, or a pair is longer than its side.
        """
        if len(ids) > rows:
            raise ValueError(f"{len(ids)} pairs do not fit into {rows} rows")
        source = self._with_end(0, ids, rows, source_length)
        labels = self._with_end(1, ids, rows, target_length)
        target = np.zeros_like(labels)
        target[: len(ids), 0] = BEGIN
        target[:, 1:] = np.where(labels[:, :-1] == END, PAD, labels[:, :-1])
        return source, target, labels

    def _with_end(self, side: int, ids: Ints, rows: int, length: int) -> Ints:
        out = np.full((rows, length), PAD, dtype=np.int64)
        if not len(ids):
            return out
        start = self._offsets[side][ids][:, None]
        tokens = self.lengths[ids, side].astype(np.int64)[:, None] - 1
        if tokens.max() >= length:
            worst = int(tokens.argmax())
            raise ValueError(
                f"{SIDES[side]} of pair {ids[worst]} has {tokens[worst, 0] + 1} tokens, the shape holds {length}"
            )
        column = np.arange(length)[None, :]
        inside = column < tokens
        out[: len(ids)][inside] = self._ids[side][(start + column)[inside]]
        out[: len(ids)][column == tokens] = END
        return out
