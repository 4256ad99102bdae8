"""The state of the membership protocol in one worker, and its derived values.

Only transitions.py changes it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.elastic.generation_log import NO_GENERATION, Generation, Member
from lockstep.elastic.protocol.decisions import ElasticLimits, Joiner, LeaveReport, select_joiners


@dataclass
class MembershipState:
    """The membership and the other workers, as one worker knows them."""

    me: Member
    limits: ElasticLimits
    tokens: Callable[[], str]  # returns a new random token for each proposal
    now_s: float
    after: int = 0  # newest generation before this start: a recorded end up to it is ignored
    fingerprint: Mapping[str, str] = field(
        default_factory=dict
    )  # must be equal on all members; empty until this worker trains
    generation: Generation = NO_GENERATION  # the newest one that this worker knows
    announcement: dict[str, Any] = field(
        default_factory=dict
    )  # the message with it, for workers that know the one before
    phase: str = "out"
    join_requested: bool = False  # by the main thread
    is_joining: bool = False  # it asked while others trained, and starts with no other worker
    generation_error: str = ""  # why the generation is over, until its successor exists
    partition_suspected: bool = False  # the generation stalled and no rank was to blame: some members may not reach each other
    is_ending: bool = False  # the main thread's loop is over
    stop_signal: str = ""  # the signal with which the run shall stop, as far as known
    reports: dict[str, LeaveReport] = field(
        default_factory=dict
    )  # by id, of members that have left the generation
    joiners: dict[str, Joiner] = field(
        default_factory=dict
    )  # by id, workers that asked this worker to join
    dead: dict[str, str] = field(
        default_factory=dict
    )  # id -> why a worker is gone for good: exited or evicted
    last_heard_s: dict[str, float] = field(
        default_factory=dict
    )  # id -> time of the last message, for each monitored peer
    links: set[str] = field(default_factory=set)  # ids of linked peers
    waiting_members: tuple[
        Member, ...
    ] = ()  # outside every generation, from the run folder; some may have exited
    _changed: bool = False  # since the last `advance`
    _last_sent: dict[str, dict[str, Any]] = field(default_factory=dict)  # id -> newest update sent
    _last_updates: object = None  # the result of `_updates` from which `_last_sent` was sent
    _connect_after_s: dict[str, float] = field(
        default_factory=dict
    )  # id -> next attempt; inf: one is under way
    _has_read_log: bool = False
    _log_read_s: float = -math.inf
    _last_heartbeat_s: float = -math.inf
    _rendezvous_since_s: float | None = None
    _pending_proposal: int = 0  # number of the generation on its way to the log
    _disk_retry_s: float = -math.inf  # no proposal before this time, after a disk error
    _last_status: str = ""

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
        coordinator = self.coordinator()
        is_told = self.phase == "in" and coordinator and coordinator.id in self.links
        return self.limits.log_poll_s * (40 if is_told else 4 if self.phase == "in" else 1)

    def _silence_s(self, id: str) -> float:
        return self.now_s - self.last_heard_s.get(id, self.now_s)

    def _is_silent(self, id: str) -> bool:
        return self._silence_s(id) > self.limits.heartbeat_timeout_s

    def _is_late(self, id: str) -> bool:
        return id in self.dead or (
            id not in self.links and self._silence_s(id) > self.limits.heartbeat_s
        )

    def _loss_reason(self, id: str) -> str:
        """Return why a worker counts as gone, for good or until it is heard from; else ""."""
        return self.dead.get(id) or (
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
            member for member in wanted if member.id != self.me.id and member.id not in self.dead
        ]

    def _monitored(self) -> list[Member]:
        """Return the workers whose silence counts: peers, joiners, and a coordinator's members."""
        joiners, peers = (
            [joiner.member for joiner in self.joiners.values()],
            self.others if self.is_coordinator else self._wanted_peers(),
        )
        return [member for member in (*peers, *joiners) if member.id not in self.dead]

    def _active_members(self) -> list[Member]:
        """Return the members that may still train, as seen by a worker outside the generation."""
        since_s = self.now_s - self.limits.takeover_s
        alive = [member for member in self.generation.members if member.id not in self.dead]
        return [
            member for member in alive if self.last_heard_s.get(member.id, self.now_s) >= since_s
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
        alive = [member for member in self.generation.members if member.id not in self.dead]
        silent = [
            member for member in alive if self._is_silent(member.id) and member.host != self.me.host
        ]
        if 2 * len(silent) + (alive[0] in silent) <= len(alive):
            return False
        longest_s = max(self.now_s - self.last_heard_s[member.id] for member in silent)
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
            member.id in self.links or member.id == self.me.id or self._loss_reason(member.id)
            for member in members
        )
