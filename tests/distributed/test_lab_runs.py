"""The lab's schedules over gloo, between real processes, against torch's own collectives."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from support.launching import run_lockstep
from support.ranks import run_ranks

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import LockstepError
from lockstep.network.collectives import COLLECTIVES, algorithms_for, schedule_of
from lockstep.network.moves import Move, round_of
from lockstep.network.tree_exchange import WHOLE
from lockstep.parallel import run_moves as run_moves_module
from lockstep.parallel.run_moves import measure_moves, run_moves
from lockstep.runtime.work import WorkWaiter


def run_all(runtime: ElasticRuntime, sizes: list[int]) -> dict[tuple[int, str, str], float]:
    """Return the difference from torch of (ranks, collective, algorithm), each in a group of the first ranks."""
    run_moves_module.REPEATS = 1
    differences = {}
    for size in sizes:
        group = dist.new_group(list(range(size)))
        per_host = next((count for count in range(2, size) if size % count == 0), 1)
        for collective in COLLECTIVES if runtime.world.rank < size else ():
            for algorithm in algorithms_for(size, per_host):
                schedule = schedule_of(collective, algorithm, size, per_host)
                differences[size, collective, algorithm] = measure_moves(
                    collective, schedule, 4001, group
                ).difference
    return differences


def test_every_schedule_gives_the_result_of_torch() -> None:
    for rank, differences in enumerate(run_ranks(run_all, 8, [2, 3, 4, 5, 6, 7, 8])):
        assert len(differences) == sum(
            5 * (5 + (size in (4, 6, 8))) for size in range(max(2, rank + 1), 9)
        )
        assert all(
            value == 0
            for (_, collective, _), value in differences.items()
            if collective in ("broadcast", "all-gather")
        )
        assert max(differences.values()) < 1e-6


def run_wrong_sum(runtime: ElasticRuntime) -> str:
    """Play an all-reduce whose last message is missing."""
    assert dist.group.WORLD is not None
    schedule = schedule_of("all-reduce", "tree", 2)[:1]
    try:
        measure_moves("all-reduce", schedule, 100, dist.group.WORLD)
    except LockstepError as error:
        return str(error)
    return ""


def test_a_wrong_schedule_is_found() -> None:
    for text in run_ranks(run_wrong_sum, 2):
        assert "the all-reduce differs from torch's" in text


def copy_and_add(runtime: ElasticRuntime) -> list[float]:
    """Rank 1 gets a copy and an addend for the same range in one round."""
    assert dist.group.WORLD is not None
    buffer = torch.full((3,), float(10**runtime.world.rank))
    run_moves(
        [round_of([Move(0, 1, 0, WHOLE, True), Move(2, 1, 0, WHOLE, False)])],
        buffer,
        dist.group.WORLD,
        WorkWaiter(),
    )
    return buffer.tolist()


def test_copies_come_before_additions() -> None:
    assert run_ranks(copy_and_add, 3)[1] == [101.0] * 3


def test_command_prints_the_measured_time_beside_the_simulated_one() -> None:
    words = [
        "lab",
        "reduce",
        "--ranks",
        "2",
        "--bytes",
        "40 kB",
        "--rate",
        "1 GB/s",
        "--run",
        "--json",
    ]
    result = run_lockstep(*words)
    assert result.returncode == 0, result.stderr
    tree = json.loads(result.stdout.splitlines()[-1])["algorithms"]["tree"]
    assert tree["seconds"] == pytest.approx(40e-6)
    assert tree["measured_s"] > 0
