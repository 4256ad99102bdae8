"""How many micro-batches each replica computes, by its measured speed. Pure, and without torch.

A step takes as long as its slowest replica. With equal shares a replica of a third of the speed
makes each step three times as long; with shares 6+2 of 8 micro-batches the step is half as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum
from statistics import median_low

from lockstep.network.subtrees import equal_shares, fit_shares, powers_of_two_down_from
from lockstep.units import format_duration

MIN_GAIN = 0.07  # of a step; smaller differences are noise
MOST_SUBTREES = 3  # of a replica: each is a message more, and for a while a copy of the gradient
UNEVEN_EXCHANGE = 2.0  # bytes that the busiest rank exchanges, when a rank has several subtrees, over those when none has
SLOW, RECOVERED = 1.5, 1.1  # times the median


def choose_shares(
    current: tuple[int, ...], micro_batch_us: Sequence[int], exchange_us: int, unit: int = 1
) -> tuple[tuple[int, ...], str]:
    """Return the shares of the next step, by replica, and why. `current` if no others are much better.

    micro_batch_us  microseconds per micro-batch, by replica
    exchange_us     of communication that does not overlap with computation, with the current shares
    unit            micro-batches that a replica computes at the same time: its number of shards
    """
    leaves = sum(current)

    def step_us(shares: tuple[int, ...]) -> float:
        compute_us = max(
            -(-share // unit) * unit * us for share, us in zip(shares, micro_batch_us, strict=True)
        )
        return compute_us + exchange_us * exchange_cost(shares) / exchange_cost(current)

    now_us = step_us(current)
    least_us = leaves / fsum(
        1 / us for us in micro_batch_us
    )  # fsum: the same bits in every version of Python
    candidates = [current]
    if least_us < (1 - MIN_GAIN) * now_us:
        candidates += [
            equal_shares(len(current), leaves),
            *proportional_shares(leaves, micro_batch_us, unit),
        ]
    best = min(candidates, key=step_us)
    if step_us(best) > (1 - MIN_GAIN) * now_us:
        return current, f"no other shares shorten the step by {MIN_GAIN:.0%}"
    expected, now = format_duration(step_us(best) / 1e6), format_duration(now_us / 1e6)
    return (
        best,
        f"shares {format_shares(best)} instead of {format_shares(current)}: a step is expected to take {expected}, not {now}",
    )


def proportional_shares(
    leaves: int, micro_batch_us: Sequence[int], unit: int
) -> list[tuple[int, ...]]:
    """Return shares in multiples of `unit` that are done soonest, with few or more subtrees."""
    if leaves % unit or leaves < unit * len(micro_batch_us):
        return []
    units = leaves // unit
    found = []
    for subtrees in range(1, MOST_SUBTREES + 1):

        def limits(time_us: int, subtrees: int = subtrees) -> list[int]:
            return [round_down(min(units, time_us // us), subtrees) for us in micro_batch_us]

        soonest_us = first_true(
            lambda time_us: sum(limits(time_us)) >= units,
            max(micro_batch_us),
            units * max(micro_batch_us),
        )
        found.append(tuple(unit * share for share in fit_shares(limits(soonest_us), units)))
    return found


def round_down(number: int, bits: int) -> int:
    """Return the largest integer up to `number` that is a sum of at most `bits` powers of two."""
    return sum([block for block in powers_of_two_down_from(number) if number & block][:bits])


def first_true(condition: Callable[[int], bool], low: int, high: int) -> int:
    """Return the smallest integer from `low` to `high` that meets a condition which all larger ones meet."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if condition(middle) else (middle + 1, high)
    return low


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
