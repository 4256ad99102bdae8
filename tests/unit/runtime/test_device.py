"""Metrics of the memory of a device."""

from __future__ import annotations

import torch

from lockstep.runtime.device import measure_memory, memory_metrics


def test_retries_of_the_allocator_are_a_metric_unless_there_are_none() -> None:
    stats = {"allocated_bytes": {"all": {"peak": 5}}, "num_alloc_retries": 0}
    assert memory_metrics(stats) == {"memory_bytes": 5}
    assert memory_metrics(stats | {"num_alloc_retries": 2}) == {
        "memory_bytes": 5,
        "allocator_retries": 2,
    }
    assert memory_metrics({}) == {"memory_bytes": 0}, "nothing was allocated"


def test_memory_of_a_cpu_is_that_of_the_process() -> None:
    assert measure_memory(torch.device("cpu"))["memory_bytes"] > 0
