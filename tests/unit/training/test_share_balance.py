"""ShareBalance: medians in the vote, shares from the votes, equal shares in a new generation."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep.elastic.consensus import StepDecision
from lockstep.elastic.membership import StaticMembership
from lockstep.elastic.world import World
from lockstep.record.events import append_event, read_events
from lockstep.training.share_balance import ShareBalance


def make_balance(times: list[tuple[float, float] | None], *, enabled: bool = True) -> ShareBalance:
    """Return the balance of a leader whose replica measures `times` in turn."""
    world = World(0, 2, 0, 2, "a", torch.device("cpu"), 1, ("a/0/x", "b/1/y"))
    replica = SimpleNamespace(measured_s=iter(times).__next__, workers_per_replica=1, leaves=8)
    return ShareBalance(
        cast(Any, SimpleNamespace(world=world, membership=StaticMembership(0))),
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


SLOW = StepDecision(1.0, micro_batch_us=(100_000, 310_000))
EVEN = StepDecision(1.0, micro_batch_us=(100_000, 100_000))


def test_slow_worker_is_relieved_and_has_an_equal_share_in_the_next_generation() -> None:
    balance = make_balance([(0.1, 0.0)] * 9)
    assert balance.shares == ()
    balance.decide(StepDecision(1.0), 0)  # some are unknown
    for step in range(1, 4):
        assert balance.shares == ()
        balance.decide(SLOW, step)
    assert balance.shares == (6, 2)
    for step in range(4, 8):
        balance.decide(EVEN, step)
    assert balance.shares == ()
    for step in range(8, 11):
        balance.decide(SLOW, step)
    balance.runtime.world = replace(balance.runtime.world, generation=2)  # type: ignore[misc]
    assert balance.shares == ()
    balance.decide(SLOW, 11)
    balance.decide(SLOW, 12)
    assert balance.shares == (), (
        "a new generation counts its own votes: a joiner has seen no others"
    )


def test_screen_names_a_worker_that_has_been_slow_for_a_minute_once_and_its_recovery(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter((0.0, 30.0, 59.0, 60.0, 61.0, 500.0, 501.0))
    monkeypatch.setattr("lockstep.training.share_balance.time.monotonic", times.__next__)
    balance = make_balance([], enabled=False)
    with caplog.at_level(logging.INFO, "lockstep"):
        for _ in range(3):
            balance.decide(SLOW, 1)
        assert not caplog.records
        for _ in range(3):
            balance.decide(SLOW, 1)
        balance.decide(EVEN, 1)
    assert balance.shares == ()
    assert [record.getMessage() for record in caplog.records] == [
        "worker 1 on host b: 0.31 s per micro-batch, 3.1 times the median of 0.1 s",
        "worker 1 on host b: no longer slow",
    ]


def test_slow_workers_are_recorded_at_once_and_again_after_five_minutes(tmp_path: Path) -> None:
    balance = make_balance([])
    record = partial(append_event, tmp_path)
    balance.runtime.membership = SimpleNamespace(record_event=record)  # type: ignore[misc]
    for step in range(3):
        balance.decide(SLOW, step)
    kinds = [(event["event"], event.get("worker")) for event in read_events(tmp_path)]
    assert kinds == [("slow", "worker 1 on host b"), ("shares", None)]
