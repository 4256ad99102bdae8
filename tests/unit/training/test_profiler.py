"""Time shares of made-up intervals, and parsing of profiled steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # public at run time

from lockstep.errors import UsageError
from lockstep.training.profiler import (
    ProfiledSteps,
    TimeShares,
    shares,
    shares_of,
    total_length,
)


def test_steps_are_parsed_as_numbered_on_the_screen() -> None:
    assert ProfiledSteps.parse("steps=10..12") == ProfiledSteps(10, 12)
    assert ProfiledSteps.parse("steps=7") == ProfiledSteps(7, 7)
    for wrong in ("10..12", "steps=0..3", "steps=5..4", "steps=a", ""):
        with pytest.raises(UsageError, match="--profile"):
            ProfiledSteps.parse(wrong)


def test_overlaps_count_once() -> None:
    assert total_length([(5, 6), (0, 2), (1, 3), (3, 4)]) == 5
    assert total_length([(0, 10), (2, 3), (9, 12)]) == 12
    assert total_length([(4, 4), (5, 3)]) == 0


def test_exposed_communication_excludes_compute_and_shares_add_up_to_the_window() -> None:
    time_shares = shares(
        (0, 10), compute=[(0, 4), (3, 5), (8, 9)], communication=[(2, 7), (8.5, 8.7), (9.5, 10)]
    )
    assert time_shares == TimeShares(compute_s=6, exposed_s=2.5, idle_s=1.5)
    assert (
        time_shares.show()
        == "compute 6.000 s (60%), exposed communication 2.500 s (25%), idle 1.500 s (15%)"
    )
    assert shares((0, 2), [], []) == TimeShares(0, 0, 2)


def event(name: str, start_us: float, end_us: float) -> Any:
    span = SimpleNamespace(start=start_us, end=end_us)
    return SimpleNamespace(name=name, device_type=DeviceType.CPU, time_range=span)


def test_compiled_kernels_count_as_compute_on_a_cpu() -> None:
    events = [
        event("## Call CompiledFxGraph fvn7pf6", 0, 3e6),
        event("aten::mm", 1e6, 2e6),
        event("gloo:all_reduce", 2e6, 5e6),
        event("Optimizer.step#AdamW.step", 5e6, 6e6),
    ]
    assert shares_of(events, "cpu") == TimeShares(compute_s=3, exposed_s=2, idle_s=1)
