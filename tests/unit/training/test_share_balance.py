"""ShareBalance: medians in the vote, shares from the votes, equal shares in a new generation."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep.elastic.consensus import StepDecision
from lockstep.elastic.world import World
from lockstep.training.share_balance import ShareBalance


def make_balance(times: list[tuple[float, float] | None], *, enabled: bool = True) -> ShareBalance:
    """Return the balance of a leader whose replica measures `times` in turn."""
    world = World(0, 2, 0, 2, "a", torch.device("cpu"), 1, ("a/0/x", "b/1/y"))
    replica = SimpleNamespace(measured_s=iter(times).__next__, workers_per_replica=1, leaves=8)
    return ShareBalance(
        cast(Any, SimpleNamespace(world=world, membership=None)),
        cast(Any, replica),
        1,
        enabled=enabled,
    )


def test_vote_has_the_median_of_the_newest_five_steps_once_there_are_three() -> None:
    balance = make_balance([(0.1, 0.01), (9.0, 0.01), (0.2, 0.02), *[(0.3, 0.03)] * 4, None])
    assert [balance.measured_us() for _ in range(2)] == [{}, {}]
    assert balance.measured_us() == {"micro_batch_us": 200_001, "exchange_us": 10_001}
    assert [balance.measured_us() for _ in range(4)][-1] == {
        "micro_batch_us": 300_001,
        "exchange_us": 30_001,
    }
    assert balance.measured_us() == {
        "micro_batch_us": 300_001,
        "exchange_us": 30_001,
    }  # a stage that measures nothing


def test_slow_worker_is_relieved_named_once_and_equal_again_in_the_next_generation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    balance, slow = (
        make_balance([(0.1, 0.0)] * 9),
        StepDecision(1.0, micro_batch_us=(100_000, 310_000)),
    )
    assert balance.shares == ()
    with caplog.at_level(logging.INFO, "lockstep"):
        balance.decide(StepDecision(1.0), 0)  # some are unknown
        assert balance.shares == ()
        balance.decide(slow, 1)
        balance.decide(slow, 2)
    assert balance.shares == (6, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "worker 1 on host b: 0.31 s per micro-batch, 3.1 times the median of 0.1 s",
        "from step 3 on: shares 6+2 instead of 4+4: a step is expected to take 0.62 s, not 1.24 s",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "lockstep"):
        balance.decide(StepDecision(1.0, micro_batch_us=(100_000, 100_000)), 3)
    assert balance.shares == () and "worker 1 on host b: no longer slow" in caplog.text
    balance.decide(slow, 4)
    balance.runtime.world = replace(balance.runtime.world, generation=2)  # type: ignore[misc]
    assert balance.shares == ()


def test_slow_worker_is_named_but_keeps_its_share_when_balance_is_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    balance = make_balance([], enabled=False)
    balance.decide(StepDecision(1.0, micro_batch_us=(100_000, 310_000)), 1)
    assert balance.shares == () and "worker 1 on host b" in caplog.text
