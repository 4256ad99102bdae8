"""A simulated worker: a membership thread (the protocol with links and a clock), a main thread.

The result of a collective may reach some members and not others. A collective with a missing member
fails for some and hangs for the others until the group is aborted. The first collective of a group
compares steps and transfers the state. Each later one is a step: the sum of all micro-batches, and
the vote.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.simulation.environment import BREAK_S, Connection, Event, Host, State, Trouble

from lockstep.elastic.generation_log import NO_GENERATION, Generation, Member
from lockstep.elastic.protocol.decisions import LeaveReport
from lockstep.elastic.protocol.state import (
    AbortGroup,
    Connect,
    Effect,
    Exit,
    FormGroup,
    GetReady,
    Propose,
    ReadLog,
    Send,
)

if TYPE_CHECKING:
    from support.simulation.cluster import Cluster

TICK_S, CONNECT_S, FORM_S = 0.2, 1.0, 3.0
MICRO_BATCHES = 12
SAVE_EVERY = 4
FACTS = {"torch": "2.13"}


class Worker:
    """A process on a host, and its membership thread."""

    def __init__(self, cluster: Cluster, host: Host, slot: int, number: int) -> None:
        self.cluster, self.clock, self.host, self.slot = cluster, cluster.clock, host, slot
        self.me = Member(
            f"{host.name}/{slot}/{number}", host.name, slot, number, f"127.0.0.1:{number + 1}"
        )
        self.alive, self.stopped = True, False
        self.trouble = Trouble()
        self.connections: dict[str, list[Connection]] = {}
        self.seen: dict[str, int] = {}  # id -> writes of its liveness file seen
        self.main = MainThread(self)
        self._asleep: list[Event] = []
        self._offset_s, self._rate = self.clock.between(-1e5, 1e5), self.clock.between(0.99, 1.01)
        self.protocol = cluster.protocol(self.me, cluster.limits, cluster.token, self.now_s)
        self.after(self.clock.between(0.2, 1.5), self.ask)
        self.tick()

    @property
    def now_s(self) -> float:
        """Time of this worker's clock, with any offset and up to 1% drift."""
        return self._offset_s + self._rate * self.clock.now_s

    # -- life -----------------------------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Run an event in this process: now, after SIGCONT, or never."""
        if self.stopped and self.alive:
            self._asleep.append(event)
        elif self.alive:
            event()

    def after(self, delay_s: float, event: Event) -> None:
        self.clock.after(delay_s, lambda: self.take(event))

    def resume(self) -> None:
        """Handle SIGCONT."""
        self.stopped, asleep, self._asleep = False, self._asleep, []
        for event in asleep:
            self.take(event)

    def end(self, *, silently: bool = False) -> None:
        """End the process. silently: its host lost power, so no kernel resets the connections."""
        if self.alive:
            self.alive = False
            self.main.disappear(silently)
            self.reset(silently=silently)

    def reset(self, *, silently: bool = False) -> None:
        """Break all its connections."""
        for connection in [
            connection for connections in self.connections.values() for connection in connections
        ]:
            connection.close(connection.ends.index(self), silently=silently)

    # -- the membership thread ------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.report("tick")
        self.after(TICK_S * self.clock.between(0.9, 1.1), self.tick)

    def ask(self) -> None:
        """Join the newest generation if a member answers, else start with other new workers."""
        newest = self.cluster.folder.newest
        members = [self.cluster.workers[member.id] for member in newest.members] if newest else []
        joins = any(
            worker.alive and self.cluster.network.both_ways_open(self.host, worker.host)
            for worker in members
        )
        self.cluster.folder.waiting_members[self.me.id] = self.me
        self.carry_out(
            self.protocol.request_join(self.now_s, FACTS if joins else {}, is_joining=joins)
        )

    def join(self) -> None:
        """Join, with a model, the workers that started without this one."""
        self.cluster.folder.waiting_members[self.me.id] = self.me
        self.carry_out(self.protocol.request_join(self.now_s, FACTS, is_joining=True))

    def report(self, event: str, *values: Any) -> None:
        """Pass an event to the protocol and carry out the effects."""
        if self.alive:
            self.carry_out(getattr(self.protocol, event)(*values, self.now_s))

    def carry_out(self, effects: list[Effect]) -> None:
        """Carry out the protocol's effects, as a turn of the membership thread with one event."""
        for effect in [*effects, *self.protocol.advance(self.now_s)]:
            if not self.alive:
                return
            self.cluster.note(self.me.id, effect)
            match effect:
                case Connect(member):
                    self.connect(self.cluster.workers[member.id])
                case Send(id, message):
                    for connection in self.connections.get(id, [])[:1]:
                        connection.send(
                            connection.ends.index(self), json.loads(json.dumps(message))
                        )
                case ReadLog(known):
                    self.disk(lambda: self.read_log(known), self.on_log_read)
                case Propose(generation):
                    self.disk(
                        lambda: self.cluster.propose(self, generation),
                        lambda winner: self.report("on_proposed", winner),
                    )
                case AbortGroup():
                    self.main.abort()
                case FormGroup(generation):
                    self.main.form(generation)
                case GetReady():
                    self.after(self.clock.between(0.2, 1.5), self.join)
                case Exit():
                    self.after(self.clock.between(0, 1), self.end)

    def read_log(self, known: int) -> tuple[Generation, list[Member], list[str]]:
        """Return (newest generation, registered workers, ids with a changed liveness file)."""
        folder = self.cluster.folder
        if self.protocol.writes_liveness:
            folder.liveness_writes[self.me.id] = folder.liveness_writes.get(self.me.id, 0) + 1
        alive = [
            id for id, count in folder.liveness_writes.items() if count != self.seen.get(id, count)
        ]
        self.seen = dict(folder.liveness_writes)
        return (
            folder.newest if len(folder.log) > known else NO_GENERATION,
            list(folder.waiting_members.values()),
            alive,
        )

    def on_log_read(self, result: tuple[Generation, list[Member], list[str]]) -> None:
        newest, waiting_members, alive = result
        self.carry_out(self.protocol.on_log_read(newest, waiting_members, self.now_s, alive))

    def disk(self, work: Callable[[], Any], answer: Callable[[Any], None] | None = None) -> None:
        """Request disk work: done even if the worker dies; may report a failure after success."""
        duration_s = (
            self.clock.between(0.3, 3)
            if self.host.active_faults["slow disk"]
            else self.clock.between(0.001, 0.02)
        )
        bad, rng = self.host.active_faults["bad disk"] > 0, self.clock.rng

        def happen() -> None:
            result = None if bad and rng.random() < 0.7 else work()
            if bad:
                self.after(duration_s * rng.random(), lambda: self.report("on_disk_error"))
            elif answer:
                self.after(duration_s * rng.random(), lambda: answer(result))

        self.clock.after(duration_s * rng.random(), happen)

    # -- links ------------------------------------------------------------------------------------------------------------

    def connect(self, other: Worker) -> None:
        """Open a connection: the peer accepts, its kernel refuses, or nothing answers."""
        if other.host is self.host and not other.alive:
            self.report("on_connect_failed", other.me.id, True)
            return
        attempt = ConnectAttempt()

        def arrive() -> None:
            if not other.host.on or not self.cluster.network.both_ways_open(self.host, other.host):
                return
            if other.alive:
                other.take(answer)
            else:
                self.after(
                    self.cluster.network.latency_s(other.host, self.host), lambda: fail(True)
                )

        def answer() -> None:
            if not attempt.over:
                connection = Connection(self.cluster.network, self, other)
                other.link(self.me.id, connection)
                connection.send(1, attempt)

        def fail(refused: bool) -> None:
            if not attempt.over:
                attempt.over = True
                self.report("on_connect_failed", other.me.id, refused)

        self.clock.after(self.cluster.network.latency_s(self.host, other.host), arrive)
        self.after(CONNECT_S, lambda: fail(False))

    def receive(self, connection: Connection, end: int, message: Any) -> None:
        if message is None or (isinstance(message, ConnectAttempt) and message.over):
            connection.close(end)
        elif isinstance(message, ConnectAttempt):
            message.over = True
            self.link(connection.peer(end), connection)
        else:
            self.report("on_message", connection.peer(end), message)

    def link(self, id: str, connection: Connection) -> None:
        self.connections.setdefault(id, []).append(connection)
        self.report("on_link_up", id)

    def unlink(self, id: str, connection: Connection) -> None:
        """Drop a connection; the protocol learns of it if it was the last one to that peer."""
        connections = self.connections.get(id, [])
        if connection in connections:
            connections.remove(connection)
            if not connections:
                self.take(lambda: self.report("on_link_down", id))


