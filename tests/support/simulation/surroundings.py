"""What surrounds the workers: the time, the network between their hosts, the disk that all share."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.elastic.generation_log import Member, Record

if TYPE_CHECKING:
    from support.simulation.worker import Worker

BREAK_S = 2.5  # after which a connection breaks of which nothing is acknowledged
SLOW_S = {"lag": 0.4, "crawl": 4.0}  # so much more a message takes from and to such hosts
Event = Callable[[], None]
State = tuple[int, int]  # (steps committed, what they made of the weights)


class Clock:
    """The moment, what is going to happen, and the one source of chance."""

    def __init__(self, seed: int) -> None:
        self.now_s, self.chance, self.count = 0.0, random.Random(seed), 0
        self._events: list[tuple[float, int, Event]] = []

    def at(self, moment_s: float, event: Event) -> None:
        self.count += 1
        heapq.heappush(self._events, (moment_s, self.count, event))

    def after(self, delay_s: float, event: Event) -> None:
        self.at(self.now_s + delay_s, event)

    def between(self, least_s: float, most_s: float) -> float:
        return self.chance.uniform(least_s, most_s)

    def step(self) -> None:
        """The next event happens."""
        self.now_s, _, event = heapq.heappop(self._events)
        event()


@dataclass
class Trouble:
    """Whether what happened to a host or a worker is reason enough to go on without it: while it happens and for a while after."""

    count: int = 0
    until_s: float = 0.0

    def change(self, begins: bool, now_s: float) -> None:
        self.count += 1 if begins else -1
        self.until_s = now_s + 8

    def since(self, moment_s: float) -> bool:
        return self.count > 0 or self.until_s > moment_s


@dataclass
class Host:
    """A machine with an agent and seats for workers.

    ills  what is wrong with it ("power", "agent", "lag", "crawl", "slow disk", "bad disk"), by how many faults
    """

    name: str
    seats: list[Worker | None]
    ills: Counter[str] = field(default_factory=Counter)
    trouble: Trouble = field(default_factory=Trouble)

    @property
    def on(self) -> bool:
        return not self.ills["power"]


class Network:
    """Ways from host to host, each of which may be blocked or slow, and the connections on them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lines: list[Line] = []
        self.blocked: Counter[tuple[str, str]] = Counter()
        self._since_s: dict[tuple[str, str], float] = {}

    def latency_s(self, a: Host, b: Host) -> float:
        slow_s = max(SLOW_S[kind] * bool(host.ills[kind]) for kind in SLOW_S for host in (a, b))
        return self.clock.between(0.0002, 0.005) + slow_s

    def joined(self, a: Host, b: Host) -> bool:
        """Both ways are free."""
        return not self.blocked[a.name, b.name] and not self.blocked[b.name, a.name]

    def block(self, way: tuple[str, str]) -> None:
        self.blocked[way] += 1
        if self.blocked[way] == 1:
            since_s = self._since_s[way] = self.clock.now_s
            self.clock.after(BREAK_S + self.clock.between(0, 0.5), lambda: self._break(way, since_s, 0))
            self.clock.after(BREAK_S + self.clock.between(0, 0.5), lambda: self._break(way, since_s, 1))

    def unblock(self, way: tuple[str, str]) -> None:
        self.blocked[way] -= 1
        for line in [line for line in self.lines if not self.blocked[way] and way in (line.way(0), line.way(1))]:
            line.flush(line.way(1) == way)

    def _break(self, way: tuple[str, str], since_s: float, end: int) -> None:
        """What went this way, or was to be acknowledged this way, has waited too long."""
        if self.blocked[way] and self._since_s[way] == since_s:
            for line in [line for line in self.lines if way in (line.way(0), line.way(1))]:
                line.close(end)


class Line:
    """A connection, opened at end 0 and answered at end 1. It keeps its order; what is blocked waits. None as a message closes it."""

    def __init__(self, network: Network, opener: Worker, answerer: Worker) -> None:
        self.network, self.clock = network, network.clock
        self.ends, self.open = (opener, answerer), [True, True]
        self.held: tuple[list[Any], list[Any]] = ([], [])
        self.last_s = [0.0, 0.0]
        network.lines.append(self)

    def way(self, end: int) -> tuple[str, str]:
        """(from, to) of what is sent at `end`."""
        return self.ends[end].host.name, self.ends[1 - end].host.name

    def peer(self, end: int) -> str:
        return self.ends[1 - end].me.id

    def send(self, end: int, message: Any) -> None:
        latency_s = self.network.latency_s(self.ends[0].host, self.ends[1].host)
        self.last_s[end] = max(self.last_s[end], self.clock.now_s + latency_s)
        self.clock.at(self.last_s[end], lambda: self._arrive(end, message))

    def _arrive(self, end: int, message: Any) -> None:
        if self.network.blocked[self.way(end)] or self.held[end]:
            self.held[end].append(message)
        else:
            self._deliver(end, message)

    def _deliver(self, end: int, message: Any) -> None:
        other = self.ends[1 - end]
        if not other.alive:  # its kernel says so; where that is gone, too, nothing is acknowledged
            self.clock.after(0 if other.host.on else BREAK_S, lambda: self.close(end))
        elif self.open[1 - end]:
            other.take(lambda: other.receive(self, 1 - end, message))

    def flush(self, end: int) -> None:
        """The way from `end` is free again."""
        waiting = list(self.held[end])
        self.held[end].clear()
        for message in waiting:
            self._deliver(end, message)

    def close(self, end: int, *, quietly: bool = False) -> None:
        """This end closes. The other one hears of it where the network lets it; quietly: it does not."""
        if self.open[end]:
            self.open[end] = False
            self.ends[end].unlink(self.peer(end), self)
            if not quietly:
                self.send(end, None)
            if not any(self.open):
                self.network.lines.remove(self)


class Folder:
    """What all share: the log, in which a number is written once, and the checkpoint, which only the newest generation writes."""

    def __init__(self) -> None:
        self.log: list[Record] = []
        self.checkpoint: State = (0, 0)
        self.room: dict[str, Member] = {}  # who has ever waited to be let in
        self.signs: dict[str, int] = {}  # id -> how often it has shown that it lives

    @property
    def newest(self) -> Record | None:
        return self.log[-1] if self.log else None

    def propose(self, record: Record) -> Record:
        """The record of that number that wins."""
        if record.number > len(self.log):
            self.log.append(record)
        return self.log[record.number - 1]

    def save(self, number: int, state: State) -> bool:
        """Whether the checkpoint of a writer in generation `number` counts."""
        if number < len(self.log) or state[0] <= self.checkpoint[0]:
            return False
        self.checkpoint = state
        return True
