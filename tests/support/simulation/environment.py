"""The simulated environment: time, the network between hosts, and the shared disk."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.elastic.generation_log import NO_GENERATION, Generation, Member

if TYPE_CHECKING:
    from support.simulation.worker import Worker

BREAK_S = 2.5  # a connection without acknowledgments breaks after this time
SLOW_S = {"slow network": 0.4, "very slow network": 4.0}  # extra latency from and to such hosts
Event = Callable[[], None]
State = tuple[int, int]  # (committed steps, hash in place of the weights)


class Clock:
    """Simulated time, pending events, and the single source of randomness."""

    def __init__(self, seed: int) -> None:
        self.now_s, self.rng, self.count = 0.0, random.Random(seed), 0
        self._events: list[tuple[float, int, Event]] = []

    def at(self, moment_s: float, event: Event) -> None:
        self.count += 1
        heapq.heappush(self._events, (moment_s, self.count, event))

    def after(self, delay_s: float, event: Event) -> None:
        self.at(self.now_s + delay_s, event)

    def between(self, least_s: float, most_s: float) -> float:
        return self.rng.uniform(least_s, most_s)

    def step(self) -> None:
        """Process the next event."""
        self.now_s, _, event = heapq.heappop(self._events)
        event()


@dataclass
class Trouble:
    """Whether a host or worker has, or recently had, a fault that justifies its removal."""

    count: int = 0
    until_s: float = 0.0

    def change(self, starts: bool, now_s: float) -> None:
        self.count += 1 if starts else -1
        self.until_s = now_s + 8

    def since(self, moment_s: float) -> bool:
        return self.count > 0 or self.until_s > moment_s


@dataclass
class Host:
    """A machine with an agent and slots for workers.

    active_faults  kind of fault -> number of active ones
    """

    name: str
    workers_by_slot: list[Worker | None]
    active_faults: Counter[str] = field(default_factory=Counter)
    trouble: Trouble = field(default_factory=Trouble)

    @property
    def on(self) -> bool:
        return not self.active_faults["power"]


class Network:
    """Directed routes between hosts, which may be blocked or slow, and their connections."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.connections: list[Connection] = []
        self.blocked: Counter[tuple[str, str]] = Counter()
        self._since_s: dict[tuple[str, str], float] = {}

    def latency_s(self, a: Host, b: Host) -> float:
        slow_s = max(
            SLOW_S[kind] * bool(host.active_faults[kind]) for kind in SLOW_S for host in (a, b)
        )
        return self.clock.between(0.0002, 0.005) + slow_s

    def both_ways_open(self, a: Host, b: Host) -> bool:
        """Whether both directions are open."""
        return not self.blocked[a.name, b.name] and not self.blocked[b.name, a.name]

    def block(self, direction: tuple[str, str]) -> None:
        self.blocked[direction] += 1
        if self.blocked[direction] == 1:
            since_s = self._since_s[direction] = self.clock.now_s
            self.clock.after(
                BREAK_S + self.clock.between(0, 0.5), lambda: self._break(direction, since_s, 0)
            )
            self.clock.after(
                BREAK_S + self.clock.between(0, 0.5), lambda: self._break(direction, since_s, 1)
            )

    def unblock(self, direction: tuple[str, str]) -> None:
        self.blocked[direction] -= 1
        for connection in self._using(direction) if not self.blocked[direction] else ():
            connection.flush(connection.direction(1) == direction)

    def _using(self, direction: tuple[str, str]) -> list[Connection]:
        return [
            line for line in self.connections if direction in (line.direction(0), line.direction(1))
        ]

    def _break(self, direction: tuple[str, str], since_s: float, end: int) -> None:
        """Break the connections that were blocked in this direction for too long."""
        if self.blocked[direction] and self._since_s[direction] == since_s:
            for connection in self._using(direction):
                connection.close(end)


class Connection:
    """A connection from end 0 to end 1. Messages keep their order; None closes it."""

    def __init__(self, network: Network, opener: Worker, answerer: Worker) -> None:
        self.network, self.clock = network, network.clock
        self.ends, self.open = (opener, answerer), [True, True]
        self.blocked_messages: tuple[list[Any], list[Any]] = ([], [])
        self.last_s = [0.0, 0.0]
        network.connections.append(self)

    def direction(self, end: int) -> tuple[str, str]:
        """Return (from, to) of messages sent at `end`."""
        return self.ends[end].host.name, self.ends[1 - end].host.name

    def peer(self, end: int) -> str:
        return self.ends[1 - end].me.id

    def send(self, end: int, message: Any) -> None:
        latency_s = self.network.latency_s(self.ends[0].host, self.ends[1].host)
        self.last_s[end] = max(self.last_s[end], self.clock.now_s + latency_s)
        self.clock.at(self.last_s[end], lambda: self._arrive(end, message))

    def _arrive(self, end: int, message: Any) -> None:
        if self.network.blocked[self.direction(end)] or self.blocked_messages[end]:
            self.blocked_messages[end].append(message)
        else:
            self._deliver(end, message)

    def _deliver(self, end: int, message: Any) -> None:
        other = self.ends[1 - end]
        if (
            not other.alive
        ):  # its kernel resets the connection; a host without power acknowledges nothing
            self.clock.after(0 if other.host.on else BREAK_S, lambda: self.close(end))
        elif self.open[1 - end]:
            other.take(lambda: other.receive(self, 1 - end, message))

    def flush(self, end: int) -> None:
        """Deliver what was blocked on its way from `end`."""
        messages = list(self.blocked_messages[end])
        self.blocked_messages[end].clear()
        for message in messages:
            self._deliver(end, message)

    def close(self, end: int, *, silently: bool = False) -> None:
        """Close this end. The other end learns it over the network, unless `silently`."""
        if self.open[end]:
            self.open[end] = False
            self.ends[end].unlink(self.peer(end), self)
            if not silently:
                self.send(end, None)
            if not any(self.open):
                self.network.connections.remove(self)


class Folder:
    """The shared disk: the log, and the checkpoint, which only the newest generation writes."""

    def __init__(self) -> None:
        self.log: list[Generation] = []
        self.checkpoint: State = (0, 0)
        self.waiting_members: dict[str, Member] = {}  # every worker that ever registered
        self.liveness_writes: dict[str, int] = {}  # id -> writes of its liveness file

    @property
    def newest(self) -> Generation:
        return self.log[-1] if self.log else NO_GENERATION

    def propose(self, generation: Generation) -> Generation:
        """Return the generation of that number that won."""
        if generation.number > len(self.log):
            self.log.append(generation)
        return self.log[generation.number - 1]

    def save(self, number: int, state: State) -> bool:
        """Save a checkpoint of generation `number`; return whether it counts."""
        if number < len(self.log) or state[0] <= self.checkpoint[0]:
            return False
        self.checkpoint = state
        return True
