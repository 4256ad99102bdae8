"""Deciding together: whatever changes the course of a run is decided on values that every process has.

Every function that begins with "Collective." must be called by all processes at the same place. Messages are numbers and JSON over gloo;
nothing received is unpickled.
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
from lockstep.errors import BY_NAME, LockstepError, UsageError
from lockstep.runtime.process_group import gather_json
from lockstep.units import shown

T = TypeVar("T")
SIGNALS = ("", "SIGTERM", "SIGUSR1", "SIGINT")  # in rising order: of several wishes the last in this row counts


@dataclass(frozen=True)
class Vote:
    """What one process brings to the end of a step.

    losses   the loss of each of its micro-batches, in their order
    wants    the signal that it was sent, "" for none
    joiners  others wait to join
    leaves   this process is to leave, and the rest goes on
    digest   64 bits over the weights with which it computed; 0: not looked
    """

    losses: Sequence[float]
    wants: str = ""
    save_failed: bool = False
    joiners: bool = False
    leaves: bool = False
    digest: int = 0


@dataclass(frozen=True)
class Verdict:
    """What all processes hold true.

    loss     the sum over the micro-batches
    stop     the signal that ends the run, or ""
    regroup  the members change before the next step
    differ   ranks whose weights are not those of the majority; all ranks when there is none. The step is not sound then
    digests  of all ranks, when some differ
    """

    loss: float
    finite: bool = True
    stop: str = ""
    save_failed: bool = False
    regroup: bool = False
    differ: tuple[int, ...] = ()
    digests: tuple[int, ...] = ()


def decide(votes: Sequence[Vote], unit: int = 1) -> Verdict:
    """The one reading of all votes, in the order of the ranks. The loss is an exactly rounded sum: the shares do not show in its bits.

    unit  workers of a replica: those that stand at the same place in theirs hold the same
    """
    losses = [loss for vote in votes for loss in vote.losses]
    differ = differing([vote.digest for vote in votes], unit)
    finite = all(map(math.isfinite, losses))
    return Verdict(
        loss=math.fsum(losses) if finite else math.nan,
        finite=finite,
        stop=max((vote.wants for vote in votes), key=SIGNALS.index) or ("SIGUSR1" if all(vote.leaves for vote in votes) else ""),
        save_failed=any(vote.save_failed for vote in votes),
        regroup=any(vote.joiners or vote.leaves for vote in votes),
        differ=differ,
        digests=tuple(vote.digest for vote in votes) if differ else (),
    )


def differing(digests: Sequence[int | None], unit: int) -> tuple[int, ...]:
    """The ranks that hold something else than most of those at their place; all that hold something where a place has no majority.

    digests  of each rank; None: it holds nothing
    """
    held = [{rank: one for rank, one in enumerate(digests) if rank % unit == place and one is not None} for place in range(unit)]
    found = [rank for digest_of in held for rank in minority(digest_of)]
    lost = any(len(minority(digest_of)) == len(digest_of) > 1 for digest_of in held)
    return tuple(sorted({rank for digest_of in held for rank in digest_of} if lost else found))


def minority(digest_of: Mapping[int, int]) -> list[int]:
    """The ranks that have not what more than half of them have; all of them where nothing has a majority."""
    most, count = Counter(digest_of.values()).most_common(1)[0] if digest_of else (0, 0)
    return [rank for rank, digest in digest_of.items() if digest != most or 2 * count <= len(digest_of)]


def agree(world: World, vote: Vote, *, told: Sequence[int], unit: int = 1) -> Verdict:
    """Collective. The verdict on a step: one message of 6 + max(told) numbers a process.

    told  how many losses each rank tells
    """
    if world.size == 1:
        return decide([vote])
    room = max(told)
    flags = [SIGNALS.index(vote.wants), vote.save_failed, vote.joiners, vote.leaves, vote.digest >> 32, vote.digest & 0xFFFFFFFF]
    sent = torch.tensor([*flags, *vote.losses, *[0.0] * (room - len(vote.losses))], dtype=torch.float64)
    received = torch.empty(world.size * len(sent), dtype=torch.float64)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, sent)
    rows = received.view(world.size, -1).tolist()
    return decide([read_vote(row, losses) for row, losses in zip(rows, told, strict=True)], unit)


def read_vote(row: Sequence[float], losses: int) -> Vote:
    """The vote in a row of numbers, of which `losses` are in use."""
    digest = int(row[4]) << 32 | int(row[5])
    return Vote(row[6 : 6 + losses], SIGNALS[int(row[0])], bool(row[1]), bool(row[2]), bool(row[3]), digest)


def gather(world: World, value: Any) -> list[Any]:
    """Collective. The JSON values of all processes, in the order of the ranks. A worker that is still joining is alone."""
    return gather_json(1 if world.joining else world.size, value)


def lead(world: World, function: Callable[[], T]) -> T:
    """Collective. What `function` gives on rank 0 (a JSON value), on every process; its LockstepError too, so that nobody waits for it."""
    value: T = answers(world, lambda: function() if world.leader or world.joining else None)[0]
    return value


def every(world: World, function: Callable[[], T]) -> T:
    """Collective. What `function` gives on this process; where it raises a LockstepError on one of them, that error on all."""
    own: list[T] = []
    answers(world, lambda: own.append(function()))
    return own[0]


def answers(world: World, function: Callable[[], Any]) -> list[Any]:
    """Collective. What `function` gives on each rank (JSON values), or the first rank's LockstepError."""
    answer: dict[str, Any]
    try:
        answer = {"value": function()}
    except LockstepError as error:
        answer = {"error": type(error).__name__, "parts": [error.what, error.where, error.hint]}
    except Exception as error:
        gather(world, {"error": "LockstepError", "parts": [f"rank {world.rank} failed: {error!r}", "", ""]})
        raise
    found = gather(world, answer)
    for one in found:
        if "error" in one:
            raise BY_NAME[one["error"]](*one["parts"])
    return [one["value"] for one in found]


def refuse_mixed_start(world: World, facts: Mapping[str, str]) -> None:
    """Collective. UsageError on every process when a fact is not the same on all of them, with the ranks and hosts that have each value."""
    told = gather(world, {"node": world.node, "facts": dict(facts)})
    if wrong := mixed([(one["node"], one["facts"]) for one in told]):
        raise UsageError(
            f"the workers of this start would compute other bits: {'; '.join(wrong)}",
            "compared before the first step",
            "start the same code, versions and settings on all hosts",
        )


def mixed(told: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return a sentence for each fact that differs between ranks. `told`: (host, facts) of each rank."""
    sentences = []
    for key in dict.fromkeys(key for _, facts in told for key in facts):
        ranks: dict[str, list[str]] = {}
        for rank, (host, facts) in enumerate(told):
            ranks.setdefault(repr(facts[key]) if key in facts else "not set", []).append(f"rank {rank} ({host})")
        if len(ranks) > 1:
            sentences.append(f"{key} is " + " and ".join(f"{value} on {shown(where)}" for value, where in ranks.items()))
    return sentences
