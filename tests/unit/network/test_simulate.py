"""The simulated times: the teaching example, formulas of the literature, 10,000 ranks."""

from __future__ import annotations

import time

import pytest

from lockstep.network.collectives import algorithms_for, schedule_of
from lockstep.network.moves import Link, Move, round_of, rounds
from lockstep.network.simulate import Network, Simulation
from lockstep.network.tree_exchange import WHOLE


def flat(latency_s: float = 0.0, bytes_per_s: float = 1e6) -> Network:
    return Network(Link(latency_s, bytes_per_s), Link(latency_s, bytes_per_s))


def seconds(collective: str, algorithm: str, ranks: int, size: float, network: Network) -> float:
    schedule = schedule_of(collective, algorithm, ranks, network.ranks_per_host)
    return Simulation(schedule, ranks, size, network).seconds


def test_five_megabytes_to_seven_friends() -> None:
    assert seconds("broadcast", "naive", 8, 5e6, flat()) == pytest.approx(35)
    assert seconds("broadcast", "direct", 8, 5e6, flat()) == pytest.approx(35)
    assert seconds("broadcast", "tree", 8, 5e6, flat()) == pytest.approx(15)
    reduce = Simulation(schedule_of("reduce", "tree", 8), 8, 5e6, flat())
    assert len(reduce.round_ends_s) == 3
    assert reduce.round_ends_s == pytest.approx([5, 10, 15])


def test_times_of_the_literature() -> None:
    """Latency a, seconds of the whole buffer b: the ring takes 2(N-1)(a + b/N), halving 2(log2(N) a + (N-1)/N b)."""
    for ranks in (2, 4, 8, 64):
        a, b = 0.5, 5.0
        assert seconds("all-reduce", "ring", ranks, 5e6, flat(a)) == pytest.approx(
            2 * (ranks - 1) * (a + b / ranks)
        )
        halving = 2 * ((ranks.bit_length() - 1) * a + (ranks - 1) / ranks * b)
        assert seconds("all-reduce", "halving", ranks, 5e6, flat(a)) == pytest.approx(halving)
        assert seconds("broadcast", "ring", ranks, 5e6, flat(a)) == pytest.approx(
            (ranks + 30) * (a + b / 32)
        )


def test_equal_rounds_are_played_once_with_the_same_result() -> None:
    for per_host, algorithm in ((1, "ring"), (3, "ring"), (4, "hierarchical")):
        network = Network(Link(1e-3, 1e6), Link(1e-4, 5e6), per_host)
        schedule = schedule_of("all-reduce", algorithm, 24, per_host)
        short = Simulation(schedule, 24, 1e6, network)
        one_by_one = Simulation([round_of(moves) for moves in rounds(schedule)], 24, 1e6, network)
        assert short.round_ends_s == pytest.approx(one_by_one.round_ends_s)
        assert (short.messages, short.bytes) == (
            one_by_one.messages,
            pytest.approx(one_by_one.bytes),
        )


def test_a_rank_waits_for_its_own_data_only() -> None:
    whole = (0, WHOLE, False)
    schedule = [round_of([Move(0, 1, *whole)]), round_of([Move(2, 3, *whole), Move(1, 2, *whole)])]
    assert Simulation(schedule, 4, 1e6, flat()).round_ends_s == [1, 2]


def test_ranks_of_a_host_share_its_port() -> None:
    moves = [Move(rank, rank + 2, 0, WHOLE, False) for rank in (0, 1)]
    fast = Link(0, 1e9)
    assert Simulation(
        [round_of(moves)], 4, 1e6, Network(Link(0, 1e6), fast, 2)
    ).seconds == pytest.approx(2)
    assert Simulation(
        [round_of(moves)], 4, 1e6, Network(Link(0, 1e6), fast, 1)
    ).seconds == pytest.approx(1)


def test_hierarchical_sends_less_between_hosts_that_are_no_power_of_two() -> None:
    network = Network(Link(0, 1e6), Link(0, 1e8), 6)
    times = {
        algorithm: seconds("all-reduce", algorithm, 48, 1e6, network)
        for algorithm in algorithms_for(48, 6)
    }
    assert times["hierarchical"] == pytest.approx(2 * 7 / 8 + 2 * 5 / 6 / 100, rel=0.01)
    assert times["hierarchical"] < 0.8 * times["halving"]


def test_halving_is_hierarchical_by_itself_on_hosts_of_a_power_of_two() -> None:
    network = Network(Link(0, 1e6), Link(0, 1e8), 8)
    halving, hierarchical = (
        seconds("all-reduce", algorithm, 64, 1e6, network)
        for algorithm in ("halving", "hierarchical")
    )
    assert halving == pytest.approx(hierarchical)


def test_10_000_ranks_take_less_than_ten_seconds_each() -> None:
    network = Network(Link(50e-6, 1e9), Link(5e-6, 1e10), 8)
    for algorithm in algorithms_for(10_000, 8):
        started_s = time.process_time()
        seconds("all-reduce", algorithm, 10_000, 1e9, network)
        assert time.process_time() - started_s < 10, algorithm
