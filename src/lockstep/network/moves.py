"""A collective as data: which rank sends which range of the buffer to which rank, in which round.

Each rank has a buffer of the same length. Positions are fractions of it, in units of 1 / WHOLE. A
rank starts its moves of a round when it has done those of the rounds before; others need not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.network.tree_exchange import WHOLE

Range = tuple[int, int]


@dataclass(frozen=True)
class Link:
    """The cost of a message between two ranks: of the same host, or of different hosts.

    latency_s    seconds from the start of a send to its first byte on the other side
    bytes_per_s  rate of one direction; above zero
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, bytes: float) -> float:
        """Return the seconds of one message."""
        return self.latency_s + bytes / self.bytes_per_s


class Move(NamedTuple):
    """A message. `adds`: the receiver adds it to its own values, after all copies of the round."""

    sender: int
    receiver: int
    start: int
    stop: int
    adds: bool

    def slice_of(self, length: int) -> slice:
        """Return its range in a buffer of `length` elements. Rounded up: a third of 6 is 2, not
        1."""
        return slice(-(-self.start * length // WHOLE), -(-self.stop * length // WHOLE))


class Phase(NamedTuple):
    """`times` rounds between the same pairs with the same sizes; `moves(k)` returns round k."""

    times: int
    moves: Callable[[int], list[Move]]


Schedule = list[Phase]


def round_of(moves: list[Move]) -> Phase:
    return Phase(1, lambda _: moves)


def rounds(schedule: Schedule) -> Iterator[list[Move]]:
    """Yield all rounds. A ring of 10,000 ranks has 2e8 moves: no list of them fits."""
    return (phase.moves(k) for phase in schedule for k in range(phase.times))


def reverse(schedule: Schedule, *, adds: bool) -> Schedule:
    """Return the schedule backwards, each move from its receiver to its sender."""
    turned = [
        [Move(move.receiver, move.sender, move.start, move.stop, adds) for move in moves]
        for moves in rounds(schedule)
    ]
    return [round_of(moves) for moves in reversed(turned)]


def side_by_side(schedules: list[Schedule]) -> Schedule:
    """Return one schedule that plays several of the same shape, on different ranks, at once."""

    def together(phases: tuple[Phase, ...]) -> Phase:
        return Phase(
            phases[0].times, lambda k: [move for phase in phases for move in phase.moves(k)]
        )

    return [together(phases) for phases in zip(*schedules, strict=True)]
