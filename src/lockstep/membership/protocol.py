"""Who is in, who leads, who proposes: every decision of membership, without a socket, a file or a clock.

Each worker has one `Protocol`. Its member thread (member.py) tells it what happened and at which moment of its own monotonic clock, and
carries out the effects that come back. The simulation in the tests does the same for ten thousand random histories.

    out    not in a generation: a new worker, or one that stands by
    in     in generation `record`: forming its group, or training
    left   its main thread has left the group and said at which step (Report); it waits for the next generation

The *hub* is the first member of the generation that is not known to be gone: the leader, or who would be next. Every member holds a link
to the hub and hears its beat. When the group breaks, everybody leaves it and reports to the hub; once each of the others has reported,
has ended or is silent, the hub proposes the next generation to the log (arbiter.py). Whoever loses follows the winner.

Joiners ask the hub, too; the members agree on the moment (the vote of a step), leave between two steps and are joined by them. Where
nobody is left of a generation, the new workers gather around the first of them and start from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.membership.arbiter import End, Member, Out, Record


@dataclass(frozen=True)
class Limits:
    """How long to wait, and for how many.

    beat_s      from one beat to the next
    silent_s    after which a peer that says nothing counts as gone
    look_s      from one look at the log to the next while waiting for a record
    gather_s    how long a start waits for all `expected` workers, when there are `least` already
    takeover_s  how long new workers wait for members of the newest generation that neither answer nor are known to have ended
    expected, least, most   workers: for whom a start waits; below which training waits; that train at once
    """

    beat_s: float = 0.5
    silent_s: float = 2.5
    look_s: float = 0.25
    gather_s: float = 30.0
    takeover_s: float = 30.0
    expected: int = 1
    least: int = 1
    most: int = 1_000_000


@dataclass(frozen=True)
class Report:
    """What a member says when its main thread has left generation `number`.

    step     steps that it has committed, or must commit since all have agreed to
    leaving  it wants out, as its host is taken away
    """

    number: int
    step: int
    leaving: bool = False
    why: str = ""


@dataclass(frozen=True)
class Joiner:
    """A worker that is ready to join, and what must be equal on all (the numerics fingerprint)."""

    member: Member
    facts: Mapping[str, str]


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
    """Read the log for a record above `known`, and the waiting room; `looked` or `disk_failed` follows."""

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
class Leave:
    """This worker is out for good: left out of a generation (`fenced`), or refused, or the run has ended."""

    why: str
    fenced: bool = False
    end: End | None = None


@dataclass(frozen=True)
class Say:
    """A line for people."""

    text: str


Effect = Connect | Send | Look | Propose | Cut | Form | Leave | Say


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
    stay = [one for one in members if one.id in view.reports and one.id not in view.dead and not view.reports[one.id].leaving]
    if not stay:
        return None, "nobody would stay"
    new = [one.member for one in view.joiners][: max(0, limits.most - len(stay))]
    if len(stay) + len(new) < limits.least:
        return None, f"{len(stay) + len(new)} workers are there, training waits for {limits.least}"
    out = [Out(one.id, view.dead.get(one.id) or view.reports[one.id].why or "it leaves") for one in members if one not in stay]
    reason = "; ".join([f"{one.id.rpartition('/')[0]}: {one.why}" for one in out] + ([f"{names(new)} joined"] if new else [])) or next(
        (report.why for report in view.reports.values() if report.why), "formed anew"
    )
    step = max(view.reports[one.id].step for one in stay)
    return Record(view.record.number + 1, token, tuple(stay + new), "", step, reason, tuple(out)), reason


def names(members: Sequence[Member]) -> str:
    """ "a/0, b/1"."""
    return ", ".join(f"{one.host}/{one.slot}" for one in members)


def differing(facts: Mapping[str, str], mine: Mapping[str, str]) -> str:
    """What differs, in words; "" when nothing does."""
    return "; ".join(f"{key} is {facts.get(key)!r} there and {mine[key]!r} here" for key in mine if facts.get(key) != mine[key])


@dataclass
class Protocol:
    """The state of one worker's membership. Every method that tells it something takes the moment and returns the effects, in order.

    tokens  a source of random tokens: called for each proposal
    after   the newest generation when this start began: that the run ended up to there is an old story
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
    over: str = ""  # why the generation has come to its end, while nobody has proposed the next
    reports: dict[str, Report] = field(default_factory=dict)
    joiners: dict[str, Joiner] = field(default_factory=dict)
    dead: dict[str, str] = field(default_factory=dict)
    heard_s: dict[str, float] = field(default_factory=dict)  # when a peer was last heard of, or began to be listened for
    links: set[str] = field(default_factory=set)
    room: tuple[Member, ...] = ()  # others that are in no generation, from the run folder
    _tried_s: dict[str, float] = field(default_factory=dict)
    _looked_s: float = -1e9
    _beat_s: float = -1e9
    _gathering_s: float | None = None
    _proposed: int = 0
    _waits: str = ""

    # -- who is who ---------------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The newest generation that this worker knows; 0: none."""
        return self.record.number if self.record else 0

    def hub(self) -> Member | None:
        """The first member of the generation that is not known to be gone."""
        members = self.record.members if self.record else ()
        return next((one for one in members if one.id not in self.dead), None)

    @property
    def leads(self) -> bool:
        """Whether this worker is its generation's hub."""
        hub = self.hub()
        return self.phase in ("in", "left") and hub is not None and hub.id == self.me.id

    @property
    def others(self) -> list[Member]:
        """The members of the generation, less this one."""
        return [one for one in self.record.members if one.id != self.me.id] if self.record else []

    @property
    def waiting(self) -> int:
        """Joiners for whom there is room."""
        room = self.limits.most - (len(self.record.members) if self.record else 0)
        return max(0, min(len(self.joiners), room)) if self.leads else 0

    # -- what the main thread says --------------------------------------------------------------------------------------

    def ask(self, now_s: float, facts: Mapping[str, str], *, joins: bool = False) -> list[Effect]:
        """The worker is warm and wants in. `joins`: to those that are at work, and with nobody else."""
        self.asked, self.facts, self.joins = True, facts, joins
        self._looked_s = now_s
        return [Look(0)]

    def left(self, report: Report, now_s: float) -> list[Effect]:
        """The main thread has left the group."""
        if self.phase != "in" or report.number != self.number:
            return []
        self.phase = "left"
        self.reports[self.me.id] = report
        return [*self._end_generation(report.why or "left", now_s), *self._report(now_s)]

    def evict(self, id: str, why: str, now_s: float) -> list[Effect]:
        """Go on without a member that hangs, or whose state differs."""
        self.dead.setdefault(id, why)
        return [*self._end_generation(why, now_s), *self._move_on(now_s)]

    def close_doors(self) -> list[Effect]:
        """Let nobody join any more: the run is about to end."""
        self.limits = replace(self.limits, most=0)
        return []

    # -- what the network says ------------------------------------------------------------------------------------------

    def link_up(self, id: str, now_s: float) -> list[Effect]:
        """There is a link to a peer, whoever opened it."""
        self.links.add(id)
        self.heard_s[id] = now_s
        effects: list[Effect] = []
        if self.record and self.phase != "out" and self.over and any(id == one.id for one in self.others):
            effects.append(Send(id, {"kind": "over", "number": self.number, "why": self.over}))
        return [*effects, *self._introduce(id, now_s)]

    def link_down(self, id: str, now_s: float) -> list[Effect]:
        """The last link to a peer has closed. Has it ended? One more try tells."""
        self.links.discard(id)
        self.joiners.pop(id, None)
        member = self._member(id)
        if member is None or self.phase == "gone":
            return []
        if self.phase == "out" or self.leads or self._is_hub(id):
            self._tried_s[id] = now_s
            return [Connect(member)]
        return []

    def connect_failed(self, id: str, refused: bool, now_s: float) -> list[Effect]:
        """A link could not be opened. `refused`: the host answers, and nothing listens there: the process has ended."""
        self.heard_s.setdefault(id, now_s)
        if not refused or self.phase == "gone":
            return []
        was_hub = self._is_hub(id)
        self.dead.setdefault(id, "it has ended")
        effects: list[Effect] = []
        if self.phase == "in" and any(id == one.id for one in self.others) and (was_hub or self.leads):
            effects += self._end_generation(f"{id.rpartition('/')[0]} has ended", now_s)
        return [*effects, *self._move_on(now_s)]

    def heard(self, id: str, message: Mapping[str, Any], now_s: float) -> list[Effect]:
        """A message of a peer that is linked."""
        self.heard_s[id] = now_s
        kind, number = message["kind"], int(message.get("number", 0))
        if kind == "record":
            return self._follow(Record.from_json(message["record"]), now_s)
        if kind == "join":
            return self._take_joiner(Joiner(Member(**message["member"]), dict(message["facts"])), now_s)
        if kind == "go_to":
            return self._connect(Member(**message["member"]), now_s)
        if kind == "refused":
            self.phase = "gone"
            return [Leave(str(message["why"]))]
        if kind not in ("left", "over"):
            return []
        if number < self.number and self.record:
            return [Send(id, {"kind": "record", "record": self.record.to_json()})]
        if number > self.number or self.phase not in ("in", "left"):
            return [Look(self.number)]
        if kind == "left":
            self.reports[id] = Report(number, int(message["step"]), bool(message["leaving"]), str(message["why"]))
        return [*self._end_generation(str(message["why"]) or f"{id} left", now_s), *self._move_on(now_s)]

    # -- what the disk says ---------------------------------------------------------------------------------------------

    def looked(self, newest: Record | None, room: Sequence[Member], now_s: float) -> list[Effect]:
        """The log was read: its newest record, if above what was known, and who waits in the run folder."""
        self.room = tuple(one for one in room if one.id != self.me.id)
        if newest and newest.number > self.number:
            return self._follow(newest, now_s)
        return self._move_on(now_s)

    def proposed(self, winner: Record, now_s: float) -> list[Effect]:
        """The log has a record of the number that was proposed: this worker's, or another's."""
        self._proposed = 0
        return self._follow(winner, now_s)

    def disk_failed(self, now_s: float) -> list[Effect]:
        """The log could not be read or written; it is tried again."""
        self._proposed = 0
        return []

    # -- what the clock says --------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[Effect]:
        """Time has passed."""
        if self.phase == "gone":
            return []
        effects: list[Effect] = []
        if now_s - self.now_s > self.limits.silent_s:  # this process was stopped: nobody else has been silent
            self.heard_s = dict.fromkeys(self.heard_s, now_s)
            effects.append(Look(self.number))
        self.now_s = now_s
        if now_s - self._beat_s >= self.limits.beat_s:
            self._beat_s = now_s
            effects += [Send(id, {"kind": "beat"}) for id in sorted(self.links)]
        pause_s = self.limits.look_s if self.phase != "in" else 4 * self.limits.look_s
        if now_s - self._looked_s >= pause_s and (self.phase != "out" or self.asked):
            self._looked_s = now_s
            effects.append(Look(self.number))
        for one in self._listening_for():
            if now_s - self.heard_s.setdefault(one.id, now_s) > self.limits.silent_s:
                self.dead.setdefault(one.id, f"silent for {self.limits.silent_s:g} s")
                effects += self._end_generation(f"{one.host}/{one.slot} is silent", now_s)
        return [*effects, *self._move_on(now_s)]

    # -- within ---------------------------------------------------------------------------------------------------------

    def _listening_for(self) -> list[Member]:
        """Whom this worker should hear of: the hub, and the hub everybody."""
        if self.phase not in ("in", "left"):
            return []
        hub = self.hub()
        if self.leads:
            return [one for one in self.others if one.id not in self.dead and (self.phase == "in" or one.id not in self.reports)]
        return [hub] if hub else []

    def _member(self, id: str) -> Member | None:
        known = [*(self.record.members if self.record else ()), *self.room]
        return next((one for one in known if one.id == id), None)

    def _is_hub(self, id: str) -> bool:
        hub = self.hub() if self.phase != "out" else None
        return hub is not None and hub.id == id

    def _connect(self, member: Member, now_s: float) -> list[Effect]:
        """Open a link to a peer that has none, not more often than a look."""
        if member.id in self.links:
            return self._introduce(member.id, now_s)
        if now_s - self._tried_s.get(member.id, -1e9) < self.limits.look_s:
            return []
        self._tried_s[member.id] = now_s
        self.heard_s.setdefault(member.id, now_s)
        return [Connect(member)]

    def _introduce(self, id: str, now_s: float) -> list[Effect]:
        """What a peer must hear first: a joiner's wish, a report."""
        if self.phase == "out" and self.asked and (target := self._target(now_s)) and target.id == id:
            return [Send(id, {"kind": "join", "member": vars(self.me), "facts": dict(self.facts)})]
        if self.phase == "left" and self._is_hub(id):
            report = self.reports[self.me.id]
            return [Send(id, {"kind": "left", **vars(report)})]
        return []

    def _end_generation(self, why: str, now_s: float) -> list[Effect]:
        """Leave the group and let the others know: an error in one member does not reach all by itself."""
        if self.over or self.phase not in ("in", "left"):
            return []
        self.over = why
        message = {"kind": "over", "number": self.number, "why": why}
        return [Cut(why), *(Send(one.id, message) for one in self.others if one.id in self.links)]

    def _report(self, now_s: float) -> list[Effect]:
        """Tell the hub; the hub itself moves on."""
        hub = self.hub()
        if hub is None or hub.id == self.me.id:
            return self._move_on(now_s)
        return self._introduce(hub.id, now_s) if hub.id in self.links else self._connect(hub, now_s)

    def _move_on(self, now_s: float) -> list[Effect]:
        """Do what is due: look for the hub, or be it."""
        if self.phase == "out":
            return self._seek(now_s) if self.asked else []
        hub = self.hub()
        if self.phase not in ("in", "left") or hub is None or self.record is None:
            return []
        if hub.id != self.me.id:
            known = hub.id in self.links
            return (
                [] if known and self.phase == "in" else self._report_once(hub, now_s) if self.phase == "left" else self._connect(hub, now_s)
            )
        if not self.over:
            return []
        effects: list[Effect] = []
        for one in self.others:
            if one.id not in self.dead and one.id not in self.reports and one.id not in self.links:
                effects += self._connect(one, now_s)
        if self.phase == "left":
            effects += self._propose(now_s)
        return effects

    def _report_once(self, hub: Member, now_s: float) -> list[Effect]:
        """Report to a hub that was not told yet."""
        if hub.id not in self.links:
            return self._connect(hub, now_s)
        if self._tried_s.get(f"report {hub.id}", -1e9) >= now_s - self.limits.beat_s:
            return []
        self._tried_s[f"report {hub.id}"] = now_s
        return self._introduce(hub.id, now_s)

    def _propose(self, now_s: float) -> list[Effect]:
        assert self.record is not None
        if self._proposed == self.number + 1:
            return []
        view = View(self.record, self.reports, self.dead, list(self.joiners.values()))
        record, reason = next_generation(view, self.limits, self.tokens())
        if record is None:
            said, self._waits = self._waits, reason
            return [Say(reason)] if reason != said and not reason.startswith("waiting") else []
        self._proposed = record.number
        return [Propose(record)]

    def _take_joiner(self, joiner: Joiner, now_s: float) -> list[Effect]:
        """Somebody wants in."""
        id = joiner.member.id
        if self.facts and joiner.facts and (wrong := differing(joiner.facts, self.facts)):
            return [Send(id, {"kind": "refused", "why": f"its numbers would have other bits: {wrong}"})]
        if self.phase == "out" or self.leads:
            self.joiners[id] = joiner
            return self._move_on(now_s)
        hub = self.hub()
        return [Send(id, {"kind": "go_to", "member": vars(hub)})] if hub and hub.id != id else []

    def _target(self, now_s: float) -> Member | None:
        """Whom a worker that is out asks: a member of the newest generation, or the first of those that gather; None: itself."""
        for one in self._seats():
            if one.id not in self.dead:
                return one
        room = sorted((one for one in (*self.room, self.me) if one.id not in self.dead), key=lambda one: one.place)
        return None if room[0].id == self.me.id else room[0]

    def _seats(self) -> tuple[Member, ...]:
        """Those who are, or may be, at work in the newest generation."""
        return self.record.members if self.record and not self.record.end else ()

    def _seek(self, now_s: float) -> list[Effect]:
        """A worker that is out looks for the one that lets it in, or becomes it."""
        for one in self._seats():
            heard_s = self.heard_s.get(one.id, now_s)
            if one.id not in self.links and one.id not in self.dead and now_s - heard_s > self.limits.takeover_s:
                self.dead[one.id] = f"no answer for {self.limits.takeover_s:g} s"
        if self.joins and self.record and all(one.id in self.dead for one in self._seats()):
            self.phase = "gone"
            return [Leave("nobody is left to join; this worker starts anew, with the others", fenced=True)]
        target = self._target(now_s)
        if target is not None:
            self._gathering_s = None
            effects = [] if target.id in self.links else self._connect(target, now_s)
            for one in self._seats():  # the first may be cut off: ask the others too, they know the hub
                effects += [] if one.id in self.links or one.id in self.dead or one.id == target.id else self._connect(one, now_s)
            key = f"join {target.id}"
            if target.id in self.links and self._tried_s.get(key, -1e9) < now_s - self.limits.beat_s:
                self._tried_s[key] = now_s
                effects += self._introduce(target.id, now_s)
            return effects
        self._gathering_s = now_s if self._gathering_s is None else self._gathering_s
        came = sorted([self.me, *(one.member for one in self.joiners.values())], key=lambda one: one.place)
        late = now_s - self._gathering_s >= self.limits.gather_s
        wanted = self.limits.least if late else max(self.limits.expected, self.limits.least)
        if len(came) < wanted or self._proposed == self.number + 1:
            return []
        out = tuple(Out(one.id, self.dead[one.id]) for one in self._seats())
        reason = "start" if not out else f"nobody of generation {self.number} is left; from the newest checkpoint"
        self._proposed = self.number + 1
        return [Propose(Record(self.number + 1, self.tokens(), tuple(came[: self.limits.most]), "", 0, reason, out))]

    def _follow(self, record: Record, now_s: float) -> list[Effect]:
        """A newer record: in it, or out."""
        if record.number <= self.number:
            return self._move_on(now_s)
        was_in, broken = self.phase in ("in", "left"), bool(self.over)
        self.record, self.over, self._waits = record, "", ""
        self.reports, self.dead, self._tried_s = {}, {}, {}
        message = {"kind": "record", "record": record.to_json()}
        effects: list[Effect] = [Cut("a newer generation exists")] if was_in and not broken else []
        effects += [Send(id, message) for id in sorted(self.links)]
        if record.end and (was_in or record.number > self.after):
            self.phase = "gone"
            return [*effects, Leave("the run has ended", end=record.end)]
        rank = record.rank_of(self.me.id)
        if rank is None:
            if was_in:
                self.phase = "gone"
                why = next((one.why for one in record.out if one.id == self.me.id), "it was not there")
                return [*effects, Leave(f"generation {record.number} goes on without this worker: {why}", fenced=True)]
            return [*effects, *self._move_on(now_s)]
        self.phase = "in"
        self._gathering_s = None
        self.joiners = {id: one for id, one in self.joiners.items() if record.rank_of(id) is None}
        self.heard_s = {one.id: now_s for one in record.members}
        hub = record.members[0]
        return [*effects, Form(record), *([] if rank == 0 else self._connect(hub, now_s))]
