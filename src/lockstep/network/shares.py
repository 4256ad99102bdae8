"""How many micro-batches each replica computes, by its measured speed. Pure, and without torch.

A step takes as long as its slowest replica. With equal shares a replica of a third of the speed
makes each step three times as long; with shares 6+2 of 8 micro-batches the step is half as long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import fsum
from statistics import median_low

from lockstep.network.subtrees import equal_shares, fit_shares, powers_of_two_down_from
from lockstep.units import format_duration

MIN_GAIN = 0.07  # of a step; smaller differences are noise
MOST_SUBTREES = 3  # of a replica: each is a message more, and for a while a copy of the gradient
# Bytes that the busiest rank exchanges, when a rank has several subtrees, over those when none has.
UNEVEN_EXCHANGE = 2.0
SLOW, RECOVERED = 1.5, 1.1  # times the median
AGREEING_VOTES = 3
MIN_STEP_US = 50_000  # of shorter steps the noise is larger than what others shares would save


class ShareRule:
    """Decide when shares change. Every rank computes it from the same votes of one generation.

    Shares change when the votes of AGREEING_VOTES steps in a row ask for more on the same replica,
    of steps that take at least MIN_STEP_US. A change that has not shortened the step is taken back,
    and the next one needs twice as many votes.
    """

    def __init__(self, unit: int = 1) -> None:
        self.unit = unit
        self.needed_votes = AGREEING_VOTES
        self._votes = 0
        self._most = -1  # the replica that shall compute most
        self._before: tuple[tuple[int, ...], float] | None = None  # shares and step of a change

    def decide(
        self, current: tuple[int, ...], micro_batch_us: Sequence[int], exchange_us: int
    ) -> tuple[tuple[int, ...], str]:
        """Return the shares of the next step, by replica, and why; see `choose_shares`."""
        now_us = compute_us(current, micro_batch_us, self.unit) + exchange_us
        if self._before is not None:
            shares, before_us = self._before
            self._before = None
            # The times that led to the change were noise, or the exchange grew: undo it.
            if now_us > (1 - MIN_GAIN) * before_us:
                self.needed_votes *= 2
                return shares, f"shares {format_shares(current)} have not shortened the step"
        if now_us < MIN_STEP_US:
            self._votes = 0
            return current, f"a step takes less than {MIN_STEP_US / 1000:g} ms"
        chosen, reason = choose_shares(current, micro_batch_us, exchange_us, self.unit)
        if chosen == current:
            self._votes = 0
            return current, reason
        most = chosen.index(max(chosen))
        self._votes = self._votes + 1 if most == self._most else 1
        self._most = most
        if self._votes < self.needed_votes:
            return current, f"{self._votes} of {self.needed_votes} votes in a row"
        self._votes = 0
        self._before = current, now_us
        return chosen, reason


def compute_us(shares: Sequence[int], micro_batch_us: Sequence[int], unit: int) -> float:
    """Return how long the slowest replica computes its share."""
    passes = (-(-share // unit) * unit for share in shares)
    return max(share * us for share, us in zip(passes, micro_batch_us, strict=True))


def choose_shares(
    current: tuple[int, ...], micro_batch_us: Sequence[int], exchange_us: int, unit: int = 1
) -> tuple[tuple[int, ...], str]:
    """Return the best shares, by replica, and why. `current` if no others are much better.

    micro_batch_us  microseconds per micro-batch, by replica
    exchange_us     of communication that does not overlap with computation, with the current shares
    unit            micro-batches that a replica computes at the same time: its number of shards
    """
    leaves = sum(current)

    def step_us(shares: tuple[int, ...]) -> float:
        exchange = exchange_us * exchange_cost(shares) / exchange_cost(current)
        return compute_us(shares, micro_batch_us, unit) + exchange

    now_us = step_us(current)
    # fsum: the same bits in every version of Python
    least_us = leaves / fsum(1 / us for us in micro_batch_us)
    candidates = [current]
    if least_us < (1 - MIN_GAIN) * now_us:
        candidates.append(equal_shares(len(current), leaves))
        candidates += proportional_shares(leaves, micro_batch_us, unit)
    best = min(candidates, key=step_us)
    if step_us(best) > (1 - MIN_GAIN) * now_us:
        return current, f"no other shares shorten the step by {MIN_GAIN:.0%}"
    seconds = ", ".join(format_duration(us / 1e6) for us in micro_batch_us[:8])
    return best, f"a micro-batch takes {seconds}"


def proportional_shares(
    leaves: int, micro_batch_us: Sequence[int], unit: int
) -> list[tuple[int, ...]]:
    """Return shares in multiples of `unit` that are done soonest, with few or more subtrees."""
    if leaves % unit or leaves < unit * len(micro_batch_us):
        return []
    units = leaves // unit
    slowest_us = max(micro_batch_us)
    times_us = range(slowest_us, units * slowest_us)
    found = []
    for subtrees in range(1, MOST_SUBTREES + 1):

        def limits(time_us: int, subtrees: int = subtrees) -> list[int]:
            return [round_down(min(units, time_us // us), subtrees) for us in micro_batch_us]

        number = bisect_left(times_us, True, key=lambda time_us: sum(limits(time_us)) >= units)
        found.append(
            tuple(unit * share for share in fit_shares(limits(slowest_us + number), units))
        )
    return found


def round_down(number: int, bits: int) -> int:
    """Return the largest integer up to `number` that is a sum of at most `bits` powers of two."""
    return sum([block for block in powers_of_two_down_from(number) if number & block][:bits])


def exchange_cost(shares: Sequence[int]) -> float:
    return UNEVEN_EXCHANGE if any(share & (share - 1) for share in shares) else 1.0


def format_shares(shares: Sequence[int]) -> str:
    """Return "6+2"; "1 to 6" for many replicas."""
    return "+".join(map(str, shares)) if len(shares) <= 8 else f"{min(shares)} to {max(shares)}"


def find_slow(micro_batch_us: Sequence[int], known: Sequence[int]) -> tuple[int, ...]:
    """Return the replicas that are much slower than the median. known: replicas found before."""
    median_us = median_low(micro_batch_us)
    return tuple(
        i
        for i, us in enumerate(micro_batch_us)
        if us > median_us * (RECOVERED if i in known else SLOW)
    )
