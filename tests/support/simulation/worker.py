"""One worker: its member thread, which is the protocol with links and a clock, and a main thread that forms groups and trains in them.

What a collective has come to may reach some members and not the others; one that misses somebody fails for some and hangs for the others
until it is cut. The first collective of a group compares steps and hands out the state; each of the others is a step: all its
micro-batches, summed, and the vote.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from support.simulation.surroundings import BREAK_S, Event, Host, Line, State, Trouble

from lockstep.elastic.generation_log import Member, Record
from lockstep.elastic.protocol import Connect, Cut, Effect, Form, Leave, Look, Prepare, Propose, Report, Send

if TYPE_CHECKING:
    from support.simulation.cluster import Cluster

TICK_S, CONNECT_S, FORM_S = 0.2, 1.0, 3.0
MICRO_BATCHES = 12
SAVE_EVERY = 4
FACTS = {"torch": "2.13"}


class Worker:
    """A process on a host, as the others see it, and its member thread."""

    def __init__(self, cluster: Cluster, host: Host, slot: int, number: int) -> None:
        self.cluster, self.clock, self.host, self.slot = cluster, cluster.clock, host, slot
        self.me = Member(f"{host.name}/{slot}/{number}", host.name, slot, number, f"127.0.0.1:{number + 1}")
        self.alive, self.stopped = True, False
        self.trouble = Trouble()
        self.lines: dict[str, list[Line]] = {}
        self.seen: dict[str, int] = {}  # id -> how often it had signed
        self.main = Main(self)
        self._asleep: list[Event] = []
        self._offset_s, self._rate = self.clock.between(-1e5, 1e5), self.clock.between(0.99, 1.01)
        self.protocol = cluster.protocol(self.me, cluster.limits, cluster.token, self.now_s)
        self.after(self.clock.between(0.2, 1.5), self.ask)
        self.tick()

    @property
    def now_s(self) -> float:
        """By its own clock, which is off by anything and wrong by up to 1%."""
        return self._offset_s + self._rate * self.clock.now_s

    # -- life -----------------------------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """An event in this process: now, when it is continued, or never."""
        if self.stopped and self.alive:
            self._asleep.append(event)
        elif self.alive:
            event()

    def after(self, delay_s: float, event: Event) -> None:
        self.clock.after(delay_s, lambda: self.take(event))

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped, asleep, self._asleep = False, self._asleep, []
        for event in asleep:
            self.take(event)

    def end(self, *, quietly: bool = False) -> None:
        """It is no more. Quietly: its host has lost power, and no kernel tells anybody."""
        if self.alive:
            self.alive = False
            self.main.vanish(quietly)
            self.reset(quietly=quietly)

    def reset(self, *, quietly: bool = False) -> None:
        """All its connections break."""
        for line in [line for lines in self.lines.values() for line in lines]:
            line.close(line.ends.index(self), quietly=quietly)

    # -- the member thread ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.tell("tick")
        self.after(TICK_S * self.clock.between(0.9, 1.1), self.tick)

    def ask(self) -> None:
        """It has warmed up. When somebody of the newest generation answers it joins, else it begins, with whoever else begins."""
        newest = self.cluster.folder.newest
        members = [self.cluster.workers[one.id] for one in newest.members] if newest else []
        joins = any(one.alive and self.cluster.network.joined(self.host, one.host) for one in members)
        self.cluster.folder.room[self.me.id] = self.me
        self.do(self.protocol.ask(self.now_s, FACTS if joins else {}, joins=joins))

    def join(self) -> None:
        """It is warm, and joins those that began without it."""
        self.cluster.folder.room[self.me.id] = self.me
        self.do(self.protocol.ask(self.now_s, FACTS, joins=True))

    def tell(self, what: str, *values: Any) -> None:
        """Tell the protocol, and do what it says."""
        if self.alive:
            self.do(getattr(self.protocol, what)(*values, self.now_s))

    def do(self, effects: list[Effect]) -> None:
        """Carry out what the protocol wants."""
        for effect in effects:
            if not self.alive:
                return
            self.cluster.note(self.me.id, effect)
            match effect:
                case Connect(member):
                    self.connect(self.cluster.workers[member.id])
                case Send(id, message):
                    for line in self.lines.get(id, [])[:1]:
                        line.send(line.ends.index(self), json.loads(json.dumps(message)))
                case Look(known):
                    self.disk(lambda: self.look(known), self.looked)
                case Propose(record):
                    self.disk(lambda: self.cluster.propose(self, record), lambda winner: self.tell("proposed", winner))
                case Cut():
                    self.main.cut()
                case Form(record):
                    self.main.form(record)
                case Prepare():
                    self.after(self.clock.between(0.2, 1.5), self.join)
                case Leave():
                    self.after(self.clock.between(0, 1), self.end)

    def look(self, known: int) -> tuple[Record | None, list[Member], list[str]]:
        """What the folder shows: the newest record, who has ever waited, and who has signed since the last look."""
        folder = self.cluster.folder
        if self.protocol.signs:
            folder.signs[self.me.id] = folder.signs.get(self.me.id, 0) + 1
        alive = [id for id, count in folder.signs.items() if count != self.seen.get(id, count)]
        self.seen = dict(folder.signs)
        return folder.newest if len(folder.log) > known else None, list(folder.room.values()), alive

    def looked(self, found: tuple[Record | None, list[Member], list[str]]) -> None:
        newest, room, alive = found
        self.do(self.protocol.looked(newest, room, self.now_s, alive))

    def disk(self, work: Callable[[], Any], answer: Callable[[Any], None] | None = None) -> None:
        """Ask something of the disk. It happens though the worker ends meanwhile, and a failure may be reported of what has happened."""
        took_s = self.clock.between(0.3, 3) if self.host.ills["slow disk"] else self.clock.between(0.001, 0.02)
        bad, chance = self.host.ills["bad disk"] > 0, self.clock.chance

        def happen() -> None:
            found = None if bad and chance.random() < 0.7 else work()
            if bad:
                self.after(took_s * chance.random(), lambda: self.tell("disk_failed"))
            elif answer:
                self.after(took_s * chance.random(), lambda: answer(found))

        self.clock.after(took_s * chance.random(), happen)

    # -- links ------------------------------------------------------------------------------------------------------------

    def connect(self, other: Worker) -> None:
        """Knock; the other one answers on a new line, its kernel refuses (on this host at once), or nothing comes back."""
        if other.host is self.host and not other.alive:
            self.tell("connect_failed", other.me.id, True)
            return
        knock = Knock()

        def arrive() -> None:
            if not other.host.on or not self.cluster.network.joined(self.host, other.host):
                return
            if other.alive:
                other.take(answer)
            else:
                self.after(self.cluster.network.latency_s(other.host, self.host), lambda: fail(True))

        def answer() -> None:
            if not knock.over:
                line = Line(self.cluster.network, self, other)
                other.link(self.me.id, line)
                line.send(1, knock)

        def fail(refused: bool) -> None:
            if not knock.over:
                knock.over = True
                self.tell("connect_failed", other.me.id, refused)

        self.clock.after(self.cluster.network.latency_s(self.host, other.host), arrive)
        self.after(CONNECT_S, lambda: fail(False))

    def receive(self, line: Line, end: int, message: Any) -> None:
        if message is None or (isinstance(message, Knock) and message.over):
            line.close(end)
        elif isinstance(message, Knock):
            message.over = True
            self.link(line.peer(end), line)
        else:
            self.tell("heard", line.peer(end), message)

    def link(self, id: str, line: Line) -> None:
        self.lines.setdefault(id, []).append(line)
        self.tell("link_up", id)

    def unlink(self, id: str, line: Line) -> None:
        """The protocol hears of it when it was the last line to that peer."""
        lines = self.lines.get(id, [])
        if line in lines:
            lines.remove(line)
            if not lines:
                self.take(lambda: self.tell("link_down", id))


@dataclass
class Knock:
    """An attempt to connect; over: it was answered, or given up."""

    over: bool = False


# The main thread.


@dataclass
class Ballot:
    """What a member brings into a collective.

    wishes      "join": joiners wait; "drain": it wants out; or the id of one to be evicted
    checkpoint  the newest, as rank 0 of a group finds it
    """

    state: State | None
    micro_batches: range = range(0)
    wishes: frozenset[str] = frozenset()
    checkpoint: State | None = None


class Group:
    """The process group of a generation: who has come, who has gone again, and what was brought into its collectives, in their order."""

    def __init__(self, record: Record) -> None:
        self.record, self.formed = record, False
        self.there: dict[str, Worker] = {}
        self.lost: set[str] = set()
        self.collectives: list[dict[str, Ballot]] = []

    @property
    def workers(self) -> list[Worker]:
        return [self.there[one.id] for one in self.record.members if one.id in self.there]


class Main:
    """The main thread.

    ready    the state after the step for which it has voted, with its whole gradient; it is committed when all have voted
    waits    in a collective
    coming   the collective is complete, and its result on the way to this member
    leaving  what it waits in was cut
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.cluster, self.clock = worker, worker.cluster, worker.clock
        self.state: State | None = None
        self.ready: State | None = None
        self.group: Group | None = None
        self.left: Report | None = None
        self.turn = 0
        self.waits = self.coming = self.leaving = False
        self.slow = self.drains = False
        self.evicts = ""
        self.breaks_up = self.clock.chance.random() < 0.5  # a connection that hangs is found by the hub, not by its time-out

    # -- form -------------------------------------------------------------------------------------------------------------

    def form(self, record: Record) -> None:
        """Into the group of a generation; out again when it does not form in time."""
        self.cluster.promises.form(self, record)
        group = self.group = self.cluster.groups.setdefault(record.token, Group(record))
        self.turn, self.waits, self.coming, self.leaving = 0, False, False, False

        def arrive() -> None:
            group.there[self.worker.me.id] = self.worker
            self.after(FORM_S, lambda: None if group.formed else self.leave("the group did not form"))
            self.cluster.gather(group)

        self.after(self.clock.between(0.001, 0.02), arrive)

    def begin(self) -> None:
        """The group has formed. A step that all have agreed on is committed; then states are compared, and handed to who has none."""
        assert self.group is not None
        record, leads = self.group.record, self.group.record.rank_of(self.worker.me.id) == 0
        if self.state and self.ready and self.state[0] < record.step == self.ready[0]:
            self.commit(self.ready)
        self.ready = None
        self.cluster.promises.begin(self, record)
        if leads and self.state is None and self.worker.host.ills["bad disk"]:
            self.after(0.5, self.begin)
        else:
            self.worker.tell("know", FACTS)
            self.bring(Ballot(self.state, checkpoint=self.cluster.folder.checkpoint if leads else None))

    # -- train ------------------------------------------------------------------------------------------------------------

    def vote(self) -> None:
        """Its micro-batches are done. From here on it holds the whole gradient, though it may never hear what has come of the vote."""
        assert self.group is not None and self.state is not None
        record, me = self.group.record, self.worker.me.id
        rank, size = record.rank_of(me) or 0, len(record.members)
        wishes = {"join"} if rank == 0 and self.worker.protocol.waiting else set()
        wishes |= {"drain"} if self.drains else set()
        wishes |= {self.evicts} if self.evicts in self.group.there else set()
        self.ready = after_step(self.state, range(MICRO_BATCHES))
        self.bring(Ballot(self.state, range(MICRO_BATCHES * rank // size, MICRO_BATCHES * (rank + 1) // size), frozenset(wishes)))

    def bring(self, ballot: Ballot) -> None:
        """Take part in the next collective; whoever comes last completes it."""
        group = self.group
        assert group is not None
        if self.turn == len(group.collectives):
            group.collectives.append({})
        ballots = group.collectives[self.turn]
        ballots[self.worker.me.id] = ballot
        self.waits = True
        if len(ballots) == len(group.record.members):
            for one in group.workers:
                if one.main.group is group and not one.main.leaving:
                    one.main.coming = True
                    one.main.after(self.clock.between(0.002, 0.05), one.main.hear)
        elif group.lost:
            self.suffer()

    def hear(self, late_s: float = 0.0) -> None:
        """The result of the collective reaches this member."""
        group = self.group
        if group is None or not self.coming:
            return
        if any(self.cluster.network.blocked[one.host.name, self.worker.host.name] for one in group.workers):
            hub = next((one for one in group.workers if one.alive and one.main.group is group and one.protocol.leads), None)
            if late_s > BREAK_S and hub and self.breaks_up:
                hub.tell("break_up", "nobody moves, and nobody is to blame")
            if late_s > BREAK_S and not (hub and self.breaks_up):
                self.leave("a connection timed out")
            else:
                self.after(0.2, lambda: self.hear(late_s + 0.2))
            return
        ballots = list(group.collectives[self.turn].values())
        first, self.turn, self.waits, self.coming = self.turn == 0, self.turn + 1, False, False
        states = {one.state for one in ballots if one.state} or {one.checkpoint for one in ballots if one.checkpoint}
        self.state = self.cluster.promises.equal(group.record, states)
        wishes: frozenset[str] = frozenset().union(*(one.wishes for one in ballots))
        if not first:
            self.commit(after_step(self.state, [one for ballot in ballots for one in ballot.micro_batches]))
        for id in sorted(wishes - {"join", "drain"}):
            self.worker.tell("evict", id, "its state differs")
        if not wishes:
            self.after(self.clock.between(0.1, 0.4), self.vote)
        elif not self.leaving:
            self.leave("to let others in" if "join" in wishes else "somebody leaves")

    def commit(self, state: State) -> None:
        """The step counts."""
        assert self.group is not None
        record = self.group.record
        self.cluster.promises.commit(self, record, state)
        self.cluster.note(self.worker.me.id, f"commits {state[0]} in {record.number}")
        self.state, self.ready = state, None
        if record.rank_of(self.worker.me.id) == 0 and state[0] % SAVE_EVERY == 0:
            self.worker.disk(lambda: self.cluster.save(record.number, state))

    # -- leave ------------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """All that waits in the group ends; the thread comes out of it when it comes out."""
        if self.group and not self.leaving:
            self.leaving = True
            self.coming = self.coming and self.clock.chance.random() < 0.5
            self.after(self.clock.between(1, 3) if self.slow else self.clock.between(0.005, 0.05), lambda: self.leave("cut"))

    def suffer(self) -> None:
        """Somebody is lost: the collective fails here, or hangs until it is cut."""
        if self.clock.chance.random() < 0.5:
            self.after(self.clock.between(0.01, 0.05), lambda: self.leave("the collective failed"))

    def leave(self, why: str) -> None:
        """Out of the group, and say so."""
        assert self.group is not None
        self.vanish(quietly=False)
        report = self.left = Report(self.group.record.number, self.state[0] if self.state else -1, self.drains, why)
        self.group = None
        self.cluster.note(self.worker.me.id, report)
        self.worker.tell("left", report)

    def vanish(self, quietly: bool) -> None:
        """The others' connections to this one end, and perhaps with them what was still on its way."""
        group, me = self.group, self.worker.me.id
        if group is None or me in group.lost:
            return
        group.lost.add(me)
        for main in [one.main for one in group.workers if one is not self.worker]:
            if main.group is group and main.waits:
                main.coming = main.coming and self.clock.chance.random() < 0.7
                if not main.coming and not quietly:
                    main.suffer()

    def after(self, delay_s: float, event: Event) -> None:
        """Unless the thread has left the group by then."""
        group = self.group
        self.worker.after(delay_s, lambda: event() if self.group is group else None)


def after_step(state: State, micro_batches: list[int] | range) -> State:
    """The state after one more step, with these micro-batches in its gradient."""
    return state[0] + 1, hash((state, tuple(sorted(micro_batches))))
