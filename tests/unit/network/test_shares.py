"""The choice of shares: proportional to speed, steady under noise, aware of the exchange."""

from __future__ import annotations

from random import Random

import pytest

from lockstep.network.shares import (
    ShareRule,
    choose_shares,
    find_slow,
    format_shares,
    proportional_shares,
)
from lockstep.network.subtrees import equal_shares


@pytest.mark.parametrize(
    ("current", "micro_batch_us", "expected"),
    [
        ((4, 4), (100, 300), (6, 2)),
        ((4, 4), (100, 100), (4, 4)),
        ((4, 4), (100, 130), (4, 4)),  # 5+3 would gain 4%
        ((4, 4), (150, 100), (3, 5)),
        ((6, 2), (100, 100), (4, 4)),  # the slow worker has recovered
        ((6, 2), (100, 250), (6, 2)),  # 5+3 would take longer
        ((4, 4), (1, 1000), (7, 1)),  # each keeps one
        ((3, 3, 2), (100, 100, 300), (4, 3, 1)),
        ((32, 32), (100, 200), (44, 20)),  # 5 subtrees; 43+21 needs 7
        ((1, 1, 1), (100, 300, 100), (1, 1, 1)),
    ],
)
def test_shares_follow_speed(
    current: tuple[int, ...], micro_batch_us: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    shares, reason = choose_shares(current, micro_batch_us, 0)
    assert shares == expected
    assert reason.startswith("a micro-batch takes " if expected != current else "no other shares")


def votes(rule: ShareRule, current: tuple[int, ...], *votes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shares after these votes, with the measurements of each."""
    for micro_batch_us in votes:
        current, _ = rule.decide(current, micro_batch_us, 0)
    return current


SLOW = (100_000, 310_000)


def test_shares_change_after_three_votes_in_a_row_for_the_same_replica() -> None:
    assert votes(ShareRule(), (4, 4), SLOW, SLOW) == (4, 4)
    assert votes(ShareRule(), (4, 4), SLOW, SLOW, SLOW) == (6, 2)
    even = (100_000, 100_000)
    assert votes(ShareRule(), (4, 4), SLOW, SLOW, even, SLOW, SLOW) == (4, 4)
    assert votes(ShareRule(), (4, 4), *[SLOW, SLOW[::-1]] * 5) == (4, 4)


def test_shares_of_steps_under_50_ms_stay() -> None:
    assert votes(ShareRule(), (4, 4), *[(1_000, 3_100)] * 10) == (4, 4)
    assert votes(ShareRule(), (1, 1), *[(1_000, 49_000)] * 10) == (1, 1)


def test_a_change_that_shortens_no_step_is_taken_back_and_needs_more_votes_then() -> None:
    rule = ShareRule()
    assert votes(rule, (4, 4), SLOW, SLOW, SLOW) == (6, 2)
    assert votes(rule, (6, 2), (300_000, 100_000)) == (4, 4)  # now the other one is slow
    assert votes(rule, (4, 4), *[SLOW] * 5) == (4, 4)
    assert votes(rule, (4, 4), SLOW) == (6, 2)
    assert votes(rule, (6, 2), SLOW, SLOW) == (6, 2)  # it lasts


def test_equal_workers_keep_equal_shares_under_noise() -> None:
    draw = Random(1)
    for size, leaves in ((2, 8), (4, 8), (8, 64), (3, 8)):
        current = equal_shares(size, leaves)
        for _ in range(200):
            assert (
                choose_shares(current, [draw.randint(965, 1035) for _ in range(size)], 500)[0]
                == current
            )


def test_shares_stay_equal_when_the_exchange_would_cost_more_than_they_save() -> None:
    assert choose_shares((4, 4), (100, 300), 400)[0] == (6, 2)  # saves 600 of computation
    assert choose_shares((4, 4), (100, 300), 900)[0] == (4, 4)
    assert choose_shares((6, 2), (100, 150), 300)[0] == (4, 4)  # half of the bytes again


def test_replicas_of_shards_get_whole_passes() -> None:
    assert choose_shares((8, 8), (100, 300), 0, unit=2)[0] == (12, 4)
    assert choose_shares((4, 4), (100, 300), 0, unit=4)[0] == (4, 4)  # one pass each
    assert choose_shares((4, 3), (100, 300), 0, unit=2)[0] == (
        4,
        3,
    )  # 7 micro-batches are no whole passes


def test_random_speeds_are_within_a_fifth_of_the_ideal_split_when_leaves_are_many() -> None:
    draw = Random(2)
    for _ in range(100):
        size = draw.randint(2, 8)
        us = [draw.randint(1000, 4000) for _ in range(size)]
        current = equal_shares(size, 128)
        shares, _ = choose_shares(current, us, 0)
        assert sum(shares) == 128 and min(shares) >= 1
        ideal = 128 / sum(1 / each for each in us)
        assert max(map(int.__mul__, shares, us)) <= 1.2 * ideal
        assert max(share.bit_count() for share in proportional_shares(128, us, 1)[-1]) <= 3


def test_slow_replicas_are_found_and_forgotten_with_a_margin() -> None:
    assert find_slow((100, 310), ()) == (1,)
    assert (
        find_slow((100, 140), ()) == ()
        and find_slow((100, 140), (1,)) == (1,)
        and find_slow((100, 109), (1,)) == ()
    )
    assert find_slow((100, 100, 100, 900), ()) == (3,)


def test_many_shares_are_shown_as_a_range() -> None:
    assert format_shares((6, 2)) == "6+2" and format_shares((3,) * 8 + (1,)) == "1 to 3"
