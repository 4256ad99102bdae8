"""Buckets follow the order of the gradients and have one dtype."""

from __future__ import annotations

from lockstep.network.bucket_sizes import LAST_BYTES, group_by_size


def test_buckets_follow_the_order_and_the_last_one_is_small() -> None:
    sizes = [("fp32", LAST_BYTES)] * 6
    assert group_by_size(sizes, 2 * LAST_BYTES, [5, 4, 3, 2, 1, 0]) == [[5], [4, 3], [2, 1], [0]]


def test_bucket_has_one_dtype_and_no_empty_parameter() -> None:
    mixed = [("fp32", 16), ("fp32", 0), ("fp32", 16), ("bf16", 8), ("bf16", 8)]
    assert group_by_size(mixed, 10**6, [0, 1, 3, 2, 4]) == [[0, 2], [3, 4]]
    assert group_by_size(mixed, 1, [0, 3, 2, 4]) == [[0], [3], [2], [4]]
