"""The measurement of collectives and messages, on three ranks of this machine."""

from __future__ import annotations

from typing import Any

import torch
from support.ranks import run_ranks

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.parallel import comm_bench
from lockstep.parallel.comm_bench import CommBench

SIZES = [1000, 100_000]
COLLECTIVES = ["all_reduce", "engine", "broadcast", "all_gather", "reduce_scatter", "send_recv"]


def measure(runtime: ElasticRuntime, too_long_s: float) -> tuple[list[Any], list[Any]]:
    comm_bench.TOO_LONG_S = too_long_s
    comm_bench.BUDGET_S = 0.0
    bench = CommBench(runtime)
    hosts = ["a", "b", "b"]  # ranks 0 and 1: other host; 1 and 2: same host
    pairs = bench.measure_pairs(hosts, SIZES)
    return [tuple(row) for name in bench.plays(0) for row in bench.measure(name, SIZES)], [
        (*pair, pair.kind) for pair in pairs
    ]


def test_all_ranks_have_the_same_rows_and_pairs() -> None:
    results = run_ranks(measure, 3, 2.0)
    assert results[0] == results[1] == results[2]
    rows, pairs = results[0]
    assert [row[:3] for row in rows] == [
        (name, 3, size) for name in COLLECTIVES for size in (1008, 100_008)
    ]  # multiples of 3 floats
    assert [(ranks, hosts, kind) for ranks, hosts, _, kind in pairs] == [
        ((1, 2), ("b", "b"), "same_host"),
        ((0, 1), ("a", "b"), "other_host"),
    ]
    assert all(
        list(seconds) == SIZES and 0 < min(seconds.values()) < 1 for _, _, seconds, _ in pairs
    )
    assert all(0 < row[3] < 10 for row in rows)


def test_larger_sizes_are_left_out_after_one_that_takes_too_long() -> None:
    rows, pairs = run_ranks(measure, 3, 0.0)[0]
    assert [row[:3] for row in rows] == [(name, 3, 1008) for name in COLLECTIVES]
    assert [list(pair[2]) for pair in pairs] == [[1000]] * 2


def play_once(runtime: ElasticRuntime) -> dict[str, bool]:
    """Return whether each collective is the one of its name: what it does to ranks' own numbers."""
    bench, results = CommBench(runtime), {}
    for name in bench.plays(0):
        buffers: list[torch.Tensor] = []
        zeros = torch.zeros

        def fill(
            *args: Any, buffers: list[torch.Tensor] = buffers, zeros: Any = zeros, **options: Any
        ) -> torch.Tensor:
            buffers.append(zeros(*args, **options) + runtime.world.rank + 1)
            return buffers[-1]

        torch.zeros = fill
        try:
            play = bench.plays(6)[name]
        finally:
            torch.zeros = zeros
        play()
        whole, other = buffers
        before = float((runtime.world.rank - 1) % 3 + 1)
        expected = {
            "all_reduce": (whole, [6.0] * 6),
            "engine": (whole, [6.0] * 6),
            "broadcast": (whole, [1.0] * 6),
            "all_gather": (whole, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]),
            "reduce_scatter": (other[:2], [6.0] * 2),
            "send_recv": (other, [before] * 6),
        }[name]
        results[name] = expected[0].tolist() == expected[1]
    return results


def test_each_collective_does_what_its_name_says() -> None:
    assert run_ranks(play_once, 3) == [dict.fromkeys(COLLECTIVES, True)] * 3
