"""What failures cost: the membership protocol itself is played, with a failure, in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count, product

from lockstep.elastic.generation_log import NO_GENERATION, Generation, Member
from lockstep.elastic.protocol.decisions import ElasticLimits, LeaveReport
from lockstep.elastic.protocol.state import (
    AbortGroup,
    Connect,
    Effect,
    FormGroup,
    Propose,
    ReadLog,
    Send,
)
from lockstep.elastic.protocol.transitions import Protocol
from lockstep.planner.devices import Cluster
from lockstep.planner.plan import PlannedLayout

Effects = Iterable[Effect]
React = Callable[[float], Effects | None]
MAX_HOSTS, MAX_PER_HOST = 16, 4  # that are played; a larger cluster takes a little longer
# Assumed: seconds of the run folder, to leave a group, to form one.
DISK_S = 0.02
LEAVE_S = 0.05
FORM_S = 0.1
# Until a replacement asks to join, or a lost run has loaded its checkpoint: assumed.
RESTART_S = 30.0


@dataclass(frozen=True)
class Goodput:
    """The share of time in steps that count. outage_s: of survivors, until they train again."""

    share: float
    outage_s: float
    lost_s: float  # per failure, with repeated work and missing capacity
    device_hours_per_million_tokens: float
    dollars_per_million_tokens: float | None


@dataclass(frozen=True)
class Failures:
    """mtbf_s: mean seconds between failures of some host of the run. price: dollars per device and
    hour; None: unknown. save_steps: between checkpoints."""

    mtbf_s: float
    price: float | None
    save_steps: int


def expected_goodput(
    best: PlannedLayout, cluster: Cluster, tokens: int, failures: Failures
) -> Goodput:
    """Return the goodput of a layout. tokens: of a step."""
    layout, step_s = best.layout, best.step.seconds
    outage_s = RESTART_S
    lost_s = RESTART_S + failures.save_steps / 2 * step_s
    survivors = layout.workers_per_replica * (layout.replicate - 1)
    if cluster.hosts > 1 and survivors >= cluster.per_host:
        outage_s = played_outage(
            min(cluster.hosts, MAX_HOSTS),
            min(cluster.per_host, MAX_PER_HOST),
            cluster.other_host.latency_s,
        )
        missing = max(cluster.per_host, layout.workers_per_replica) / layout.workers
        state_bytes = best.memory.weights + best.memory.optimizer  # that a replacement receives
        transfer_s = cluster.other_host.seconds(state_bytes * cluster.per_host)
        lost_s = outage_s + step_s / 2 + missing * RESTART_S + FORM_S + transfer_s
    share = 1 / (1 + lost_s / failures.mtbf_s)
    hours = layout.workers / 3600 * step_s / tokens / share * 1e6
    dollars = None if failures.price is None else failures.price * hours
    return Goodput(share, outage_s, lost_s, hours, dollars)


@lru_cache(maxsize=16)
def played_outage(hosts: int, per_host: int, latency_s: float) -> float:
    """Return the seconds from the loss of a host, with rank 0, until the others train again."""
    play = Play(hosts, per_host, latency_s)
    play.run_until_formed(play.workers)
    play.run(play.now_s + 5)
    lost = play.workers[:per_host]
    survivors = play.workers[per_host:]
    failed_s = play.now_s
    for worker in lost:
        worker.lose_power()
    return play.run_until_formed(survivors) - failed_s


class PlayedWorker:
    """A process: the protocol, and the generation whose group it has formed."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.is_alive = True
        self.formed = 0

    def form(self, generation: Generation) -> None:
        self.formed = generation.number

    def lose_power(self) -> None:
        self.is_alive = False


