"""Votes on a step and the decision that follows from them, as pure functions.

Control flow depends only on values that all ranks agree on. collectives.py exchanges the votes.
"""

import math
import operator
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.errors import CollectiveMismatchError, UsageError

STOP_REQUEST = "stop"  # the loop itself asks to stop
# By precedence: if ranks received several, the last one listed here wins.
SIGNALS = ("", STOP_REQUEST, "SIGTERM", "SIGUSR1", "SIGINT")
SUMS = 2  # values of a row that are added: the count, and the digest of the trained weights
UNKNOWN = -(2**63)  # less than every fact that a vote can give
INTEGER, FLOAT = struct.Struct("<q"), struct.Struct("<d")


@dataclass(frozen=True)
class Vote:
    """The contribution of one process to the decision on a step."""

    # By micro-batch of the step; None: another worker has it, or the step skips it.
    losses: Sequence[float | None]
    # Samples or tokens that the losses sum over; None: the loss needs no division.
    count: int | None = None
    # Of its micro-batches, where known and each loss is the mean over them.
    samples: Sequence[int] = ()
    stop_signal: str = ""  # name of the signal that it received
    save_failed: bool = False
    joiners_waiting: bool = False
    leaving: bool = False  # this process leaves, and the others continue
    digest: int = 0  # 64 bits over the weights that it computed with; 0: not computed
    trained: int = 0  # 64 bits over its trained weights; slices are added up
    gradient_finite: bool = True  # no sum over its part of the gradient is infinite or NaN
    # Microseconds that it computes a micro-batch for; None: unknown.
    micro_batch_us: int | None = None
    exchange_us: int = 0  # microseconds that it waited for communication
    step: int = 0  # that it votes on


@dataclass(frozen=True)
class StepDecision:
    """The result of a vote, equal on all ranks. With divergent ranks it must not be committed."""

    loss: float  # sum over the micro-batches
    losses: tuple[float | None, ...] = ()  # of each; None: skipped
    trained: int = 0  # digest of the trained weights that the step was computed with; 0: none
    count: int = 0  # sum of the votes' counts; 0: they have none
    trained_share: float = 1.0  # of the micro-batches, where each loss is a share of their mean
    finite: bool = True  # the loss
    gradient_finite: bool = True  # False also if a sum of finite elements overflows
    stop: str = ""  # signal that stops the run
    save_failed: bool = False
    regroup: bool = False  # the members change before the next step
    # Whose weights differ from the majority's; all ranks if there is no majority.
    divergent_ranks: tuple[int, ...] = ()
    digests: tuple[int, ...] = ()  # of all ranks, if some diverge
    # By replica, the least of its workers; () if some are unknown.
    micro_batch_us: tuple[int, ...] = ()
    # The least of all ranks, so that it includes no waiting for a slow replica.
    exchange_us: int = 0

    @property
    def is_ordinary(self) -> bool:
        """Whether the step is committed, and the run continues with the same members."""
        is_finite = self.finite and self.gradient_finite
        is_interrupted = self.stop or self.save_failed or self.regroup or self.divergent_ranks
        return is_finite and not is_interrupted


class RowFacts(NamedTuple):
    """Facts in the row of a vote, in its order; of combined rows, each is the maximum over all
    votes. A minimum is the maximum of ~value, or of -value."""

    stop: int  # position in SIGNALS
    save_failed: int
    regroup: int
    some_stay: int
    gradient_not_finite: int
    some_with_count: int  # of the votes that have losses
    some_without_count: int
    last_step: int
    inverse_first_step: int
    most_samples: int
    inverse_least_samples: int
    negative_exchange_us: int


FACTS_END = SUMS + len(RowFacts._fields)


def vote_to_row(vote: Vote, rank: int, replica_size: int, replicas: int = 1) -> list[int]:
    """Return a vote as integers of 64 bits, whose combination over all votes gives the decision.

    The first SUMS are added: the count, and the digest of the trained weights by the first replica.
    Of the others, each is the maximum over all votes: RowFacts, then digests as d and ~d, at the
    vote's position in its replica, then the negative time of a micro-batch by replica, then the
    bits of the losses, each of which one vote gives.
    """
    replica, position = divmod(rank, replica_size)
    has_count = vote.count is not None
    has_losses = any(loss is not None for loss in vote.losses)
    facts = RowFacts(
        stop=SIGNALS.index(vote.stop_signal),
        save_failed=vote.save_failed,
        regroup=vote.joiners_waiting or vote.leaving,
        some_stay=not vote.leaving,
        gradient_not_finite=not vote.gradient_finite,
        some_with_count=has_losses and has_count,
        some_without_count=has_losses and not has_count,
        last_step=vote.step,
        inverse_first_step=~vote.step,
        most_samples=max(vote.samples) if vote.samples else UNKNOWN,
        inverse_least_samples=~min(vote.samples) if vote.samples else UNKNOWN,
        negative_exchange_us=-vote.exchange_us,
    )
    digest = as_int64(vote.digest)
    digests = [UNKNOWN] * 2 * replica_size
    digests[2 * position : 2 * position + 2] = digest, ~digest
    times = [UNKNOWN] * replicas
    if vote.micro_batch_us is not None:
        times[replica] = -vote.micro_batch_us
    count = (vote.count or 0) * has_losses
    trained = as_int64(vote.trained) * (replica == 0)
    return [count, trained, *facts, *digests, *times, *map(loss_to_bits, vote.losses)]


