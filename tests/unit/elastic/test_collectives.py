"""Collectives with a fake process group: results and errors that one rank passes to the others."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, run_workers

from lockstep import errors
from lockstep.elastic.collectives import (
    assert_equal_on_all_ranks,
    gather_results,
    run_on_rank0,
    vote_on_step,
)
from lockstep.elastic.consensus import StepDecision, Vote
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import ERRORS_BY_NAME, LockstepError, UsageError

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, LockstepError)
]


def on_ranks(folder: Path, size: int, work: Any) -> list[Any]:
    """Return work(runtime), or its exception, of each rank."""
    cluster = FakeCluster(folder, size)

    def run(slot: int) -> Any:
        runtime = cluster.runtime(slot)
        runtime.join_first_generation()
        return work(runtime)

    results = run_workers(cluster, run, list(range(size)))
    return [results[rank] for rank in range(size)]


@pytest.mark.parametrize("kind", KINDS)
def test_error_of_rank_0_is_raised_on_all_ranks(kind: type[LockstepError], tmp_path: Path) -> None:
    assert ERRORS_BY_NAME[kind.__name__] is kind

    def fail() -> None:
        raise kind("what happened", "where", "hint")

    raised = on_ranks(tmp_path, 2, lambda runtime: run_on_rank0(runtime, fail))
    assert [(type(error), error.what, error.where, error.hint) for error in raised] == [
        (kind, "what happened", "where", "hint")
    ] * 2


def test_first_error_is_raised_on_all_ranks(tmp_path: Path) -> None:
    def fail_on_1(runtime: ElasticRuntime) -> None:
        def function() -> None:
            if runtime.world.rank == 1:
                raise UsageError("rank 1 has no file")

        gather_results(runtime, function)

    assert [error.what for error in on_ranks(tmp_path, 3, fail_on_1)] == ["rank 1 has no file"] * 3


def test_other_exceptions_keep_their_type_on_their_rank(tmp_path: Path) -> None:
    def fail_on_1(runtime: ElasticRuntime) -> Any:
        return gather_results(runtime, lambda: 1 // (1 - runtime.world.rank))

    other, own = on_ranks(tmp_path, 2, fail_on_1)
    assert isinstance(own, ZeroDivisionError)
    assert type(other) is LockstepError and other.what.startswith(
        "rank 1 failed: ZeroDivisionError"
    )


def test_results_are_gathered_by_rank(tmp_path: Path) -> None:
    assert (
        on_ranks(tmp_path, 3, lambda runtime: gather_results(runtime, lambda: runtime.world.rank))
        == [[0, 1, 2]] * 3
    )


def test_facts_that_differ_are_named_with_their_ranks(tmp_path: Path) -> None:
    def compare(runtime: ElasticRuntime) -> None:
        assert_equal_on_all_ranks(runtime, {"torch": "2.13", "seed": str(runtime.world.rank // 2)})

    raised = on_ranks(tmp_path, 3, compare)
    assert all(
        "seed is '0' on rank 0 (h), rank 1 (h) and '1' on rank 2 (h)" in error.what
        for error in raised
    )


def test_vote_has_the_same_decision_on_all_ranks(tmp_path: Path) -> None:
    votes = [
        Vote([1.0, 2.0, None], 3, digest=2**63 + 5),
        Vote([None, None, 4.0], 4, stop_signal="SIGTERM", joiners_waiting=True, digest=2**63 + 5),
    ]

    def vote(runtime: ElasticRuntime) -> StepDecision:
        return vote_on_step(runtime, votes[runtime.world.rank])

    expected = StepDecision(7.0, (1.0, 2.0, 4.0), count=7, stop="SIGTERM", regroup=True)
    assert on_ranks(tmp_path, 2, vote) == [expected] * 2


def test_digests_are_gathered_only_when_some_differ(tmp_path: Path) -> None:
    """Ranks 0 and 2 are at one position of two replicas, ranks 1 and 3 at the other."""

    def vote(runtime: ElasticRuntime) -> tuple[StepDecision, int]:
        equal = vote_on_step(runtime, Vote([], digest=10 + runtime.world.rank % 2), replica_size=2)
        before = runtime.group.count  # type: ignore[attr-defined]  # of the fake
        differ = vote_on_step(runtime, Vote([], digest=10 + runtime.world.rank % 3), replica_size=2)
        assert equal == StepDecision(0.0)
        return differ, runtime.group.count - before  # type: ignore[attr-defined]

    expected = StepDecision(0.0, divergent_ranks=(0, 1, 2, 3), digests=(10, 11, 12, 10))
    assert on_ranks(tmp_path, 4, vote) == [(expected, 2)] * 4
