"""Data order as a pure function: (seed, step) -> the K micro-batches of the step -> sample ids.

There is no state to save. The micro-batches of all epochs form one endless sequence, and step s
takes numbers s*K to s*K + K - 1. A step can span the end of an epoch, and every sample still occurs
exactly once per epoch.

An epoch is a permutation that is computed element by element and never stored: a Feistel network
over the next power of four, iterated until the result is in range (cycle walking; Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). NumPy may change its permutations between
versions (NEP 19), and this one can seek: step 1,000,000 costs as much as step 0.

`UniformOrder` is for samples of one shape. `BucketOrder` is for text: pairs of similar length share
a micro-batch, and all micro-batches of a bucket have one shape (rows, length). `MixtureOrder` takes
samples of several sources in given proportions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
MASK64 = (1 << 64) - 1
ROUNDS = 6


def splitmix64(*numbers: int) -> int:
    """Hash integers to 64 bits, one after the other (Steele, Lea and Flood, 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
        state ^= state >> 31
    return state


def permute(positions: Ids, size: int, key: int) -> Ids:
    """Apply permutation number `key` of range(size) to `positions`.
    Cost: a few microseconds and about 20 passes over `positions`."""
    # Two halves of equal size: the domain is the next power of four.
    half_bits = max(1, -(-max(size - 1, 1).bit_length() // 2))
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    round_keys = [np.uint64(splitmix64(key, number)) for number in range(ROUNDS)]

    def feistel(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> shift, x & mask
        for round_key in round_keys:
            mixed = (right ^ round_key) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << shift) | right

    permuted = feistel(positions.astype(np.uint64))
    # Cycle walking: a number outside is permuted again until it is inside. It stays a permutation.
    while (outside := permuted >= size).any():
        permuted[outside] = feistel(permuted[outside])
    return permuted.astype(np.int64)


def shuffle_epochs(numbers: Ids, size: int, *keys: int) -> Ids:
    """Return the samples with these numbers in an endless row of epochs, each a permutation."""
    epochs, positions = np.divmod(numbers, size)
    ids = np.empty_like(positions)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        ids[inside] = permute(positions[inside], size, splitmix64(*keys, int(epoch)))
    return ids


@dataclass(frozen=True)
class UniformOrder:
    """Batches split into `micro_batches` equal parts; each epoch is a permutation.

    batch_size  samples per step, over all replicas; a multiple of micro_batches
    """

    samples: int
    batch_size: int
    micro_batches: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.batch_size % self.micro_batches:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of "
                f"micro_batches={self.micro_batches}, samples={self.samples} at least 1"
            )

    def epoch(self, step: int) -> float:
        """Epochs completed when step `step` starts."""
        return step * self.batch_size / self.samples

    def ids(self, step: int, k: int) -> Ids:
        """Return the sample ids of micro-batch `k`: (batch_size / micro_batches,)."""
        rows = self.batch_size // self.micro_batches
        first = (step * self.micro_batches + k) * rows
        return shuffle_epochs(first + np.arange(rows, dtype=np.int64), self.samples, self.seed)


@dataclass(frozen=True)
class BucketShape:
    """Shape of the micro-batches of a bucket: `rows` pairs of at most `length` tokens on a side."""

    rows: int
    length: int


def choose_bucket_lengths(histogram: npt.NDArray[np.int64], shapes: int) -> list[int]:
    """Return at most `shapes` ascending lengths that fit every pair with the least padding. Exact,
    by dynamic programming: O(shapes * distinct lengths ** 2). histogram[n]: pairs of n tokens."""
    present = np.flatnonzero(histogram)
    count = np.concatenate([[0], np.cumsum(histogram[present])])
    # Positions needed by the first n distinct lengths.
    best = np.where(np.arange(len(count)) == 0, 0.0, np.inf)
    cuts: list[npt.NDArray[np.int64]] = []
    for _ in range(min(shapes, len(present))):
        between = count[None, 1:] - count[:-1, None]
        cells = best[:-1, None] + between * present[None, :].astype(np.float64)
        cells[np.tril_indices(len(present), -1)] = np.inf
        cuts.append(np.argmin(cells, axis=0))
        best = np.concatenate([[0.0], np.min(cells, axis=0)])
    chosen, end = [], len(present)
    for cut in reversed(cuts):
        if end:
            chosen.append(int(present[end - 1]))
            end = int(cut[end - 1])
    return chosen[::-1]


def choose_bucket_shapes(
    lengths: npt.NDArray[np.int32], *, tokens: int, shapes: int
) -> tuple[list[BucketShape], str]:
    """Return at most `shapes` shapes of the micro-batches, and a line for the log.

    lengths  (samples,): tokens of the longer side of each pair, END included
    tokens   maximum positions of a micro-batch on one side, padding included; no pair is longer
    """
    chosen = choose_bucket_lengths(np.bincount(lengths).astype(np.int64), shapes)
    bucket_shapes = [BucketShape(max(1, tokens // length), length) for length in chosen]
    padded = np.asarray(chosen)[np.searchsorted(chosen, lengths)]
    full = float(lengths.sum()) / float(padded.sum())
    listed = ", ".join(f"{s.rows} x {s.length}" for s in bucket_shapes)
    pairs = f"{len(lengths):,} pairs with {1 - full:.0%} padding on the longer side"
    return bucket_shapes, f"{len(bucket_shapes)} shapes ({listed}) hold {pairs}"


class BucketOrder:
    """Micro-batches of pairs of similar length under a token budget.

    lengths        (samples,): tokens of the longer side of each pair
    micro_batches  K, micro-batches per step

    The last micro-batch of a bucket can have fewer ids than its shape has rows: the loader adds
    empty rows. Construction sorts the samples by bucket: 0.4 s for 10 million.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.int32],
        shapes: list[BucketShape],
        *,
        micro_batches: int,
        seed: int,
    ) -> None:
        self.micro_batches = micro_batches
        self.seed = seed
        self.shapes = shapes
        bucket = np.searchsorted([s.length for s in shapes], lengths)
        bucket = bucket.astype(np.min_scalar_type(len(shapes)))
        self._members = np.argsort(bucket, kind="stable")
        self._sizes = [int(n) for n in np.bincount(bucket, minlength=len(shapes))]
        self._first_member = np.concatenate([[0], np.cumsum(self._sizes)])
        batches = [-(-size // shape.rows) for size, shape in zip(self._sizes, shapes, strict=True)]
        self._first_batch = np.concatenate([[0], np.cumsum(batches)])

    @property
    def micro_batches_per_epoch(self) -> int:
        return int(self._first_batch[-1])

    def epoch(self, step: int) -> float:
        """Epochs completed when step `step` starts."""
        return step * self.micro_batches / self.micro_batches_per_epoch

    def locate(self, step: int, k: int) -> tuple[int, int, int]:
        """Return (epoch, bucket, number within the bucket) of micro-batch `k` of step `step`."""
        epoch, position = divmod(step * self.micro_batches + k, self.micro_batches_per_epoch)
        key = splitmix64(self.seed, epoch, 0)
        (permuted,) = permute(np.array([position]), self.micro_batches_per_epoch, key)
        number = int(permuted)
        bucket = int(np.searchsorted(self._first_batch, number, side="right")) - 1
        return epoch, bucket, number - int(self._first_batch[bucket])

    def shape(self, step: int, k: int) -> BucketShape:
        return self.shapes[self.locate(step, k)[1]]

    def ids(self, step: int, k: int) -> Ids:
        """Return the sample ids of micro-batch `k`: at most `shape(step, k).rows` of them."""
        epoch, bucket, number = self.locate(step, k)
        rows = self.shapes[bucket].rows
        size = self._sizes[bucket]
        positions = number * rows + np.arange(rows)
        key = splitmix64(self.seed, epoch, 1 + bucket)
        within = permute(positions[positions < size], size, key)
        return self._members[int(self._first_member[bucket]) + within]


@dataclass(frozen=True)
class MixtureOrder:
    """Samples of several sources in exact proportions; each source is a row of shuffled epochs.

    sizes       samples of each source; ids count through the sources, one after the other
    stages      (first step, weight of each source), ascending from step 0; weights are integers
    batch_size  samples per step, over all replicas; a multiple of micro_batches

    From the start of a stage, each window of sum(weights) samples has `weight` samples of each
    source, in a new random order. The next stage continues the epochs of the last one.
    """

    sizes: tuple[int, ...]
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    batch_size: int
    micro_batches: int
    seed: int = 0

    def ids(self, step: int, k: int) -> Ids:
        """Return the sample ids of micro-batch `k`: (batch_size / micro_batches,)."""
        stage = max(i for i, (start, _) in enumerate(self.stages) if start <= step)
        rows = self.batch_size // self.micro_batches
        first = (step - self.stages[stage][0]) * self.batch_size + k * rows
        sources, numbers = self._deal(stage, first, rows)
        numbers += self._taken[stage][sources]
        for source, size in enumerate(self.sizes):
            own = sources == source
            shuffled = shuffle_epochs(numbers[own], size, self.seed, 1 + source)
            numbers[own] = sum(self.sizes[:source]) + shuffled
        return numbers

    def _deal(self, stage: int, first: int, count: int) -> tuple[Ids, Ids]:
        """Return the source of each position of a stage, and its number among that source's."""
        weights = np.array(self.stages[stage][1])
        window = int(weights.sum())
        windows = np.arange(first // window, (first + count - 1) // window + 1)
        # Different numbers have different hashes, so sorting hashes is a permutation without ties.
        hashes = (windows[:, None] * window + np.arange(window)).astype(np.uint64)
        hashes += np.uint64(splitmix64(self.seed, 0, stage))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
        sources = np.searchsorted(weights.cumsum(), np.argsort(hashes, axis=1), side="right")
        numbers = np.empty_like(sources)
        for source, weight in enumerate(weights):
            own = sources == source
            # Every window before this one took `weight` samples of the source.
            numbers[own] = ((windows * weight)[:, None] + own.cumsum(axis=1) - 1)[own]
        before = first % window
        return sources.ravel()[before : before + count], numbers.ravel()[before : before + count]

    @cached_property
    def _taken(self) -> list[Ids]:
        """Samples that earlier stages have taken of each source, by stage."""
        taken = [np.zeros(len(self.sizes), dtype=np.int64)]
        for stage, ((start, weights), (end, _)) in enumerate(pairwise(self.stages)):
            windows, rest = divmod((end - start) * self.batch_size, sum(weights))
            sources, _ = self._deal(stage, windows * sum(weights), rest)
            rest_taken = np.bincount(sources, minlength=len(self.sizes))
            taken.append(taken[-1] + windows * np.array(weights) + rest_taken)
        return taken
