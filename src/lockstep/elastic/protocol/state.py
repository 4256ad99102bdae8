"""The state of the membership protocol in one worker, its derived values, and its effects.

Only transitions.py changes the state. An effect is a request to the membership thread; its comment
names the event that follows it.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lockstep.elastic.generation_log import NO_GENERATION, Generation, Member, RunResult
from lockstep.elastic.protocol.decisions import ElasticLimits, Joiner, LeaveReport, select_joiners

T = TypeVar("T")


HEARTBEAT = {"kind": "heartbeat"}
Message = dict[str, Any]
# Ids of peers, the update for these, the update for the other members.
Updates = tuple[frozenset[str], Message, Message]


@dataclass(frozen=True)
class Connect:  # open a link; then `on_link_up` or `on_connect_failed`
    member: Member


@dataclass(frozen=True)
class Send:  # send a message to a linked peer
    id: str
    message: dict[str, Any]


@dataclass(frozen=True)
class ReadLog:
    """Read the log above `known`, and the waiting room; then `on_log_read` or `on_disk_error`."""

    known: int


@dataclass(frozen=True)
class Propose:
    """Propose a generation, with its store filled in; then `on_proposed` or `on_disk_error`."""

    generation: Generation


@dataclass(frozen=True)
class AbortGroup:  # abort every collective of the process group
    why: str


@dataclass(frozen=True)
class FormGroup:
    """Let the main thread form the process group of `generation`, which has this worker."""

    generation: Generation


@dataclass(frozen=True)
class GetReady:
    """Build the model, then ask to join: the run has started without this worker."""


@dataclass(frozen=True)
class Exit:  # leave for good: removed from the run (`fenced`), refused, or the run ended
    why: str
    fenced: bool = False
    end: RunResult | None = None


@dataclass(frozen=True)
class LogMessage:
    text: str


Effect = Connect | Send | ReadLog | Propose | AbortGroup | FormGroup | GetReady | Exit | LogMessage


@dataclass
class Peers:
    """The other workers: links to them, and when each one was last heard from."""

    links: set[str] = field(default_factory=set)  # ids of linked peers
    dead: dict[str, str] = field(default_factory=dict)  # id -> why it is gone for good
    # id -> time of the last message, for each monitored peer
    last_heard_s: dict[str, float] = field(default_factory=dict)
    # id -> next attempt to connect; inf: one is under way
    connect_after_s: dict[str, float] = field(default_factory=dict)

    def connect(self, members: Iterable[Member], now_s: float) -> list[Effect]:
        """Open links that are missing, unless an attempt has just failed."""
        after_s = self.connect_after_s
        new = [
            member
            for member in members
            if member.id not in self.links and after_s.get(member.id, now_s) <= now_s
        ]
        after_s.update((member.id, math.inf) for member in new)
        return [Connect(member) for member in new]

    def forget(self, known: Container[str], monitored: Container[str]) -> None:
        """Forget workers of an earlier generation."""
        self.last_heard_s = only(self.last_heard_s, monitored)
        self.dead = only(self.dead, known)
        self.connect_after_s = only(self.connect_after_s, known)


@dataclass
class Outbox:
    """The newest message to each peer, and to the log of this worker."""

    # With the newest generation, for workers that know the one before.
    announcement: Message = field(default_factory=dict)
    sent: dict[str, Message] = field(default_factory=dict)  # id -> newest update sent
    updates: Updates = (frozenset(), HEARTBEAT, HEARTBEAT)  # from which they were sent
    heartbeat_s: float = -math.inf
    status: str = ""  # newest one in the log

    def log_once(self, text: str) -> list[Effect]:
        """Log what this worker waits for, at each change."""
        if text == self.status:
            return []
        self.status = text
        return [LogMessage(text)]

    def send(self, updates: Updates, links: set[str], members: Container[str]) -> list[Effect]:
        """Send each peer its update if it has changed, and at each heartbeat (see `tick`)."""
        peers = links if updates != self.updates else links - self.sent.keys()
        self.updates = updates
        targets, for_targets, for_members = updates
        effects: list[Effect] = []
        for id in sorted(peers):
            update = for_members if id in members else HEARTBEAT
            update = for_targets if id in targets else update
            if self.sent.get(id) != update:
                self.sent[id] = update
                effects.append(Send(id, update))
        return effects


@dataclass
class LogAccess:
    """When the log of generations was read, and what is on its way there."""

    is_read: bool = False
    read_s: float = -math.inf
    pending: int = 0  # number of the proposed generation
    retry_s: float = -math.inf  # no proposal before this time, after a disk error
    waits_since_s: float | None = None  # when this worker first could have proposed a start

    def propose(self, generation: Generation) -> list[Effect]:
        self.pending = generation.number
        return [Propose(generation)]


def only(values: dict[str, T], ids: Container[str]) -> dict[str, T]:
    return {id: value for id, value in values.items() if id in ids}


@dataclass
class MembershipState:
    """The membership and the other workers, as one worker knows them."""

    me: Member
    limits: ElasticLimits
    tokens: Callable[[], str]  # returns a new random token for each proposal
    now_s: float
    after: int = 0  # newest generation before this start: a recorded end up to it is ignored
    # Must be equal on all members; empty until this worker trains.
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    generation: Generation = NO_GENERATION  # the newest one that this worker knows
    phase: str = "out"
    join_requested: bool = False  # by the main thread
    is_joining: bool = False  # it asked while others trained, and starts with no other worker
    generation_error: str = ""  # why the generation is over, until its successor exists
    # The generation stalled and no rank was to blame: some members may not reach each other.
    partition_suspected: bool = False
    is_ending: bool = False  # the main thread's loop is over
    stop_signal: str = ""  # the signal with which the run shall stop, as far as known
    # By id, of members that have left the generation.
    reports: dict[str, LeaveReport] = field(default_factory=dict)
    # By id, workers that asked this worker to join.
    joiners: dict[str, Joiner] = field(default_factory=dict)
    peers: Peers = field(default_factory=Peers)
    outbox: Outbox = field(default_factory=Outbox)
    log: LogAccess = field(default_factory=LogAccess)
    waiting_members: tuple[Member, ...] = ()  # outside every generation; some may have exited
    _changed: bool = False  # since the last `advance`

    @property
    def number(self) -> int:
        return self.generation.number

    @property
    def others(self) -> list[Member]:
        return [member for member in self.generation.members if member.id != self.me.id]

    def coordinator(self) -> Member | None:
        """Return the first member that is not gone, preferably one that stays in the run."""
        first_leaving = None
        for member in self.generation.members:
            if not self._loss_reason(member.id):
                if member.id not in self.reports or not self.reports[member.id].leaving:
                    return member
                first_leaving = first_leaving or member
        return first_leaving

    @property
    def is_coordinator(self) -> bool:
        return self.phase in ("in", "left") and self.coordinator() == self.me

    @property
    def joiner_count(self) -> int:
        """Number of joiners that could be admitted now."""
        if not self.joiners or not self.is_coordinator:
            return 0
        alive = [member for member in self.generation.members if not self._loss_reason(member.id)]
        return len(select_joiners(self._reachable_joiners(), alive, self.limits))

    @property
    def writes_liveness(self) -> bool:
        """Whether to update the liveness file, which keeps unreachable workers from taking over."""
        return self.phase == "in" and self.is_coordinator

    @property
    def _log_pause_s(self) -> float:
        """Interval between reads of the log. A coordinator announces generations to linked members.
        Each waiting worker lists all of them, so many of them do so less often."""
        if self.phase == "out":
            return self.limits.log_poll_s * max(1.0, len(self.waiting_members) / 64)
        if self.phase != "in":
            return self.limits.log_poll_s
        coordinator = self.coordinator()
        is_linked = coordinator is not None and coordinator.id in self.peers.links
        return self.limits.log_poll_s * (40 if is_linked else 4)

    def _silence_s(self, id: str) -> float:
        return self.now_s - self.peers.last_heard_s.get(id, self.now_s)

    def _is_silent(self, id: str) -> bool:
        return self._silence_s(id) > self.limits.heartbeat_timeout_s

    def _is_late(self, id: str) -> bool:
        return id in self.peers.dead or (
            id not in self.peers.links and self._silence_s(id) > self.limits.heartbeat_s
        )

    def _loss_reason(self, id: str) -> str:
        """Return why a worker counts as gone, for good or until it is heard from; else ""."""
        return self.peers.dead.get(id) or (
            f"no heartbeat for {self.limits.heartbeat_timeout_s:g} s" if self._is_silent(id) else ""
        )

    def _wanted_peers(self) -> list[Member]:
        """Return the peers to link to: the coordinator and the silent members before it.
        A joiner links to all members, and to joiners of other hosts that may share its replica."""
        wanted: Sequence[Member] = ()
        if self.phase == "out" and not self.join_requested:
            return []
        elif self.phase == "out" and self._active_members():
            partners = self.waiting_members if self.limits.replica_size > 1 else ()
            wanted = [
                *self.generation.members,
                *(member for member in partners if member.host != self.me.host),
            ]
        elif self.phase == "out":
            # Only the first candidate, and one more for each that may be lost: all would be N * N
            # links.
            candidates = self._candidates()
            wanted = [
                *self.generation.members,
                *candidates[: 1 + sum(self._is_late(member.id) for member in candidates)],
            ]
        elif self._made_no_progress or (self.is_coordinator and self.generation_error):
            wanted = self.others
        elif coordinator := self.coordinator():
            wanted = self.generation.members[: self.generation.ranks[coordinator.id] + 1]
        return [
            member
            for member in wanted
            if member.id != self.me.id and member.id not in self.peers.dead
        ]

    def _monitored(self) -> list[Member]:
        """Return the workers whose silence counts: peers, joiners, and a coordinator's members."""
        joiners, peers = (
            [joiner.member for joiner in self.joiners.values()],
            self.others if self.is_coordinator else self._wanted_peers(),
        )
        return [member for member in (*peers, *joiners) if member.id not in self.peers.dead]

    def _active_members(self) -> list[Member]:
        """Return the members that may still train, as seen by a worker outside the generation."""
        since_s = self.now_s - self.limits.takeover_s
        alive = [member for member in self.generation.members if member.id not in self.peers.dead]
        return [
            member
            for member in alive
            if self.peers.last_heard_s.get(member.id, self.now_s) >= since_s
        ]

    def _candidates(self) -> list[Member]:
        """Return the workers outside every generation, up to this one. The first proposes."""
        own_key = self.me.sort_key
        candidates = {
            member.id: member
            for member in (self.me, *self.waiting_members)
            if member.sort_key <= own_key
        }
        return sorted(
            (member for id, member in candidates.items() if id not in self.generation.ranks),
            key=lambda member: member.sort_key,
        )

    def _first_candidate(self) -> Member:
        return next(member for member in self._candidates() if not self._loss_reason(member.id))

    @property
    def _made_no_progress(self) -> bool:
        """Whether this worker left a generation without a step: the network may be cut."""
        return self._committed_at_most(0)

    def _committed_at_most(self, steps: int) -> bool:
        """Whether this worker left a generation that stalled or committed at most `steps` steps."""
        if self.phase != "left":
            return False
        return (
            self.partition_suspected
            or self.reports[self.me.id].step <= self.generation.step + steps
        )

    @property
    def _may_be_minority(self) -> bool:
        """Whether the silent members may be the larger side of a cut network, or half with rank 0.

        They get time to propose first: one timeout for each member of this side, since they may
        find those silent one by one; and one more if some of them, which may be a step behind,
        first have to learn which members they reach. No cut separates processes of one host.
        """
        alive = [member for member in self.generation.members if member.id not in self.peers.dead]
        silent = [
            member for member in alive if self._is_silent(member.id) and member.host != self.me.host
        ]
        # Of two equal halves the one with rank 0 counts as the larger one.
        if 2 * len(silent) + (alive[0] in silent) <= len(alive):
            return False
        longest_s = max(self.now_s - self.peers.last_heard_s[member.id] for member in silent)
        return (
            longest_s
            <= (1 + self._committed_at_most(1) + len(alive) - len(silent))
            * self.limits.heartbeat_timeout_s
        )

    def _reachable_joiners(self) -> list[Joiner]:
        """Return the joiners heard from recently: the loss of a joiner is detected late."""
        return [
            joiner
            for id, joiner in self.joiners.items()
            if self._silence_s(id) <= 2 * self.limits.heartbeat_s
        ]

    @property
    def _report_ready(self) -> bool:
        """Whether this worker has left its group and knows everything that its report contains."""
        return self.phase == "left" and (
            not self._made_no_progress or self._reachability_known(self.others)
        )

    def _reachability_known(self, members: Sequence[Member]) -> bool:
        return all(
            member.id in self.peers.links or member.id == self.me.id or self._loss_reason(member.id)
            for member in members
        )

    def _may_propose(self, now_s: float) -> bool:
        return self.log.pending <= self.number and now_s >= self.log.retry_s

    def _updates(self) -> Updates:
        stop = {"stops": self.stop_signal} if self.stop_signal else {}
        if self.phase == "out" and self.join_requested and (targets := self._join_targets()):
            members = self.generation.ranks.keys()
            join = {
                "kind": "join",
                "number": self.number,
                "member": vars(self.me),
                "fingerprint": dict(self.fingerprint),
                "reaches": sorted(self.peers.links - members),
                "misses": sorted(members - self.peers.links),  # it reaches all other members
                **stop,
            }
            return frozenset(member.id for member in targets), join, HEARTBEAT
        if not self.generation_error:
            return frozenset(), HEARTBEAT, HEARTBEAT
        known = {
            "dead": only(self.peers.dead, self.generation.ranks),
            "partition_suspected": self.partition_suspected,
            **stop,
        }
        ended = {"kind": "ended", "number": self.number, "why": self.generation_error, **known}
        if not self._report_ready:
            return frozenset(), ended, ended
        report = self.reports[self.me.id]
        lost = [member.id for member in self.others if self._is_silent(member.id)]
        left = {"kind": "left", **vars(report), "lost": lost, **known}
        coordinator = self.coordinator()
        targets_ids = frozenset([coordinator.id] if coordinator else [])
        return targets_ids, left, left if report.leaving else ended

    def _join_targets(self) -> list[Member]:
        """Return the workers to ask: all active members once probed, else the first candidate."""
        members = self._active_members()
        if not members:
            return [self._first_candidate()]
        return members if self._reachability_known(members) else []