@dataclass
class ConnectAttempt:
    """An attempt to connect; over: it was answered or timed out."""

    over: bool = False


# The main thread.


@dataclass
class CollectiveInput:
    """A member's input to a collective.

    wishes      "join": joiners wait; "drain": it leaves the run; or the id of a member to evict
    checkpoint  the newest, from rank 0
    """

    state: State | None
    micro_batches: range = range(0)
    wishes: frozenset[str] = frozenset()
    checkpoint: State | None = None


class Group:
    """A process group: its arrived and lost members, and the inputs of its collectives."""

    def __init__(self, generation: Generation) -> None:
        self.generation, self.formed = generation, False
        self.arrived: dict[str, Worker] = {}
        self.lost: set[str] = set()
        self.collectives: list[dict[str, CollectiveInput]] = []

    @property
    def workers(self) -> list[Worker]:
        return [
            self.arrived[member.id]
            for member in self.generation.members
            if member.id in self.arrived
        ]


class MainThread:
    """The main thread of a worker.

    ready           state after the step it voted for; committed once all ranks have voted
    in_collective   it waits in a collective
    result_pending  the collective is complete, and its result is on the way to this member
    aborting        its group was aborted
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.cluster, self.clock = worker, worker.cluster, worker.clock
        self.state: State | None = None
        self.ready: State | None = None
        self.group: Group | None = None
        self.left: LeaveReport | None = None
        self.collective_index = 0
        self.in_collective = self.result_pending = self.aborting = False
        self.slow = self.drains = False
        self.evicts = ""
        self.breaks_up = (
            self.clock.rng.random() < 0.5
        )  # the coordinator detects a hanging connection, not its timeout

    # -- form -------------------------------------------------------------------------------------------------------------

    def form(self, generation: Generation) -> None:
        """Form the group of a generation; leave it if it does not form in time."""
        self.cluster.invariants.form(self, generation)
        group = self.group = self.cluster.groups.setdefault(generation.token, Group(generation))
        self.collective_index, self.in_collective, self.result_pending, self.aborting = (
            0,
            False,
            False,
            False,
        )

        def arrive() -> None:
            group.arrived[self.worker.me.id] = self.worker
            self.after(
                FORM_S, lambda: None if group.formed else self.leave("the group did not form")
            )
            self.cluster.try_to_form(group)

        self.after(self.clock.between(0.001, 0.02), arrive)

    def on_formed(self) -> None:
        """The group has formed: commit an agreed step, compare states, transfer them to joiners."""
        assert self.group is not None
        generation, leads = (
            self.group.generation,
            self.group.generation.rank_of(self.worker.me.id) == 0,
        )
        if self.state and self.ready and self.state[0] < generation.step == self.ready[0]:
            self.commit(self.ready)
        self.ready = None
        self.cluster.invariants.formed(self, generation)
        if leads and self.state is None and self.worker.host.active_faults["bad disk"]:
            self.after(0.5, self.on_formed)
        else:
            self.worker.report("set_fingerprint", FACTS)
            self.enter_collective(
                CollectiveInput(
                    self.state, checkpoint=self.cluster.folder.checkpoint if leads else None
                )
            )

    # -- train ------------------------------------------------------------------------------------------------------------

    def vote(self) -> None:
        """Vote. It holds the whole gradient now; the result of the vote may never arrive."""
        assert self.group is not None and self.state is not None
        generation, me = self.group.generation, self.worker.me.id
        rank, size = generation.rank_of(me) or 0, len(generation.members)
        wishes = {"join"} if rank == 0 and self.worker.protocol.joiner_count else set()
        wishes |= {"drain"} if self.drains else set()
        wishes |= {self.evicts} if self.evicts in self.group.arrived else set()
        self.ready = after_step(self.state, range(MICRO_BATCHES))
        micro_batches = range(MICRO_BATCHES * rank // size, MICRO_BATCHES * (rank + 1) // size)
        self.enter_collective(CollectiveInput(self.state, micro_batches, frozenset(wishes)))

    def enter_collective(self, contribution: CollectiveInput) -> None:
        """Take part in the next collective; the last member completes it."""
        group = self.group
        assert group is not None
        if self.collective_index == len(group.collectives):
            group.collectives.append({})
        contributions = group.collectives[self.collective_index]
        contributions[self.worker.me.id] = contribution
        self.in_collective = True
        if len(contributions) == len(group.generation.members):
            for worker in group.workers:
                if worker.main.group is group and not worker.main.aborting:
                    worker.main.result_pending = True
                    worker.main.after(self.clock.between(0.002, 0.05), worker.main.receive_result)
        elif group.lost:
            self.fail_or_hang()

    def receive_result(self, late_s: float = 0.0) -> None:
        """Process the result of the collective at this member."""
        group = self.group
        if group is None or not self.result_pending:
            return
        if any(
            self.cluster.network.blocked[worker.host.name, self.worker.host.name]
            for worker in group.workers
        ):
            coordinator = next(
                (
                    worker
                    for worker in group.workers
                    if worker.alive
                    and worker.main.group is group
                    and worker.protocol.is_coordinator
                ),
                None,
            )
            if late_s > BREAK_S and coordinator and self.breaks_up:
                coordinator.report("regroup", "no progress, and no rank is to blame")
            if late_s > BREAK_S and not (coordinator and self.breaks_up):
                self.leave("a connection timed out")
            else:
                self.after(0.2, lambda: self.receive_result(late_s + 0.2))
            return
        contributions = list(group.collectives[self.collective_index].values())
        first, self.collective_index, self.in_collective, self.result_pending = (
            self.collective_index == 0,
            self.collective_index + 1,
            False,
            False,
        )
        states = {value.state for value in contributions if value.state} or {
            value.checkpoint for value in contributions if value.checkpoint
        }
        self.state = self.cluster.invariants.equal(group.generation, states)
        wishes: frozenset[str] = frozenset().union(*(value.wishes for value in contributions))
        if not first:
            self.commit(
                after_step(
                    self.state,
                    [
                        number
                        for contribution in contributions
                        for number in contribution.micro_batches
                    ],
                )
            )
        for id in sorted(wishes - {"join", "drain"}):
            self.worker.report("evict", id, "its state differs")
        if not wishes:
            self.after(self.clock.between(0.1, 0.4), self.vote)
        elif not self.aborting:
            self.leave("joiners wait" if "join" in wishes else "a member leaves")

    def commit(self, state: State) -> None:
        """Commit a step."""
        assert self.group is not None
        generation = self.group.generation
        self.cluster.invariants.commit(self, generation, state)
        self.cluster.note(self.worker.me.id, f"commits {state[0]} in {generation.number}")
        self.state, self.ready = state, None
        if generation.rank_of(self.worker.me.id) == 0 and state[0] % SAVE_EVERY == 0:
            self.worker.disk(lambda: self.cluster.save(generation.number, state))

    # -- leave ------------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Abort the group: the thread leaves it after a delay."""
        if self.group and not self.aborting:
            self.aborting = True
            self.result_pending = self.result_pending and self.clock.rng.random() < 0.5
            self.after(
                self.clock.between(1, 3) if self.slow else self.clock.between(0.005, 0.05),
                lambda: self.leave("aborted"),
            )

    def fail_or_hang(self) -> None:
        """A member is lost: the collective fails here, or hangs until the group is aborted."""
        if self.clock.rng.random() < 0.5:
            self.after(self.clock.between(0.01, 0.05), lambda: self.leave("the collective failed"))

    def leave(self, why: str) -> None:
        """Leave the group and report it."""
        assert self.group is not None
        self.disappear(silently=False)
        report = self.left = LeaveReport(
            self.group.generation.number, self.state[0] if self.state else -1, self.drains, why
        )
        self.group = None
        self.cluster.note(self.worker.me.id, report)
        self.worker.report("on_group_left", report)

    def disappear(self, silently: bool) -> None:
        """Break the other members' connections to this one, perhaps losing pending results."""
        group, me = self.group, self.worker.me.id
        if group is None or me in group.lost:
            return
        group.lost.add(me)
        for main in [worker.main for worker in group.workers if worker is not self.worker]:
            if main.group is group and main.in_collective:
                main.result_pending = main.result_pending and self.clock.rng.random() < 0.7
                if not main.result_pending and not silently:
                    main.fail_or_hang()

    def after(self, delay_s: float, event: Event) -> None:
        """Run an event later, unless the thread has left the group by then."""
        group = self.group
        self.worker.after(delay_s, lambda: event() if self.group is group else None)


def after_step(state: State, micro_batches: list[int] | range) -> State:
    """Return the state after a step with these micro-batches in its gradient."""
    return state[0] + 1, hash((state, tuple(sorted(micro_batches))))
