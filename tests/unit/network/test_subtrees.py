"""Which rank computes which leaves of the sum: equal shares, and all uneven ones of small sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from lockstep.errors import UsageError
from lockstep.network.subtrees import (
    Subtree,
    assign_subtrees,
    equal_shares,
    fit_shares,
    is_one_addition,
    leaves_of_rank,
    refuse_idle_ranks,
)
from lockstep.parallel.ordered_sum import merged_subtrees


def all_shares(leaves: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of `size` positive integers whose sum is `leaves`."""
    if size == 1:
        yield (leaves,)
        return
    for first in range(1, leaves - size + 2):
        yield from ((first, *rest) for rest in all_shares(leaves - first, size - 1))


def test_each_rank_has_a_main_subtree_and_the_rest_is_cut_up() -> None:
    assert assign_subtrees(equal_shares(4, 8)) == tuple(
        (Subtree(first, 2),) for first in (0, 2, 4, 6)
    )
    assert [leaves_of_rank(rank, equal_shares(3, 8)) for rank in range(3)] == [
        [0, 1, 6],
        [2, 3, 7],
        [4, 5],
    ]
    assert sum(map(len, assign_subtrees(equal_shares(7, 64)))) == 11
    assert equal_shares(7, 22) == (4, 4, 4, 4, 2, 2, 2)
    assert [leaves_of_rank(rank, (6, 2)) for rank in range(2)] == [[0, 1, 2, 3, 4, 5], [6, 7]]


def test_every_leaf_has_one_rank_and_no_rank_has_more_than_its_equal_share() -> None:
    for leaves in range(1, 70):
        for size in range(1, leaves + 1):
            shares = equal_shares(size, leaves)
            own = [leaves_of_rank(rank, shares) for rank in range(size)]
            assert sorted(k for ks in own for k in ks) == list(range(leaves))
            assert min(shares) >= 1 and max(shares) == -(-leaves // size)
            assert own[0][0] == 0


@pytest.mark.parametrize("leaves", range(1, 17))
def test_all_shares_of_up_to_8_ranks_are_partitions_into_few_whole_subtrees(leaves: int) -> None:
    for size in range(1, min(8, leaves) + 1):
        for shares in all_shares(leaves, size):
            assigned = assign_subtrees(shares)
            ends = sorted(
                (subtree.first, subtree.first + subtree.leaves)
                for own in assigned
                for subtree in own
            )
            assert (
                ends[0][0] == 0
                and ends[-1][1] == leaves
                and all(left[1] == right[0] for left, right in pairwise(ends))
            )
            assert all(subtree.first % subtree.leaves == 0 for own in assigned for subtree in own)
            assert [sum(subtree.leaves for subtree in own) for own in assigned] == list(shares)
            assert [len(own) for own in assigned] == [share.bit_count() for share in shares]


def test_a_sum_of_micro_batches_in_order_leaves_the_assigned_subtrees() -> None:
    for shares in ((6, 2), (5, 3), (1, 7), (7, 3, 1), (2, 5, 1, 8)):
        own = [leaves_of_rank(rank, shares) for rank in range(len(shares))]
        assert all(ks == sorted(ks) for ks in own)
        assert [merged_subtrees(ks) for ks in own] == [
            list(subtrees) for subtrees in assign_subtrees(shares)
        ]


def test_shares_fit_all_limits_with_enough_room() -> None:
    for shares in (
        shares
        for leaves in range(1, 13)
        for size in range(1, 5)
        for shares in all_shares(leaves, min(size, leaves))
    ):
        for leaves in range(len(shares), sum(shares) + 1):
            fitted = fit_shares(shares, leaves)
            assert (
                sum(fitted) == leaves
                and min(fitted) >= 1
                and all(share <= limit for share, limit in zip(fitted, shares, strict=True))
            )


def test_one_addition_is_two_ranks_with_one_subtree_each() -> None:
    assert is_one_addition((4, 4)) and is_one_addition((4, 2))
    assert (
        not is_one_addition((6, 2)) and not is_one_addition((4,)) and not is_one_addition((2, 2, 2))
    )


def test_more_ranks_than_leaves_are_refused() -> None:
    refuse_idle_ranks(4, 4)
    with pytest.raises(UsageError) as caught:
        refuse_idle_ranks(5, 4)
    assert caught.value.hint == "start 4 processes or fewer, or set micro_batches=5"
