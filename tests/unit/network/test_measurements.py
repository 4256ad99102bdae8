"""Links fitted to times of messages, and slow hosts and pairs among them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.network.measurements import (
    PairTimes,
    Row,
    bus_factor,
    class_links,
    describe,
    fit_link,
    format_rate,
    pairing_rounds,
    slow_links,
)
from lockstep.network.moves import Link

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
FAST, SLOW = Link(1e-4, 12e6), Link(2e-4, 1.2e6)


def times(link: Link, noise: float = 0.0) -> dict[int, float]:
    return {size: link.seconds(size) * (1 + noise * (-1) ** k) for k, size in enumerate(SIZES)}


@given(latency_s=st.floats(1e-6, 0.1), bytes_per_s=st.floats(1e5, 1e11))
def test_the_fit_of_exact_times_is_the_link(latency_s: float, bytes_per_s: float) -> None:
    fitted = fit_link(times(Link(latency_s, bytes_per_s)))
    assert fitted.latency_s == pytest.approx(latency_s, rel=1e-2)
    if SIZES[-1] / bytes_per_s > 1e-6 * latency_s:  # else rounding hides the rate
        assert fitted.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-2)


def test_noise_of_small_messages_does_not_change_the_rate() -> None:
    noisy = {**times(FAST), SIZES[0]: 20 * FAST.latency_s}
    assert fit_link(noisy).bytes_per_s == pytest.approx(FAST.bytes_per_s, rel=0.01)
    assert fit_link(times(FAST, 0.05)).bytes_per_s == pytest.approx(FAST.bytes_per_s, rel=0.1)


def test_times_that_allow_no_line_still_give_a_link() -> None:
    assert fit_link({1024: 0.5}) == Link(0.5, 2048)  # one size: nothing separates latency from rate
    assert fit_link({1024: 0.5, 4096: 0.25}).bytes_per_s == 4096 / 0.25
    bucket = {
        1024: 6e-5,
        1 << 20: 0.08,
        1 << 22: 0.35,
    }  # a token bucket: small messages pass at once
    assert fit_link(bucket).latency_s == 6e-5


def pairs_of(hosts: str, slow: str = "", cut: tuple[str, str] = ("", "")) -> list[PairTimes]:
    links = {
        (a, b): SLOW if {a, b} & set(slow) or {a, b} == set(cut) else FAST
        for a in hosts
        for b in hosts
        if a < b
    }
    return [PairTimes((0, 1), pair, times(link)) for pair, link in links.items()]


def test_one_slow_host_of_three_is_named_and_left_out_of_the_class() -> None:
    pairs = pairs_of("abc", slow="c")
    (slow,) = slow_links(pairs)
    assert (
        slow.hosts == ("c",)
        and str(slow) == "slow: host c, at best: 9.6 Mbit/s; the median is 96.0 Mbit/s"
    )
    assert class_links(pairs, [slow])["other_host"].bytes_per_s == pytest.approx(FAST.bytes_per_s)
    assert class_links(pairs)["other_host"].bytes_per_s == pytest.approx(SLOW.bytes_per_s)


def test_one_slow_pair_is_named_with_both_hosts() -> None:
    (slow,) = slow_links(pairs_of("abcd", cut=("b", "d")))
    assert slow.hosts == ("b", "d") and str(slow).startswith(
        "slow: the link between b and d: 9.6 Mbit/s; the median is 96.0"
    )
    assert slow_links(pairs_of("abcd")) == []
    inside = [
        PairTimes((0, 1), (host, host), times(SLOW if host == "b" else FAST)) for host in "abc"
    ]
    assert [str(link).partition(":")[2] for link in slow_links(inside)] == [
        " the links inside host b: 9.6 Mbit/s; the median is 96.0 Mbit/s"
    ]


def test_same_host_and_other_host_are_fitted_apart() -> None:
    links = class_links(
        [PairTimes((0, 1), ("a", "a"), times(FAST)), PairTimes((0, 2), ("a", "b"), times(SLOW))]
    )
    assert links["same_host"].bytes_per_s == pytest.approx(FAST.bytes_per_s)
    assert links["other_host"].bytes_per_s == pytest.approx(SLOW.bytes_per_s)


@pytest.mark.parametrize("size", range(2, 18))
def test_the_rounds_hold_each_pair_once_and_each_host_once_per_round(size: int) -> None:
    rounds = pairing_rounds(size)
    assert sorted(pair for turn in rounds for pair in turn) == [
        (a, b) for a in range(size) for b in range(a + 1, size)
    ]
    assert all(len({host for pair in turn for host in pair}) == 2 * len(turn) for turn in rounds)
    assert len(rounds) == size - 1 + size % 2


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert [
        bus_factor(name, 4)
        for name in (
            "all_reduce",
            "engine",
            "all_gather",
            "reduce_scatter",
            "broadcast",
            "send_recv",
        )
    ] == [*(1.5, 1.5, 0.75, 0.75, 1.0, 1.0)]
    row = Row("all_reduce", 4, 1 << 20, 0.01)
    assert (row.algbw, row.busbw) == (104857600.0, 157286400.0)
    assert describe([row], {}, []).splitlines()[2].split() == [
        "1.0",
        "MiB",
        "10,000.0",
        "0.1049",
        "0.1573",
    ]


@pytest.mark.parametrize(
    ("rate", "text"), [(12.5e9, "100.0 Gbit/s"), (12e6, "96.0 Mbit/s"), (1e4, "80.0 kbit/s")]
)
def test_a_rate_is_printed_in_bits(rate: float, text: str) -> None:
    assert format_rate(rate) == text
