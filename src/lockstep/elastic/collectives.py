"""Collectives whose results are equal on all ranks.

All processes call a function whose docstring starts with "Collective." at the same point. Messages
are numbers and JSON over gloo; nothing received is unpickled.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from lockstep.data.manifest import locked
from lockstep.elastic.consensus import SUMS, StepDecision, Vote, row_to_decision, vote_to_row
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import ERRORS_BY_NAME, LockstepError, PeersLostError, UsageError
from lockstep.units import join_names

T = TypeVar("T")
VOTE_HOLD_S = 0.2  # milliseconds, if the lost worker has voted
UPDATE_HOLD_S = 2.0  # less than STUCK_S of the GroupAborter


def vote_on_step(runtime: ElasticRuntime, vote: Vote, *, replica_size: int = 1) -> StepDecision:
    """Collective. Return the decision on a step: one row is reduced, in O(log N) rounds.

    replica_size  workers per replica; workers at the same position in their replicas hold the same
                  weights. Only if some differ, the digests of all ranks are gathered

    A worker that is lost after its vote interrupts neither the vote nor an exchange of updates.
    """
    runtime.hold_abort(VOTE_HOLD_S)
    rank, size = runtime.world.rank, runtime.world.size
    row = torch.tensor(vote_to_row(vote, rank, replica_size, size // replica_size))
    runtime.group.all_reduce(row, rank, size, combine_rows)
    decision = row_to_decision(
        row.tolist(),
        replica_size,
        size // replica_size,
        lambda: all_gather_json(runtime, vote.digest),
    )
    runtime.hold_abort(UPDATE_HOLD_S)
    return decision


def refuse_aborted(runtime: ElasticRuntime) -> None:
    """PeersLostError after an abort of the group: its works may have ended by it."""
    if runtime.group.is_aborted:
        member = runtime.world.members[runtime.world.rank]
        raise PeersLostError(runtime.generation_error(), member)


def combine_rows(row: torch.Tensor, other: torch.Tensor) -> None:
    row[:SUMS] += other[:SUMS]
    torch.maximum(row[SUMS:], other[SUMS:], out=row[SUMS:])


def all_gather_json(runtime: ElasticRuntime, value: Any) -> list[Any]:
    """Collective. Return the JSON values of all ranks. A joining worker gets only its own."""
    return runtime.group.gather_json(1 if runtime.is_joining else runtime.world.size, value)


def run_on_rank0(runtime: ElasticRuntime, function: Callable[[], T]) -> T:
    """Collective. Return rank 0's `function()` (a JSON value), or raise its LockstepError."""
    value: T = gather_results(
        runtime, lambda: function() if runtime.world.leader or runtime.is_joining else None
    )[0]
    return value


def run_in_run_folder(runtime: ElasticRuntime, function: Callable[[], T]) -> T:
    """Collective. As `run_on_rank0`, for a function that writes files which all workers read: where
    the hosts share no disk, the first worker of each host calls it."""
    if not runtime.membership.has_own_folder:
        return run_on_rank0(runtime, function)
    if runtime.is_joining:  # it has no group: workers of this host may call it at once
        with locked(Path(runtime.member.worker_env.state) / "run_folder.lock"):
            return run_on_rank0(runtime, function)
    value: T = gather_results(runtime, lambda: function() if runtime.world.local_leader else None)[
        0
    ]
    return value


def gather_results(runtime: ElasticRuntime, function: Callable[[], Any]) -> list[Any]:
    """Collective. Return `function()` (a JSON value) of all ranks, or raise the first error."""
    try:
        own: dict[str, Any] = {"value": function()}
    except LockstepError as error:
        own = {"error": type(error).__name__, "parts": [error.what, error.where, error.hint]}
    except Exception as error:
        all_gather_json(
            runtime,
            {
                "error": "LockstepError",
                "parts": [f"rank {runtime.world.rank} failed: {error!r}", "", ""],
            },
        )
        raise
    results = all_gather_json(runtime, own)
    if failed := next((result for result in results if "error" in result), None):
        raise ERRORS_BY_NAME[failed["error"]](*failed["parts"])
    return [result["value"] for result in results]


def assert_equal_on_all_ranks(runtime: ElasticRuntime, facts: Mapping[str, str]) -> None:
    """Collective. UsageError on all ranks if a fact differs between them."""
    gathered = all_gather_json(runtime, {"node": runtime.world.host, "facts": dict(facts)})
    if differences := differing_facts([(sent["node"], sent["facts"]) for sent in gathered]):
        raise UsageError(
            f"the workers of this start would compute different bits: {'; '.join(differences)}",
            "compared before the first step",
            "start the same code, versions and settings on all hosts",
        )


def differing_facts(facts_of_ranks: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Describe each fact that differs between ranks, given (host, facts) of each rank."""
    sentences = []
    for key in dict.fromkeys(key for _, facts in facts_of_ranks for key in facts):
        ranks: dict[str, list[str]] = {}
        for rank, (host, facts) in enumerate(facts_of_ranks):
            ranks.setdefault(repr(facts[key]) if key in facts else "not set", []).append(
                f"rank {rank} ({host})"
            )
        if len(ranks) > 1:
            sentences.append(
                f"{key} is "
                + " and ".join(f"{value} on {join_names(where)}" for value, where in ranks.items())
            )
    return sentences
