"""Votes on a step and the decision that follows from them, as pure functions.

Control flow depends only on values that all ranks agree on. collectives.py exchanges the votes.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import UsageError

STOP_REQUEST = "stop"  # the loop itself asks to stop
SIGNALS = ("", STOP_REQUEST, "SIGTERM", "SIGUSR1", "SIGINT")  # by precedence: if ranks received several, the last one listed here wins


@dataclass(frozen=True)
class Vote:
    """The contribution of one process to the decision on a step."""

    losses: Sequence[float]  # of its micro-batches, in order
    count: int | None = None  # samples or tokens that the losses sum over; None: the loss needs no division
    stop_signal: str = ""  # name of the signal that it received
    save_failed: bool = False
    joiners_waiting: bool = False
    leaving: bool = False  # this process leaves, and the others continue
    digest: int = 0  # 64 bits over the weights that it computed with; 0: not computed


@dataclass(frozen=True)
class StepDecision:
    """The result of a vote, equal on all ranks. With divergent ranks it must not be committed."""

    loss: float  # sum over the micro-batches
    count: int = 0  # sum of the votes' counts; 0: they have none
    finite: bool = True
    stop: str = ""  # signal that stops the run
    save_failed: bool = False
    regroup: bool = False  # the members change before the next step
    divergent_ranks: tuple[int, ...] = ()  # whose weights differ from the majority's; all ranks if there is no majority
    digests: tuple[int, ...] = ()  # of all ranks, if some diverge


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
        count=add_counts([vote.count for vote in votes if vote.losses]),
        finite=finite,
        stop=max((vote.stop_signal for vote in votes), key=SIGNALS.index) or ("SIGUSR1" if all(vote.leaving for vote in votes) else ""),
        save_failed=any(vote.save_failed for vote in votes),
        regroup=any(vote.joiners_waiting or vote.leaving for vote in votes),
        divergent_ranks=divergent,
        digests=tuple(vote.digest for vote in votes) if divergent else (),
    )


def add_counts(counts: Sequence[int | None]) -> int:
    """Return the sum; 0 if all are None. UsageError, on all ranks, for a mixture or a sum of 0."""
    given = [count for count in counts if count is not None]
    if given and (len(given) < len(counts) or sum(given) < 1):
        raise UsageError(
            f"the counts of a step add up to {sum(given)}" if len(given) == len(counts) else "some workers gave counts and others none",
            "backward(loss, count=...)",
            "give the number of samples or tokens of every micro-batch, or no count in the whole step",
        )
    return sum(given)


def parse_count(count: Any) -> int:
    """Return the count of a micro-batch. UsageError if it is not an integer, or negative."""
    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    if number < 0:
        what = f"the count of a micro-batch is {count!r}, not an integer of at least 0"
        raise UsageError(what, "backward(loss, count=...)", "give the number of samples or tokens")
    return number


def find_divergent_ranks(digests: Sequence[int | None], replica_size: int) -> tuple[int, ...]:
    """Return the ranks that differ from the majority at their position; without one, all ranks.

    digests  by rank; None: no state
    """
    known = {rank: digest for rank, digest in enumerate(digests) if digest is not None}
    by_position = [{rank: known[rank] for rank in known if rank % replica_size == position} for position in range(replica_size)]
    if any(len(minority(digest_of)) == len(digest_of) > 1 for digest_of in by_position):
        return tuple(known)
    return tuple(sorted(rank for digest_of in by_position for rank in minority(digest_of)))


def minority(digest_of: Mapping[int, int]) -> list[int]:
    """Return the ranks whose digest is not the majority's; all ranks if there is no majority."""
    majority, count = Counter(digest_of.values()).most_common(1)[0] if digest_of else (0, 0)
    return [rank for rank, digest in digest_of.items() if digest != majority or 2 * count <= len(digest_of)]


def vote_to_row(vote: Vote, length: int) -> list[float]:
    """Return the vote as 7 + `length` numbers, for up to `length` losses."""
    flags = [SIGNALS.index(vote.stop_signal), vote.save_failed, vote.joiners_waiting, vote.leaving]
    digest, count = (vote.digest >> 32, vote.digest & 0xFFFFFFFF), -1 if vote.count is None else vote.count
    return [*flags, *digest, count, *vote.losses, *[0.0] * (length - len(vote.losses))]


def row_to_vote(row: Sequence[float], losses: int) -> Vote:
    """Return the vote in a received row, of which `losses` losses are in use."""
    count, digest = None if row[6] < 0 else int(row[6]), int(row[4]) << 32 | int(row[5])
    return Vote(row[7 : 7 + losses], count, SIGNALS[int(row[0])], bool(row[1]), bool(row[2]), bool(row[3]), digest)
