"""The helper of the distributed tests returns results in rank order and reports every failure."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from support.ranks import run_ranks
from support.tensor_memory import TensorMemory

from lockstep.elastic.runtime import ElasticRuntime


def rank_and_sum(runtime: ElasticRuntime, offset: int) -> tuple[int, int]:
    total = torch.tensor([runtime.world.rank + offset])
    torch.distributed.all_reduce(total)
    return runtime.world.rank, int(total)


def fail_on_rank_1(runtime: ElasticRuntime) -> None:
    if runtime.world.rank == 1:
        raise ValueError("rank 1 has a reason")


def die_on_rank_0(runtime: ElasticRuntime) -> int:
    if runtime.world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return runtime.world.rank


def test_results_come_in_rank_order() -> None:
    assert run_ranks(rank_and_sum, 2, 10) == [(0, 21), (1, 21)]


def test_failure_raises_an_assertion_with_rank_and_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 \(exit code 1\).*rank 1 has a reason"):
        run_ranks(fail_on_rank_1, 2)


def test_an_expected_kill_gives_no_result() -> None:
    assert run_ranks(die_on_rank_0, 2, kill=(0,)) == [None, 1]


def test_the_memory_of_live_tensors_and_its_peak_are_counted() -> None:
    with TensorMemory() as memory:
        first = torch.zeros(100)
        second = first + 1
        del second
    assert (memory.bytes, memory.peak) == (400, 800)
