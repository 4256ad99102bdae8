"""Who is in, who leads, who proposes: every decision of membership, without a socket, a file or a clock.

Each worker has one `Protocol`. Its member thread (member.py) tells it what happened and at which moment of its own monotonic clock, and
carries out the effects that come back. The simulation in the tests does the same for ten thousand random histories.

    out    not in a generation: a new worker, or one that stands by
    in     in generation `record`: forming its group, or training
    left   its main thread has left the group and said at which step (Report); it waits for the next generation

The *hub* is the first member of the generation that is not gone: the leader, or who would be next. Every member holds a link to the hub
and hears its beat. When the group breaks, everybody leaves it and reports to the hub; once each of the others has reported, has ended or
is silent, the hub proposes the next generation to the log (arbiter.py). Whoever loses follows the winner. Of the sides of a cut network
the larger one proposes first; the other waits as long again, and goes on only if nothing has come into the log until then.

Nothing rests on a message that comes exactly once: at every beat a worker says to each peer what that peer should know of it (`_word`).
And nothing but the log rests on what is only believed: who was silent and is heard of again is there again, and two members that each
take themselves for the hub both propose, of which one wins.

A wish to stop is told with all that. It lifts `least`: those who are there form a generation once more, for a step in whose vote the wish
stands, and save. Where nobody is at work there is nothing to save: the first of those who wait writes down that the run has ended.

Joiners ask all members, who agree on the moment (the vote of a step), leave between two steps and are joined by them. Where nobody is left
of a generation, the new workers gather around the first of them and start from a checkpoint.

Who begins asks without facts: it has no model yet. Once the members are at work (they have facts) such a one is not let in: it is told to
get ready, and asks again as a joiner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lockstep.elastic.generation_log import End, Member, Out, Record
from lockstep.runtime.signals import exit_code

OF_THE_RUN = ("run ", "--")  # how those facts begin that say what was asked for: "run steps", "--steps" of a user's loop


@dataclass(frozen=True)
class Limits:
    """How long to wait, and for how many.

    beat_s      from one beat to the next
    silent_s    after which a peer that says nothing counts as gone
    look_s      from one look at the log to the next while waiting for a record
    gather_s    how long a start waits for all `expected` workers, when there are `least` already
    takeover_s  how long new workers wait for members of the newest generation that neither answer nor show that they live
    hang_s      without a step forward, while nobody is only slow, until the verdict on a hang
    evaluate_s  the same for one that evaluates, however long the others wait for it
    on_hang     then the culprit is left out and the rest goes on ("evict"), the run ends ("end"), or it is only told ("tell")
    expected, least, most   workers: for whom a start waits; below which training waits; that train at once
    unit        workers of a replica, which stand side by side in a generation: a replica is whole, or out
    """

    beat_s: float = 0.5
    silent_s: float = 2.5
    look_s: float = 0.25
    gather_s: float = 30.0
    takeover_s: float = 30.0
    hang_s: float = 10.0
    evaluate_s: float = 1800.0
    on_hang: Literal["evict", "end", "tell"] = "evict"
    expected: int = 1
    least: int = 1
    most: int = 1_000_000
    unit: int = 1

    @property
    def to_stop(self) -> Limits:
        """For a run that is only to save and stop: the smallest that can train will do, one replica."""
        return replace(self, least=self.unit)


@dataclass(frozen=True)
class Report:
    """What a member says when its main thread has left generation `number`.

    step     steps that it has committed, or must commit since all have agreed to; less than 0: it has no state
    leaving  it wants out, as its host is taken away
    lost     other members that it does not reach; the protocol itself finds out
    """

    number: int
    step: int
    leaving: bool = False
    why: str = ""
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Joiner:
    """A worker that is ready to join, what must be equal on all (the numerics fingerprint), and which members it reaches."""

    member: Member
    facts: Mapping[str, str]
    reaches: frozenset[str] = frozenset()


# Effects: what the member thread is to do.


@dataclass(frozen=True)
class Connect:
    """Open a link; `link_up` or `connect_failed` follows."""

    member: Member


@dataclass(frozen=True)
class Send:
    """Send a message to a peer that is linked."""

    id: str
    message: dict[str, Any]


@dataclass(frozen=True)
class Look:
    """Read the log for a record above `known`, the waiting room, and who shows that it lives; `looked` or `disk_failed` follows."""

    known: int


@dataclass(frozen=True)
class Propose:
    """Propose a record, its store still to be filled in; `proposed` or `disk_failed` follows."""

    record: Record


@dataclass(frozen=True)
class Cut:
    """The group is broken: end all that waits in it."""

    why: str


@dataclass(frozen=True)
class Form:
    """This worker is in `record`: its main thread may form the group."""

    record: Record


@dataclass(frozen=True)
class Prepare:
    """Others have begun without this worker: it builds its model, and then asks with its facts."""


@dataclass(frozen=True)
class Leave:
    """This worker is out for good: left out of a generation (`fenced`), or refused, or the run has ended."""

    why: str
    fenced: bool = False
    end: End | None = None


@dataclass(frozen=True)
class Say:
    """A line for people."""

    text: str


Effect = Connect | Send | Look | Propose | Cut | Form | Prepare | Leave | Say


@dataclass(frozen=True)
class View:
    """All on which a hub decides.

    dead     id -> why a member counts as gone
    """

    record: Record
    reports: Mapping[str, Report]
    dead: Mapping[str, str]
    joiners: Sequence[Joiner]


def next_generation(view: View, limits: Limits, token: str) -> tuple[Record | None, str]:
    """(the record to propose, the reason), or (None, whom the hub waits for)."""
    members = view.record.members
    missing = [one for one in members if one.id not in view.reports and one.id not in view.dead]
    if missing:
        return None, f"waiting for {names(missing)} to leave generation {view.record.number}"
    there = [one for one in members if one.id not in view.dead]
    out = [Out(one.id, view.dead[one.id]) for one in members if one.id in view.dead]
    leave = [one for one in there if view.reports[one.id].leaving]
    if len(leave) < len(there):
        out += [Out(one.id, view.reports[one.id].why or "it leaves") for one in leave]
        there = [one for one in there if one not in leave]
    elif not newcomers(view.joiners, there, limits):
        return None, "nobody would stay"  # else the last ones stay until they have handed over what they have
    stay: list[Member] = []
    for one in there:
        apart = next((other for other in stay if one.id in view.reports[other.id].lost and other.id in view.reports[one.id].lost), None)
        if apart:
            out.append(Out(one.id, f"it and {names([apart])} do not reach each other"))
        else:
            stay.append(one)
    stay, torn = whole_replicas(members, stay, limits.unit)
    out += [Out(one.id, "its replica is no longer whole") for one in torn]
    if not stay and torn:
        reason = "no replica is whole; from the newest checkpoint"
        return Record(view.record.number + 1, token, (), "", view.record.step, reason, tuple(out)), reason
    new = newcomers(view.joiners, stay, limits)
    if len(stay) + len(new) < limits.least:
        return None, f"{len(stay) + len(new)} workers are there, training waits for {limits.least}"
    causes = [f"{one.id.rpartition('/')[0]}: {one.why}" for one in out] + ([f"{names(new)} joined"] if new else [])
    reason = "; ".join(causes) or next((report.why for report in view.reports.values() if report.why), "formed anew")
    step = max(view.reports[one.id].step for one in stay)
    return Record(view.record.number + 1, token, (*stay, *new), "", step, reason, tuple(out)), reason


def newcomers(joiners: Iterable[Joiner], stay: Sequence[Member], limits: Limits) -> list[Member]:
    """Who can be let in beside those who stay: who reaches them all, as long as there is room. Whole replicas, neighbours side by side."""
    fit = [one.member for one in joiners if all(other.id in one.reaches for other in stay)]
    return whole(fit if limits.unit == 1 else sorted(fit, key=lambda one: one.place), max(0, limits.most - len(stay)), limits.unit)


def whole(some: Sequence[Member], most: int, unit: int) -> list[Member]:
    """The first of them, at most `most`, as many as make whole replicas."""
    return list(some[: min(len(some), most) // unit * unit])


def whole_replicas(members: Sequence[Member], stay: Sequence[Member], unit: int) -> tuple[list[Member], list[Member]]:
    """(those of `stay` whose replica stays whole, the others). A replica is `unit` members side by side."""
    if unit == 1:
        return list(stay), []
    replicas = [members[first : first + unit] for first in range(0, len(members), unit)]
    kept = [one for replica in replicas if all(one in stay for one in replica) for one in replica]
    return kept, [one for one in stay if one not in kept]


def gathering(came: Sequence[Member], limits: Limits) -> str:
    """For whom a start waits, in words."""
    there = "1 worker is there" if len(came) == 1 else f"{len(came)} workers are there"
    if len(came) < limits.least:
        return f"{there} ({names(came)}); training begins with {limits.least}"
    return f"{there} ({names(came)}), {limits.expected} are expected; training begins without the others after {limits.gather_s:g} s"


def names(members: Sequence[Member]) -> str:
    """ "a/0, b/1"."""
    return ", ".join(f"{one.host}/{one.slot}" for one in members)


def differing(facts: Mapping[str, str], mine: Mapping[str, str]) -> str:
    """What differs, in words; "" when nothing does."""

    def shown(value: str | None) -> str:
        return "not set" if value is None else repr(value)

    keys = [*mine, *[key for key in facts if key not in mine]]
    return "; ".join(
        f"{key} is {shown(facts.get(key))} there and {shown(mine.get(key))} here" for key in keys if facts.get(key) != mine.get(key)
    )


def refusal(facts: Mapping[str, str], mine: Mapping[str, str]) -> str:
    """Why a worker with these facts cannot join; "" when it can."""
    told, known = ({key: value for key, value in some.items() if key.startswith(OF_THE_RUN)} for some in (facts, mine))
    if wrong := differing(told, known):
        return f"it was started with another run: {wrong}"
    wrong = differing(facts, mine)
    return f"its numbers would have other bits: {wrong}" if wrong else ""


@dataclass
class Protocol:
    """The state of one worker's membership. Every method that tells it something takes the moment and returns the effects, in order.

    tokens   a source of random tokens: called for each proposal
    after    the newest generation when this start began: that the run ended up to there is an old story
    joins    it came while others were at work, and begins with nobody else
    over     why the generation has come to its end, while nobody has proposed the next; "" while it lives
    doubts   it ended as nobody moved and nobody was to blame: perhaps some of its members do not reach each other
    stops    the signal with which the run is to stop, as far as this worker was told; "": it goes on
    reports  what members have said that have left the generation
    joiners  who wants in, as far as this worker was told
    dead     id -> why it is gone for good: it has ended, or was evicted
    heard_s  id -> when it was last heard of, of those of whom this worker should hear
    links    who is linked
    room     who else has been in no generation, from the run folder; some may have ended
    """

    me: Member
    limits: Limits
    tokens: Callable[[], str]
    now_s: float
    after: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    record: Record | None = None
    phase: str = "out"
    asked: bool = False
    joins: bool = False
    over: str = ""
    doubts: bool = False
    stops: str = ""
    reports: dict[str, Report] = field(default_factory=dict)
    joiners: dict[str, Joiner] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)
    links: set[str] = field(default_factory=set)
    room: tuple[Member, ...] = ()
    _told: dict[str, dict[str, Any]] = field(default_factory=dict)  # what each peer was told last
    _try_s: dict[str, float] = field(default_factory=dict)  # when a link may be tried again; never, while one is being tried
    _has_looked: bool = False  # it knows what the log held when it came
    _looked_s: float = -math.inf
    _beat_s: float = -math.inf
    _gathering_s: float | None = None
    _proposed: int = 0  # the number of a record that is on its way to the log
    _retry_s: float = -math.inf  # when the disk may be asked again for what it did not do
    _waits: str = ""

    # -- who is who ---------------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The newest generation that this worker knows; 0: none."""
        return self.record.number if self.record else 0

    @property
    def others(self) -> list[Member]:
        """The members of the generation, less this one."""
        return [one for one in self.record.members if one.id != self.me.id] if self.record else []

    def hub(self) -> Member | None:
        """The first member of the generation that is not gone; of those that stay, if any does."""
        leaving = {id for id, report in self.reports.items() if report.leaving}
        stay_first = sorted(self._members(), key=lambda one: one.id in leaving)
        return next((one for one in stay_first if not self._gone(one.id)), None)

    @property
    def leads(self) -> bool:
        """Whether this worker is its generation's hub."""
        return self.phase in ("in", "left") and self.hub() == self.me

    @property
    def waiting(self) -> int:
        """Joiners who could be let in."""
        if not self.leads or not self.record:
            return 0
        return len(newcomers(self._welcome(), [one for one in self.record.members if not self._gone(one.id)], self.limits))

    @property
    def signs(self) -> bool:
        """Whether this worker is to show in the run folder, at each look, that it lives: so nobody who cannot reach it takes over."""
        return self.phase == "in" and self.leads

    # -- what the main thread says --------------------------------------------------------------------------------------

    def ask(self, now_s: float, facts: Mapping[str, str], *, joins: bool = False) -> list[Effect]:
        """The worker is warm and wants in. `joins`: to those that are at work, and with nobody else."""
        self.asked, self.facts, self.joins = True, facts, joins
        self._looked_s = now_s
        return [Look(0)]

    def know(self, facts: Mapping[str, str], now_s: float) -> list[Effect]:
        """What must be equal on all is known: from here on this worker is at work. Who wants in is looked at again."""
        self.facts, came, self.joiners = facts, list(self.joiners.values()), {}
        return [effect for one in came for effect in self._take_joiner(one, now_s)]

    def left(self, report: Report, now_s: float) -> list[Effect]:
        """The main thread has left the group."""
        if self.phase != "in" or report.number != self.number:
            return []
        self.phase = "left"
        self.reports[self.me.id] = report
        self.over = self.over or report.why or "left"
        return self._move_on(now_s)

    def evict(self, id: str, why: str, now_s: float) -> list[Effect]:
        """Go on without a member that hangs, or whose state differs."""
        if id == self.me.id:
            return self._leave(why)
        self.dead.setdefault(id, why)
        return self._move_on(now_s)

    def break_up(self, why: str, now_s: float) -> list[Effect]:
        """Form the group anew: it does not move, and no member is to blame. All that reach each other stay."""
        self.doubts = True
        return [*self._end_generation(why), *self._move_on(now_s)]

    def stop(self, name: str, now_s: float) -> list[Effect]:
        """The run is to save and stop, as on the signal `name`."""
        self.stops = self.stops or name
        return self._move_on(now_s)

    def close_doors(self) -> list[Effect]:
        """Let nobody join any more: the run is about to end."""
        self.limits = replace(self.limits, most=0)
        return []

    # -- what the network says ------------------------------------------------------------------------------------------

    def link_up(self, id: str, now_s: float) -> list[Effect]:
        """There is a link to a peer, whoever opened it."""
        self.links.add(id)
        self.heard_s[id] = now_s
        self._told.pop(id, None)
        self._try_s.pop(id, None)
        return self._move_on(now_s)

    def link_down(self, id: str, now_s: float) -> list[Effect]:
        """The last link to a peer has closed. Has it ended? One more try tells."""
        self.links.discard(id)
        self.joiners.pop(id, None)
        self._try_s.pop(id, None)
        return [*self._connect([one for one in self._heeded() if one.id == id], now_s), *self._move_on(now_s)]

    def connect_failed(self, id: str, refused: bool, now_s: float) -> list[Effect]:
        """A link could not be opened. `refused`: the host answers, and nothing listens there: the process has ended."""
        self._try_s[id] = now_s + self.limits.look_s
        if refused:
            self.dead.setdefault(id, "it has ended")
        return self._move_on(now_s)

    def heard(self, id: str, message: Mapping[str, Any], now_s: float) -> list[Effect]:
        """A message of a peer that is linked."""
        self.heard_s[id] = now_s
        kind, number = message["kind"], int(message.get("number", self.number))
        if self.phase == "gone" or kind == "beat":
            return []
        self.stops = self.stops or str(message.get("stops", ""))
        if kind == "record":
            return self._follow(Record.from_json(message["record"]), now_s)
        if kind == "prepare":
            return self._prepare()
        if kind == "refused":
            self.phase = "gone"
            return [Leave(str(message["why"]))]
        if number > self.number:
            return [Look(self.number)]
        if number < self.number and self.record:
            return [Send(id, {"kind": "record", "record": self.record.to_json()})]
        if kind == "join":
            return self._take_joiner(
                Joiner(Member.from_json(message["member"]), dict(message["facts"]), frozenset(message["reaches"])), now_s
            )
        if kind not in ("left", "over") or self.phase == "out":
            return []
        if self.me.id in message["dead"]:
            return self._leave(str(message["dead"][self.me.id]))
        self.dead = {**message["dead"], **self.dead}
        self.doubts = self.doubts or bool(message["doubts"])
        if kind == "left":
            self.reports[id] = Report(number, int(message["step"]), bool(message["leaving"]), str(message["why"]), tuple(message["lost"]))
        return [*self._end_generation(str(message["why"]) or f"{id} left"), *self._move_on(now_s)]

    # -- what the disk says ---------------------------------------------------------------------------------------------

    def looked(self, newest: Record | None, room: Sequence[Member], now_s: float, alive: Iterable[str] = ()) -> list[Effect]:
        """The log was read: its newest record, if above what was known, and who waits in the run folder.

        alive  who has shown there that it lives (`signs`) since this worker looked last
        """
        self._has_looked = True
        self.room = tuple(one for one in room if one.id != self.me.id)
        if self.phase == "out" and self.record:
            self.heard_s |= {id: now_s for id in alive if self.record.rank_of(id) is not None}
        return self._follow(newest, now_s) if newest else self._move_on(now_s)

    def proposed(self, winner: Record, now_s: float) -> list[Effect]:
        """The log has a record of the number that was proposed: this worker's, or another's."""
        self._proposed = 0
        return self._follow(winner, now_s)

    def disk_failed(self, now_s: float) -> list[Effect]:
        """The log could not be read or written; it is tried again."""
        self._proposed, self._retry_s = 0, now_s + self.limits.look_s
        return []

    # -- what the clock says --------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Effect]:
        """Time has passed. To be called at least once a beat; more often does no harm."""
        passed_s = now_s - self.now_s
        if self.phase == "gone" or passed_s < self.limits.beat_s / 10:
            return []
        stood_s = max(0.0, passed_s - self.limits.beat_s)  # this process was stopped: nobody else has been silent
        self.now_s = now_s
        self.heard_s = {one.id: min(now_s, self.heard_s.get(one.id, now_s) + stood_s) for one in self._heeded()}
        self.joiners = {id: one for id, one in self.joiners.items() if not self._is_silent(id)}
        effects: list[Effect] = []
        if now_s - self._beat_s >= self.limits.beat_s:
            self._beat_s, self._told = now_s, {}
        pause_s = self.limits.look_s if self.phase != "in" else 4 * self.limits.look_s
        if now_s - self._looked_s >= pause_s and (self.phase != "out" or self.asked):
            self._looked_s = now_s
            effects.append(Look(self.number))
        return [*effects, *self._move_on(now_s)]

    # -- who is there ---------------------------------------------------------------------------------------------------

    def _is_silent(self, id: str) -> bool:
        return self.now_s - self.heard_s.get(id, self.now_s) > self.limits.silent_s

    def _gone(self, id: str) -> str:
        """Why a worker counts as gone: for good, or until it is heard of; "" when it does not."""
        return self.dead.get(id) or (f"silent for {self.limits.silent_s:g} s" if self._is_silent(id) else "")

    def _late(self, id: str) -> bool:
        """Whether it is time to try the next one, too."""
        return id in self.dead or (id not in self.links and self.now_s - self.heard_s.get(id, self.now_s) > self.limits.beat_s)

    def _peers(self) -> list[Member]:
        """With whom this worker wants a link: those who lead, or would if they were heard of."""
        if self.phase == "out":
            row = self._row() if not self._seats() else []
            wanted = [*self._members(), *row[: 1 + sum(self._late(one.id) for one in row)]] if self.asked else []
        elif self._fruitless or (self.leads and self.over):
            wanted = self.others
        else:
            hub, members = self.hub(), self._members()
            wanted = members[: members.index(hub) + 1] if hub else []
        return [one for one in wanted if one.id != self.me.id and one.id not in self.dead]

    def _heeded(self) -> list[Member]:
        """Of whom this worker should hear: its peers, those who wait for it, and as hub everybody."""
        waiting = [one.member for one in self.joiners.values()]
        return [one for one in (*self._peers(), *waiting, *(self.others if self.leads else ())) if one.id not in self.dead]

    def _members(self) -> list[Member]:
        return list(self.record.members) if self.record and not self.record.end else []

    def _seats(self) -> list[Member]:
        """Members of the newest generation that may be at work, to one who is in none."""
        since_s = self.now_s - self.limits.takeover_s
        return [one for one in self._members() if one.id not in self.dead and self.heard_s.get(one.id, self.now_s) >= since_s]

    def _row(self) -> list[Member]:
        """Those in no generation, in their order, down to this worker: they gather around the first that is not gone."""
        members, mine = self._members(), self.me.place
        return sorted((one for one in {self.me, *self.room} if one not in members and one.place <= mine), key=lambda one: one.place)

    def _first(self) -> Member:
        return next(one for one in self._row() if not self._gone(one.id))

    @property
    def _fruitless(self) -> bool:
        """Whether this worker has left a generation that brought no step, or that stood still: perhaps some of its members do not
        reach each other."""
        return self._brought(0)

    def _brought(self, most: int) -> bool:
        """Whether this worker has left a generation that brought `most` steps or fewer, or that stood still."""
        return (
            self.phase == "left" and self.record is not None and (self.doubts or self.reports[self.me.id].step <= self.record.step + most)
        )

    @property
    def _outnumbered(self) -> bool:
        """Whether those who are silent may be the larger side of a cut network, or one as large that has the leader: then they have as
        long again to come into the log first. They may find this side silent one by one, so they are given a time for each of it; and one
        more where some of them, who may be a step behind, have to find out whom they reach. Between two processes of one host no network is
        cut."""
        there = [one for one in self._members() if one.id not in self.dead]
        silent = [one for one in there if self._is_silent(one.id) and one.host != self.me.host]
        if 2 * len(silent) + (there[0] in silent) <= len(there):
            return False
        longest_s = max(self.now_s - self.heard_s[one.id] for one in silent)
        return longest_s <= (1 + self._brought(1) + len(there) - len(silent)) * self.limits.silent_s

    def _welcome(self) -> list[Joiner]:
        """Who wants in and was heard of just now. Where a member falls silent a joiner beside it does too, and is found silent later."""
        return [one for id, one in self.joiners.items() if self.now_s - self.heard_s.get(id, self.now_s) <= 2 * self.limits.beat_s]

    @property
    def _ready(self) -> bool:
        """Whether it has left, and knows what it has to report."""
        return self.phase == "left" and (not self._fruitless or self._knows_all(self.others))

    def _knows_all(self, members: Sequence[Member]) -> bool:
        """Whether it knows of each of `members` if it reaches it."""
        return all(one.id in self.links or one.id == self.me.id or self._gone(one.id) for one in members)

    # -- what is due ----------------------------------------------------------------------------------------------------

    def _move_on(self, now_s: float) -> list[Effect]:
        """Whatever has happened: what is due now."""
        if self.phase == "gone":
            return []
        effects: list[Effect] = []
        for one in self.others:
            if why := self._gone(one.id):
                effects += self._end_generation(f"{names([one])}: {why}")
        effects += self._connect(self._peers(), now_s)
        effects += self._gather(now_s) if self.phase == "out" else self._propose(now_s)
        return [*effects, *self._tell()]

    def _end_generation(self, why: str) -> list[Effect]:
        """Leave the group; the others are told: an error in one member does not reach all by itself."""
        if self.phase != "in" or self.over:
            return []
        self.over = why
        return [Cut(why)]

    def _leave(self, why: str) -> list[Effect]:
        """The others go on without this worker."""
        effects = self._end_generation(why)
        self.phase = "gone"
        return [*effects, Leave(f"the others go on without this worker: {why}", fenced=True)]

    def _connect(self, members: Sequence[Member], now_s: float) -> list[Effect]:
        """Open links to those that have none."""
        new = [one for one in members if one.id not in self.links and self._try_s.get(one.id, now_s) <= now_s]
        self._try_s |= {one.id: math.inf for one in new}
        return [Connect(one) for one in new]

    def _tell(self) -> list[Effect]:
        """Tell each peer what it should know, when that has changed; and at each beat, when nothing counts as told."""
        words = {id: self._word(id) for id in sorted(self.links)}
        told, self._told = self._told, words
        return [Send(id, word) for id, word in words.items() if told.get(id) != word]

    def _word(self, id: str) -> dict[str, Any]:
        """What a peer should know of this worker: that it wants in, that it has left, that all is over, or just that it lives."""
        stops = {"stops": self.stops} if self.stops else {}
        if self.phase == "out" and self.asked and any(one.id == id for one in self._asked()):
            reaches = sorted(one.id for one in self._seats() if one.id in self.links)
            return {"kind": "join", "number": self.number, "member": vars(self.me), "facts": dict(self.facts), "reaches": reaches, **stops}
        if not self.over or all(one.id != id for one in self.others):
            return {"kind": "beat"}
        dead = {one.id: self.dead[one.id] for one in self.others if one.id in self.dead}
        told, hub = {"dead": dead, "doubts": self.doubts, **stops}, self.hub()
        if self._ready and ((hub and hub.id == id) or self.reports[self.me.id].leaving):
            lost = [one.id for one in self.others if self._is_silent(one.id)]
            return {"kind": "left", **vars(self.reports[self.me.id]), "lost": lost, **told}
        return {"kind": "over", "number": self.number, "why": self.over, **told}

    def _asked(self) -> list[Member]:
        """Whom a worker asks to be let in: all at work, when it knows which of them it reaches; else the one around which all gather."""
        seats = self._seats()
        return (seats if self._knows_all(seats) else []) if seats else [self._first()]

    def _may_propose(self, now_s: float) -> bool:
        return self._proposed <= self.number and now_s >= self._retry_s

    def _propose(self, now_s: float) -> list[Effect]:
        """The hub proposes the next generation as soon as it has heard of all."""
        if self.record is None or not self.leads or not self._ready or self._outnumbered or not self._may_propose(now_s):
            return []
        gone = {one.id: why for one in self.others if (why := self._gone(one.id))}
        limits = self.limits.to_stop if self.stops else self.limits
        record, reason = next_generation(View(self.record, self.reports, gone, self._welcome()), limits, self.tokens())
        if record is None:
            return [] if reason.startswith("waiting") else self._say(reason)
        self._proposed = record.number
        return [Propose(record)]

    def _gather(self, now_s: float) -> list[Effect]:
        """Where nobody is at work, the first of those who wait proposes a generation of them all."""
        if not self.asked or not self._has_looked:
            return []
        seats = self._seats()
        if self.joins and self.record and not seats:
            self.phase = "gone"
            return [Leave("nobody is left to join; this worker starts anew, with the others", fenced=True)]
        if seats or self._first() != self.me:
            self._gathering_s = None
            return []
        if self.stops:
            return self._end_before_it_begins() if self._may_propose(now_s) else []
        self._gathering_s = now_s if self._gathering_s is None else self._gathering_s
        late = now_s - self._gathering_s >= self.limits.gather_s
        wanted = self.limits.least if late else max(self.limits.expected, self.limits.least)
        came = [self.me, *sorted((one.member for one in self.joiners.values()), key=lambda one: one.place)]
        if len(came) < wanted or not self._may_propose(now_s):
            return self._say(gathering(came, self.limits)) if now_s - self._gathering_s >= self.limits.silent_s else []
        out = tuple(Out(one.id, self.dead.get(one.id, f"no answer for {self.limits.takeover_s:g} s")) for one in self._members())
        reason = (
            "start" if self.record is None or self.record.end else f"nobody of generation {self.number} is left; from the newest checkpoint"
        )
        members = tuple(whole(came, self.limits.most, self.limits.unit))
        self._proposed = self.number + 1 if members else self._proposed
        return [Propose(Record(self.number + 1, self.tokens(), members, "", 0, reason, out))] if members else []

    def _say(self, text: str) -> list[Effect]:
        """Say for what this worker waits, when that has changed."""
        said, self._waits = self._waits, text
        return [Say(text)] if text != said else []

    def _end_before_it_begins(self) -> list[Effect]:
        """Nobody is at work, so there is nothing to save: write down that the run has ended."""
        self._proposed, step = self.number + 1, self.record.step if self.record else 0
        reason = f"stopped by {self.stops} while its workers waited to begin"
        return [Propose(Record(self._proposed, self.tokens(), (), "", step, reason, end=End(exit_code(self.stops), reason)))]

    def _take_joiner(self, joiner: Joiner, now_s: float) -> list[Effect]:
        """Somebody wants in."""
        id = joiner.member.id
        if self.facts and self.phase in ("in", "left") and not joiner.facts:
            return [Send(id, {"kind": "prepare"})]
        if self.facts and joiner.facts and (why := refusal(joiner.facts, self.facts)):
            return [Send(id, {"kind": "refused", "why": f"{why} (there: {names([joiner.member])}, here: {names([self.me])})"})]
        self.joiners[id] = joiner
        return self._move_on(now_s)

    def _prepare(self) -> list[Effect]:
        """Those whom this worker has asked are at work: it stops asking, until it is warm."""
        if self.phase != "out" or not self.asked or self.facts:
            return []
        self.asked, self._gathering_s = False, None
        return [Prepare()]

    def _follow(self, record: Record, now_s: float) -> list[Effect]:
        """A newer record: in it, or out."""
        if record.number <= self.number:
            return self._move_on(now_s)
        was_in = self.phase in ("in", "left")
        effects = self._end_generation("a newer generation exists")
        self.record, self.over, self.doubts, self.reports = record, "", False, {}
        self._gathering_s, self._waits = None, ""
        self.joiners = {id: one for id, one in self.joiners.items() if record.rank_of(id) is None}
        self.heard_s = {id: heard_s for id, heard_s in self.heard_s.items() if id in self.joiners}
        message = {"kind": "record", "record": record.to_json()}
        effects += [Send(id, message) for id in sorted(self.links)]
        if record.end and (was_in or record.number > self.after):
            self.phase = "gone"
            return [*effects, Leave("the run has ended", end=record.end)]
        if record.rank_of(self.me.id) is not None:
            self.phase = "in"
            effects.append(Form(record))
        elif was_in:
            return [*effects, *self._leave(next((one.why for one in record.out if one.id == self.me.id), "it was not there"))]
        return [*effects, *self._move_on(now_s)]
