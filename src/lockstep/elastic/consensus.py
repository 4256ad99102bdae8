"""Consensus: control flow depends only on values that all ranks agree on.

Every function whose docstring begins with "Collective." must be called by all processes at the same
point. Messages are numbers and JSON over gloo; nothing received is unpickled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lockstep.elastic.world import World
from lockstep.errors import ERRORS_BY_NAME, LockstepError, UsageError
from lockstep.runtime.process_group import gather_json
from lockstep.units import join_names

T = TypeVar("T")
SIGNALS = ("", "SIGTERM", "SIGUSR1", "SIGINT")  # by precedence: if ranks received several, the last one listed here wins


@dataclass(frozen=True)
class Vote:
    """What one process contributes to the decision on a step.

    losses           of its micro-batches, in order
    stop_signal      name of the signal that it received; "": none
    joiners_waiting  other workers wait to join
    leaving          this process leaves, and the others continue
    digest           64 bits over the weights that it computed with; 0: not computed
    """

    losses: Sequence[float]
    stop_signal: str = ""
    save_failed: bool = False
    joiners_waiting: bool = False
    leaving: bool = False
    digest: int = 0


@dataclass(frozen=True)
class StepDecision:
    """The result of a vote, equal on all ranks.

    loss             sum over the micro-batches
    stop             signal that stops the run; "": none
    regroup          the members change before the next step
    divergent_ranks  whose weights differ from the majority's; all ranks if there is no majority.
                     A step with divergent ranks must not be committed
    digests          of all ranks, if some diverge
    """

    loss: float
    finite: bool = True
    stop: str = ""
    save_failed: bool = False
    regroup: bool = False
    divergent_ranks: tuple[int, ...] = ()
    digests: tuple[int, ...] = ()


def count_votes(votes: Sequence[Vote], replica_size: int = 1) -> StepDecision:
    """Combine all votes, by rank. The loss is an exactly rounded sum: the split does not matter.

    replica_size  workers per replica; workers at the same position in their replicas hold the same
                  weights
    """
    losses = [loss for vote in votes for loss in vote.losses]
    divergent = find_divergent_ranks([vote.digest for vote in votes], replica_size)
    finite = all(map(math.isfinite, losses))
    return StepDecision(
        loss=math.fsum(losses) if finite else math.nan,
        finite=finite,
        stop=max((vote.stop_signal for vote in votes), key=SIGNALS.index) or ("SIGUSR1" if all(vote.leaving for vote in votes) else ""),
        save_failed=any(vote.save_failed for vote in votes),
        regroup=any(vote.joiners_waiting or vote.leaving for vote in votes),
        divergent_ranks=divergent,
        digests=tuple(vote.digest for vote in votes) if divergent else (),
    )


def find_divergent_ranks(digests: Sequence[int | None], replica_size: int) -> tuple[int, ...]:
    """Return the ranks that differ from the majority at their position; without one, all ranks.

    digests  by rank; None: no state
    """
    by_position = [
        {rank: digest for rank, digest in enumerate(digests) if rank % replica_size == position and digest is not None}
        for position in range(replica_size)
    ]
    divergent = [rank for digest_of in by_position for rank in minority(digest_of)]
    no_majority = any(len(minority(digest_of)) == len(digest_of) > 1 for digest_of in by_position)
    return tuple(sorted({rank for digest_of in by_position for rank in digest_of} if no_majority else divergent))


def minority(digest_of: Mapping[int, int]) -> list[int]:
    """Return the ranks whose digest is not the majority's; all ranks if there is no majority."""
    majority, count = Counter(digest_of.values()).most_common(1)[0] if digest_of else (0, 0)
    return [rank for rank, digest in digest_of.items() if digest != majority or 2 * count <= len(digest_of)]


def vote_on_step(world: World, vote: Vote, *, losses_per_rank: Sequence[int], replica_size: int = 1) -> StepDecision:
    """Collective. Return the decision on a step. Sends 6 + max(losses_per_rank) numbers per rank.

    losses_per_rank  number of losses in each rank's vote
    """
    if world.size == 1:
        return count_votes([vote])
    longest = max(losses_per_rank)
    digest = (vote.digest >> 32, vote.digest & 0xFFFFFFFF)
    flags = [SIGNALS.index(vote.stop_signal), vote.save_failed, vote.joiners_waiting, vote.leaving, *digest]
    sent = torch.tensor([*flags, *vote.losses, *[0.0] * (longest - len(vote.losses))], dtype=torch.float64)
    received = torch.empty(world.size * len(sent), dtype=torch.float64)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, sent)
    rows = received.view(world.size, -1).tolist()
    return count_votes([parse_vote(row, losses) for row, losses in zip(rows, losses_per_rank, strict=True)], replica_size)


def parse_vote(row: Sequence[float], losses: int) -> Vote:
    """Return the vote in a received row, of which `losses` losses are in use."""
    digest = int(row[4]) << 32 | int(row[5])
    return Vote(row[6 : 6 + losses], SIGNALS[int(row[0])], bool(row[1]), bool(row[2]), bool(row[3]), digest)


def all_gather_json(world: World, value: Any) -> list[Any]:
    """Collective. Return the JSON values of all ranks. A joining worker gets only its own."""
    return gather_json(1 if world.is_joining else world.size, value)


def run_on_rank0(world: World, function: Callable[[], T]) -> T:
    """Collective. Return rank 0's `function()` (a JSON value), or raise its LockstepError."""
    value: T = gather_results(world, lambda: function() if world.leader or world.is_joining else None)[0]
    return value


def run_on_all(world: World, function: Callable[[], T]) -> T:
    """Collective. Return `function()`; a LockstepError on one rank is raised on all."""
    result: list[T] = []
    gather_results(world, lambda: result.append(function()))
    return result[0]


def gather_results(world: World, function: Callable[[], Any]) -> list[Any]:
    """Collective. Return all ranks' `function()` (JSON values), or raise the first LockstepError."""
    own: dict[str, Any]
    try:
        own = {"value": function()}
    except LockstepError as error:
        own = {"error": type(error).__name__, "parts": [error.what, error.where, error.hint]}
    except Exception as error:
        all_gather_json(world, {"error": "LockstepError", "parts": [f"rank {world.rank} failed: {error!r}", "", ""]})
        raise
    results = all_gather_json(world, own)
    for result in results:
        if "error" in result:
            raise ERRORS_BY_NAME[result["error"]](*result["parts"])
    return [result["value"] for result in results]


def assert_equal_on_all_ranks(world: World, facts: Mapping[str, str]) -> None:
    """Collective. UsageError on all ranks if a fact differs between them."""
    gathered = all_gather_json(world, {"node": world.host, "facts": dict(facts)})
    if differences := differing_facts([(one["node"], one["facts"]) for one in gathered]):
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
            ranks.setdefault(repr(facts[key]) if key in facts else "not set", []).append(f"rank {rank} ({host})")
        if len(ranks) > 1:
            sentences.append(f"{key} is " + " and ".join(f"{value} on {join_names(where)}" for value, where in ranks.items()))
    return sentences
