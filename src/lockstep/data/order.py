"""Order is arithmetic: (seed, step) -> the K micro-batches of this step -> sample ids.

Nothing here has a state to save: to resume is to know the step. The micro-batches of all epochs stand in one endless row; step s takes
numbers s*K to s*K + K - 1 of it, so a step may span the end of an epoch and every sample still comes exactly once an epoch.

An epoch is a permutation computed one element at a time, never stored: a Feistel network over the next power of four, walked on until it
falls inside (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It is ours rather than NumPy's because
NumPy may change its streams from version to version (NEP 19), and because seeking is then free: step 1,000,000 costs what step 0 does.

`UniformOrder` is for samples of one shape. `BucketOrder` is for text: pairs of like length share a micro-batch, every micro-batch of a
bucket has one shape (rows, length), and `choose_lengths` picks the lengths that pad least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
WORD = (1 << 64) - 1
ROUNDS = 6


def mix(*numbers: int) -> int:
    """64 well-stirred bits of the numbers: splitmix64 (Steele, Lea and Flood, 2014), absorbed one by one."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
        state ^= state >> 31
    return state


def permute(positions: Ids, size: int, key: int) -> Ids:
    """Where the permutation `key` of range(size) sends each of `positions`. A few microseconds and about 20 passes over `positions`."""
    half_bits = max(1, -(-max(size - 1, 1).bit_length() // 2))
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    keys = [np.uint64(mix(key, turn)) for turn in range(ROUNDS)]

    def once(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> shift, x & mask
        for turn in keys:
            stirred = (right ^ turn) * np.uint64(0xBF58476D1CE4E5B9)
            stirred = (stirred ^ (stirred >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((stirred >> np.uint64(32)) & mask)
        return (left << shift) | right

    placed = once(positions.astype(np.uint64))
    while (outside := placed >= size).any():
        placed[outside] = once(placed[outside])
    return placed.astype(np.int64)


@dataclass(frozen=True)
class UniformOrder:
    """Batches of `batch` samples cut into `micro_batches` equal parts; each epoch is a new permutation of range(samples).

    batch  samples of a step over all replicas, a multiple of micro_batches
    Batches run on over the end of an epoch: no sample is left out, none comes twice in an epoch.
    """

    samples: int
    batch: int
    micro_batches: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.batch % self.micro_batches:
            raise ValueError(
                f"batch={self.batch} must be a multiple of micro_batches={self.micro_batches}, samples={self.samples} at least 1"
            )

    def epoch(self, step: int) -> float:
        """Epochs passed when step `step` begins."""
        return step * self.batch / self.samples

    def ids(self, step: int, k: int) -> Ids:
        """Sample ids of micro-batch `k` of step `step`: shape (batch / micro_batches,)."""
        rows = self.batch // self.micro_batches
        at = (step * self.micro_batches + k) * rows + np.arange(rows, dtype=np.int64)
        epochs, positions = np.divmod(at, self.samples)
        ids = np.empty(rows, dtype=np.int64)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            ids[inside] = permute(positions[inside], self.samples, mix(self.seed, int(epoch)))
        return ids


@dataclass(frozen=True)
class Shape:
    """The one shape of a bucket's micro-batches: `rows` pairs of at most `length` tokens on each side."""

    rows: int
    length: int


def choose_lengths(histogram: npt.NDArray[np.int64], shapes: int) -> list[int]:
    """At most `shapes` ascending lengths that hold every pair with the least padding.

    histogram  pairs by length: histogram[n] pairs are n tokens long
    Exact, by dynamic programming over the lengths that occur: O(shapes * distinct lengths ** 2).
    """
    present = np.flatnonzero(histogram)
    count = np.concatenate([[0], np.cumsum(histogram[present])])
    best = np.where(np.arange(len(count)) == 0, 0.0, np.inf)  # cells needed by the first n distinct lengths
    cuts: list[npt.NDArray[np.int64]] = []
    for _ in range(min(shapes, len(present))):
        cells = best[:-1, None] + (count[None, 1:] - count[:-1, None]) * present[None, :].astype(np.float64)
        cells[np.tril_indices(len(present), -1)] = np.inf
        cuts.append(np.argmin(cells, axis=0))
        best = np.concatenate([[0.0], np.min(cells, axis=0)])
    chosen, end = [], len(present)
    for cut in reversed(cuts):
        if end == 0:
            break
        chosen.append(int(present[end - 1]))
        end = int(cut[end - 1])
    return chosen[::-1]


def choose_shapes(lengths: npt.NDArray[np.int32], *, tokens: int, shapes: int) -> tuple[list[Shape], str]:
    """The shapes of micro-batches, and why.

    lengths  (samples,) the longer side of each pair, end mark included
    tokens   positions a micro-batch may have on one side, padding included; no pair is longer
    """
    chosen = choose_lengths(np.bincount(lengths).astype(np.int64), shapes)
    found = [Shape(max(1, tokens // length), length) for length in chosen]
    placed = np.asarray(chosen)[np.searchsorted(chosen, lengths)]
    full = float(lengths.sum()) / float(placed.sum())
    listed = ", ".join(f"{s.rows} x {s.length}" for s in found)
    return found, f"{len(found)} shapes ({listed}) hold {len(lengths):,} pairs with {1 - full:.0%} padding on the longer side"


class BucketOrder:
    """Micro-batches of pairs of like length under a token budget; see the head of this file.

    lengths        (samples,) the longer side of each pair
    micro_batches  K of a step
    The last micro-batch of each bucket may have fewer ids than its shape has rows: the loader fills it up with empty rows.
    Setting up sorts the samples once by bucket: 0.4 s for 10 million.
    """

    def __init__(self, lengths: npt.NDArray[np.int32], shapes: list[Shape], *, micro_batches: int, seed: int) -> None:
        self.micro_batches, self.seed, self.shapes = micro_batches, seed, shapes
        bucket = np.searchsorted([s.length for s in shapes], lengths).astype(np.min_scalar_type(len(shapes)))
        self._members = np.argsort(bucket, kind="stable")
        self._sizes = [int(n) for n in np.bincount(bucket, minlength=len(shapes))]
        self._first_member = np.concatenate([[0], np.cumsum(self._sizes)])
        batches = [-(-size // shape.rows) for size, shape in zip(self._sizes, shapes, strict=True)]
        self._first_batch = np.concatenate([[0], np.cumsum(batches)])

    @property
    def micro_batches_an_epoch(self) -> int:
        return int(self._first_batch[-1])

    def epoch(self, step: int) -> float:
        """Epochs passed when step `step` begins."""
        return step * self.micro_batches / self.micro_batches_an_epoch

    def place(self, step: int, k: int) -> tuple[int, int, int]:
        """(epoch, bucket, number within the bucket) of micro-batch `k` of step `step`."""
        epoch, position = divmod(step * self.micro_batches + k, self.micro_batches_an_epoch)
        number = int(permute(np.array([position]), self.micro_batches_an_epoch, mix(self.seed, epoch, 0))[0])
        bucket = int(np.searchsorted(self._first_batch, number, side="right")) - 1
        return epoch, bucket, number - int(self._first_batch[bucket])

    def shape(self, step: int, k: int) -> Shape:
        """The shape of micro-batch `k` of step `step`."""
        return self.shapes[self.place(step, k)[1]]

    def ids(self, step: int, k: int) -> Ids:
        """Sample ids of micro-batch `k` of step `step`: at most `shape(step, k).rows` of them."""
        epoch, bucket, number = self.place(step, k)
        first = number * self.shapes[bucket].rows
        end = min(first + self.shapes[bucket].rows, self._sizes[bucket])
        within = permute(np.arange(first, end), self._sizes[bucket], mix(self.seed, epoch, 1 + bucket))
        return self._members[int(self._first_member[bucket]) + within]