class Play:
    """Workers with equal clocks, a folder for the log, and links with a latency. No event fails."""

    def __init__(self, hosts: int, per_host: int, latency_s: float) -> None:
        self.now_s = 0.0
        self.latency_s = max(latency_s, 1e-5)
        self.numbers = count()
        self.events: list[tuple[float, int, PlayedWorker, React]] = []
        self.log: list[Generation] = []
        limits = ElasticLimits(expected_workers=hosts * per_host)
        self.workers: list[PlayedWorker] = []
        for host, slot in product(range(hosts), range(per_host)):
            name, address = f"h{host:03d}", f"10.0.0.1:{slot + 1}"
            member = Member(f"{name}/{slot}/", name, slot, 1, address)
            protocol = Protocol(member, limits, lambda: str(next(self.numbers)), 0.0)
            self.workers.append(PlayedWorker(protocol))
        for worker in self.workers:
            self.tick(worker)
            self.act(worker, worker.protocol.request_join(0.0, {}))

    def tick(self, worker: PlayedWorker) -> None:
        self.act(worker, worker.protocol.tick(self.now_s))
        self.after(0.2, worker, lambda _: self.tick(worker))

    def after(self, delay_s: float, worker: PlayedWorker, react: React) -> None:
        """Let a worker react to an event; `react` returns the effects, given the time."""
        heapq.heappush(self.events, (self.now_s + delay_s, next(self.numbers), worker, react))

    def run(self, until_s: float) -> None:
        while self.events and self.events[0][0] <= until_s:
            self.now_s, _, worker, react = heapq.heappop(self.events)
            if worker.is_alive:
                self.act(worker, react(self.now_s) or ())
        self.now_s = until_s

    def run_until_formed(self, workers: Sequence[PlayedWorker]) -> float:
        """Run until the newest generation has these workers alone, each with its group formed."""
        while (
            len({worker.formed for worker in workers} | {len(self.log)}) > 1
            or not self.log
            or len(self.log[-1].members) != len(workers)
        ):
            self.run(self.events[0][0])
        return self.now_s

    def act(self, worker: PlayedWorker, effects: Iterable[Effect]) -> None:
        """Carry out the effects of a turn of a worker."""
        protocol = worker.protocol
        for effect in (*effects, *protocol.advance(self.now_s)):
            if isinstance(effect, Send | Connect):
                self.reach(worker, effect)
            elif isinstance(effect, ReadLog):
                self.after(DISK_S, worker, partial(self.read_log, worker))
            elif isinstance(effect, Propose):
                self.after(DISK_S, worker, partial(self.propose, worker, effect.generation))
            elif isinstance(effect, AbortGroup):
                self.after(LEAVE_S, worker, partial(self.leave, worker, effect.why))
            elif isinstance(effect, FormGroup):
                self.after(FORM_S, worker, partial(self.form, worker, effect.generation))

    def reach(self, worker: PlayedWorker, effect: Send | Connect) -> None:
        """Deliver a message, or connect. A host without power answers nothing."""
        me = worker.protocol.me.id
        id = effect.id if isinstance(effect, Send) else effect.member.id
        peer = next(other for other in self.workers if other.protocol.me.id == id)
        if isinstance(effect, Send):
            self.after(self.latency_s, peer, partial(peer.protocol.on_message, me, effect.message))
        elif peer.is_alive:
            self.after(self.latency_s, peer, partial(peer.protocol.on_link_up, me))
            self.after(self.latency_s, worker, partial(worker.protocol.on_link_up, id))
        else:
            self.after(1.0, worker, partial(worker.protocol.on_connect_failed, id, False))

    def form(self, worker: PlayedWorker, generation: Generation, _: float) -> None:
        worker.form(generation)

    def leave(self, worker: PlayedWorker, why: str, now_s: float) -> Effects:
        number = worker.protocol.number
        return worker.protocol.on_group_left(LeaveReport(number, 10 + number, why=why), now_s)

    def read_log(self, worker: PlayedWorker, now_s: float) -> Effects:
        newest = self.log[-1] if len(self.log) > worker.protocol.number else NO_GENERATION
        members = self.log[-1].ranks if self.log else {}
        waiting = [
            other.protocol.me
            for other in self.workers
            if other.is_alive and other.protocol.me.id not in members
        ]
        return worker.protocol.on_log_read(newest, waiting, now_s)

    def propose(self, worker: PlayedWorker, generation: Generation, now_s: float) -> Effects:
        if generation.number == len(self.log) + 1:
            self.log.append(generation)
        return worker.protocol.on_proposed(self.log[generation.number - 1], now_s)