def as_int64(bits: int) -> int:
    """Return 64 bits as a signed number, as torch.int64 has them."""
    return (bits + 2**63) % 2**64 - 2**63


def loss_to_bits(loss: float | None) -> int:
    """Return a float as an integer of 64 bits. -0.0 becomes 0.0, since its bits are UNKNOWN."""
    return UNKNOWN if loss is None else int(INTEGER.unpack(FLOAT.pack(loss + 0.0))[0])


def bits_to_loss(bits: int) -> float | None:
    return None if bits == UNKNOWN else float(FLOAT.unpack(INTEGER.pack(bits))[0])


def sum_of_losses(losses: Iterable[float | None]) -> float:
    """Return their sum, rounded once. NaN if one of them is not finite; an infinity if a partial
    sum is more than a float holds."""
    known = [loss for loss in losses if loss is not None]
    if not all(map(math.isfinite, known)):
        return math.nan
    try:
        return math.fsum(known)
    except OverflowError:
        return math.copysign(math.inf, sum(loss / len(known) for loss in known))


def row_to_decision(
    row: Sequence[int],
    replica_size: int,
    replicas: int,
    gather_digests: Callable[[], Sequence[int]],
) -> StepDecision:
    """Return the decision from the combined rows of all votes.

    gather_digests  Collective; returns the digests of all ranks. Called if some differ
    CollectiveMismatchError, on all ranks, if they vote on different steps.
    UsageError, on all ranks, if only some votes with losses have a count, if counts add up to 0, or
    if losses are means over different numbers of samples.
    """
    count = row[0]
    facts = RowFacts._make(row[SUMS:FACTS_END])
    times_start = FACTS_END + 2 * replica_size
    digests = row[FACTS_END:times_start]
    times = row[times_start : times_start + replicas]
    losses = tuple(map(bits_to_loss, row[times_start + replicas :]))
    refuse_unequal_votes(facts, count)
    differ = any(
        highest != ~inverse for highest, inverse in zip(digests[::2], digests[1::2], strict=True)
    )
    by_rank = tuple(gather_digests()) if differ else ()
    loss = sum_of_losses(losses)
    return StepDecision(
        loss=loss,
        losses=losses,
        trained=row[1] % 2**64,
        count=count,
        finite=math.isfinite(loss),
        gradient_finite=not facts.gradient_not_finite,
        stop=SIGNALS[facts.stop] or "SIGUSR1" * (not facts.some_stay),
        save_failed=bool(facts.save_failed),
        regroup=bool(facts.regroup),
        divergent_ranks=find_divergent_ranks(by_rank, replica_size),
        digests=by_rank,
        micro_batch_us=tuple(-time for time in times) if min(times) > UNKNOWN else (),
        exchange_us=-facts.negative_exchange_us,
    )


def refuse_unequal_votes(facts: RowFacts, count: int) -> None:
    """Raise what `row_to_decision` raises. count: sum over all votes."""
    first_step = ~facts.inverse_first_step
    if facts.last_step != first_step:
        raise CollectiveMismatchError(
            f"ranks vote on different steps: {first_step + 1} to {facts.last_step + 1}",
            "each vote carries its step",
            "this is a bug of Lockstep: report it with events.jsonl and logs/",
        )
    if facts.some_with_count and (facts.some_without_count or count < 1):
        raise UsageError(
            "some workers gave counts and others none"
            if facts.some_without_count
            else f"the counts of a step add up to {count}",
            "session.backward(loss, count=...)",
            "give the number of samples or tokens of every micro-batch, "
            "or no count in the whole step",
        )
    most, least = facts.most_samples, ~facts.inverse_least_samples
    if most != least and most >= 0:
        raise UsageError(
            f"the micro-batches of a step have {least} "
            f"to {most} samples, and their losses are means",
            "session.backward(loss), without count",
            "samples of small micro-batches would weigh more: give the sum, and the number "
            "of samples or tokens that it is over: session.backward(loss_sum, count=n); "
            "or session.backward(loss, count=1), if all losses should weigh the same",
        )


def parse_count(count: Any) -> int:
    """Return the count of a micro-batch. UsageError if it is not an integer, or negative."""
    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(
            f"the count of a micro-batch is {count!r}, not an integer of at least 0",
            "session.backward(loss, count=...)",
            "give the number of samples or tokens",
        )
    return number


def find_divergent_ranks(digests: Sequence[int | None], replica_size: int) -> tuple[int, ...]:
    """Return the ranks that differ from the majority at their position; without one, all ranks.
    digests: by rank; None: no state."""
    known = {rank: digest for rank, digest in enumerate(digests) if digest is not None}
    by_position = [
        {rank: known[rank] for rank in known if rank % replica_size == position}
        for position in range(replica_size)
    ]
    # Without a majority at one position no replica can be trusted.
    if any(len(minority(digest_of)) == len(digest_of) > 1 for digest_of in by_position):
        return tuple(known)
    return tuple(sorted(rank for digest_of in by_position for rank in minority(digest_of)))


def minority(digest_of: Mapping[int, int]) -> list[int]:
    """Return the ranks whose digest is not the majority's; all ranks if there is no majority."""
    majority, count = Counter(digest_of.values()).most_common(1)[0] if digest_of else (0, 0)
    return [
        rank
        for rank, digest in digest_of.items()
        if digest != majority or 2 * count <= len(digest_of)
    ]
