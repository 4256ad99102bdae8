"""Data order: a function of (seed, step), each sample once per epoch, constant-time seek."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.order import (
    BucketOrder,
    BucketShape,
    MixtureOrder,
    UniformOrder,
    choose_bucket_lengths,
    choose_bucket_shapes,
    permute,
)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key)) == list(range(size))


def test_permutations_of_three_are_uniform() -> None:
    counts = Counter(tuple(permute(np.arange(3), 3, key)) for key in range(3000))
    assert len(counts) == 6 and min(counts.values()) > 400 and max(counts.values()) < 600


def test_images_of_each_position_are_uniform() -> None:
    landed = np.bincount(
        [int(permute(np.array([7]), 10, key)[0]) for key in range(5000)], minlength=10
    )
    chi_square = float(((landed - 500) ** 2 / 500).sum())
    assert (
        chi_square < 30
    )  # 9 degrees of freedom: exceeded once in 2,000 fair draws, and the draw is fixed


def test_the_order_never_changes() -> None:
    """A change would silently reorder every resumed run."""
    assert permute(np.arange(8), 8, 1).tolist() == FIRST_EIGHT
    assert UniformOrder(1000, 8, 4, seed=3).ids(5, 2).tolist() == UNIFORM


FIRST_EIGHT = [3, 4, 7, 0, 5, 2, 1, 6]
UNIFORM = [55, 719]


@given(st.integers(1, 50), st.integers(1, 4), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_uniform_order_has_every_sample_once_per_epoch(
    samples: int, k: int, rows: int, seed: int
) -> None:
    order = UniformOrder(samples, k * rows, k, seed)
    row = np.concatenate(
        [order.ids(step, i) for step in range(-(-2 * samples // (k * rows))) for i in range(k)]
    )
    assert sorted(row[:samples]) == sorted(row[samples : 2 * samples]) == list(range(samples))


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=200),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_bucket_order_has_every_sample_once_per_epoch_within_the_budget(
    lengths: list[int], shapes: int, k: int, seed: int
) -> None:
    array = np.array(lengths, dtype=np.int32)
    bucket_shapes, _ = choose_bucket_shapes(array, tokens=64, shapes=shapes)
    order = BucketOrder(array, bucket_shapes, micro_batches=k, seed=seed)
    epoch = order.micro_batches_per_epoch
    for first in (0, epoch):
        ids = [order.ids(*divmod(g, k)) for g in range(first, first + epoch)]
        assert sorted(np.concatenate(ids)) == list(range(len(lengths)))
        for g, some in zip(range(first, first + epoch), ids, strict=True):
            shape = order.shape(*divmod(g, k))
            assert (
                len(some) <= shape.rows
                and array[some].max() <= shape.length
                and shape.rows * shape.length <= 64
            )


def test_more_than_256_shapes_keep_every_sample_in_a_bucket_it_fits() -> None:
    lengths = np.repeat(np.arange(1, 301, dtype=np.int32), 2)
    shapes, _ = choose_bucket_shapes(lengths, tokens=600, shapes=300)
    order = BucketOrder(lengths, shapes, micro_batches=4, seed=1)
    assert len(shapes) == 300
    for g in range(order.micro_batches_per_epoch):
        step, k = divmod(g, 4)
        assert lengths[order.ids(step, k)].max() <= order.shape(step, k).length


def test_epochs_differ_and_seeds_differ() -> None:
    lengths = np.full(100, 8, dtype=np.int32)
    orders = [
        BucketOrder(lengths, [BucketShape(10, 8)], micro_batches=10, seed=seed) for seed in (1, 2)
    ]
    rows = [
        np.concatenate([o.ids(s, k) for k in range(10)]).tolist() for o in orders for s in (0, 1)
    ]
    assert len({tuple(row) for row in rows}) == 4


def test_choose_lengths_is_optimal() -> None:
    histogram = np.array([0, 5, 1, 7, 0, 2, 9, 1, 3])
    present = [n for n in range(9) if histogram[n]]

    def padded_positions(chosen: tuple[int, ...]) -> int:
        return sum(int(histogram[n]) * min(c for c in chosen if c >= n) for n in present)

    from itertools import combinations

    for shapes in range(1, 5):
        minimum = min(
            padded_positions((*some, 8))
            for size in range(shapes)
            for some in combinations(present[:-1], size)
        )
        assert padded_positions(tuple(choose_bucket_lengths(histogram, shapes))) == minimum


def test_seek_to_step_1_000_000_of_10_million_samples_in_5_seconds() -> None:
    lengths = (np.arange(10_000_000) * 7919 % 120 + 4).astype(np.int32)
    start_s = time.process_time()
    shapes, _ = choose_bucket_shapes(lengths, tokens=4096, shapes=6)
    order = BucketOrder(lengths, shapes, micro_batches=8, seed=1)
    ids = order.ids(1_000_000, 3)
    assert (
        len(ids) and time.process_time() - start_s < 5
    )  # as in docs/data-order.md; CPU time, as the machine may be busy


@pytest.mark.parametrize("batch", [7, 9])
def test_a_batch_that_cannot_be_split_evenly_is_refused(batch: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size={batch}"):
        UniformOrder(100, batch, 4)


MIXED = ((0, (7, 2, 1)), (6, (1, 1, 0)), (9, (0, 1, 3)))
SIZES = (50, 8, 30)


def source_of(ids: np.ndarray) -> list[int]:
    return np.searchsorted(np.cumsum(SIZES), ids, side="right").tolist()


def test_the_order_of_a_mixture_never_changes() -> None:
    assert MixtureOrder(SIZES, MIXED, 12, 4, seed=3).ids(2, 1).tolist() == MIXTURE


MIXTURE = [14, 2, 79]


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_each_window_of_a_mixture_has_its_proportions_and_each_source_its_epochs(
    micro_batches: int,
) -> None:
    order = MixtureOrder(SIZES, MIXED, 12, micro_batches, seed=5)
    row = np.concatenate([order.ids(step, k) for step in range(40) for k in range(micro_batches)])
    assert (
        row.tolist()
        == np.concatenate(
            [MixtureOrder(SIZES, MIXED, 12, 1, seed=5).ids(step, 0) for step in range(40)]
        ).tolist()
    )
    sources = source_of(row)
    for (start, weights), end in zip(MIXED, (6, 9, 40), strict=True):
        of_stage, window = sources[12 * start : 12 * end], sum(weights)
        for first in range(0, len(of_stage) - window + 1, window):
            counts = Counter(of_stage[first : first + window])
            assert [counts[source] for source in range(3)] == list(weights)
    for source, (first, size) in enumerate(zip((0, 50, 58), SIZES, strict=True)):
        numbers = [
            number - first for number, of in zip(row.tolist(), sources, strict=True) if of == source
        ]
        assert len(numbers) >= size
        for epoch in range(0, len(numbers) - size + 1, size):
            assert sorted(numbers[epoch : epoch + size]) == list(range(size)), (
                "each sample once per epoch, over the stages too"
            )
    assert len({tuple(sources[first : first + 10]) for first in range(0, 70, 10)}) > 3, (
        "windows differ"
    )
