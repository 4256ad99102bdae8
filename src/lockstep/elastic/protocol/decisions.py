"""Membership decisions: the next generation, joiners to admit or refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.elastic.generation_log import Generation, Member, Removed

# Of facts that the user asked for: "run steps", "--steps" of a user's loop.
RUN_FACT_PREFIXES = ("run ", "--")
INCOMPLETE = "its replica is incomplete"


@dataclass(frozen=True)
class ElasticLimits:
    """How long the members of a run wait, and how many they are.

    heartbeat_s           between two heartbeats
    heartbeat_timeout_s   without a message for longer, a peer counts as lost
    log_poll_s            between two reads of the log while waiting for a generation
    rendezvous_timeout_s  how long a start waits for `expected_workers` once it has `min_workers`
    takeover_s            how long new workers wait for members that neither answer nor update
                          their liveness file
    hang_timeout_s        without progress before the rank that blocks the others is identified
    evaluate_timeout_s    the same for a rank that evaluates
    on_hang               remove that rank ("evict"), end the run ("abort"), or only log ("warn")
    expected_workers      that a start waits for
    min_workers           below this number training waits
    max_workers           at most this many train at once
    replica_size          workers of a replica, adjacent in rank; incomplete replicas are removed
    one_host              the workers of a replica share a host: it saves to a disk that other hosts
                          do not see

    `lockstep run` and `launch` set expected_workers, min_workers and max_workers; a worker that
    joins under them gives the others.
    """

    heartbeat_s: float = 0.5
    heartbeat_timeout_s: float = 2.5
    log_poll_s: float = 0.25
    rendezvous_timeout_s: float = 30.0
    takeover_s: float = 30.0
    hang_timeout_s: float = 10.0
    evaluate_timeout_s: float = 1800.0
    on_hang: Literal["evict", "abort", "warn"] = "evict"
    expected_workers: int = 1
    min_workers: int = 1
    max_workers: int = 1_000_000
    replica_size: int = 1
    one_host: bool = False


# Of workers that are not replaced: their agent ends them all when one exits.
FIXED = ElasticLimits(heartbeat_timeout_s=600.0, on_hang="warn")


@dataclass(frozen=True)
class LeaveReport:
    """A member's report that its main thread has left generation `number`."""

    number: int
    # Committed steps, or steps that it must commit because all ranks agreed; < 0: no state.
    step: int
    leaving: bool = False  # the member leaves the run, because its host is drained
    why: str = ""
    lost: tuple[str, ...] = ()  # ids of members that it cannot reach; filled in by the protocol
    # Its loop is over: it would send no state to a joiner; filled in by the protocol.
    ending: bool = False


@dataclass(frozen=True)
class Joiner:
    """A worker that asks to join, its fingerprint, and the ids of the workers it reaches."""

    member: Member
    fingerprint: Mapping[str, str]
    reaches: frozenset[str] = frozenset()

    def reaches_joiner(self, other: Joiner) -> bool:
        """Whether they are on one host, which no cut separates, or linked."""
        return (
            self.member.host == other.member.host
            or other.member.id in self.reaches
            or self.member.id in other.reaches
        )


@dataclass(frozen=True)
class CoordinatorView:
    generation: Generation
    reports: Mapping[str, LeaveReport]
    dead: Mapping[str, str]  # id -> why a member counts as gone
    joiners: Sequence[Joiner]


def next_generation(
    view: CoordinatorView, limits: ElasticLimits, token: str
) -> tuple[Generation | None, str]:
    """Return (the generation to propose, the reason), or (None, what the coordinator waits for)."""
    number = view.generation.number + 1
    if missing := sum(
        member.id not in view.reports and member.id not in view.dead
        for member in view.generation.members
    ):
        return None, f"waiting for {missing} members to leave generation {view.generation.number}"
    if any(report.ending for id, report in view.reports.items() if id not in view.dead):
        # A member may have missed the vote after which the others ended the run. They meet in the
        # end.
        limits = replace(limits, min_workers=limits.replica_size, max_workers=0)
    survivors = split_members(view, limits)
    if survivors is None:
        return None, "no member would stay"
    stay, incomplete, removed = survivors
    if not stay and incomplete:
        reason = "no complete replica is left; resuming from the newest checkpoint"
        return Generation(
            number, token, (), "", view.generation.step, reason, tuple(removed)
        ), reason
    new = select_joiners(view.joiners, stay, limits)
    if len(stay) + len(new) < limits.min_workers:
        return (
            None,
            f"too few workers: {len(stay) + len(new)} available, "
            f"at least {limits.min_workers} required",
        )
    causes = [f"{member.id.rpartition('/')[0]}: {member.why}" for member in removed] + (
        [f"{member_names(new)} joined"] if new else []
    )
    reason = "; ".join(causes) or next(
        (report.why for report in view.reports.values() if report.why), "regrouped"
    )
    # A member that missed the result of the last vote has voted: it commits that step too.
    step = max(view.reports[member.id].step for member in stay)
    members = group_by_host([*stay, *new], limits.replica_size)
    return Generation(number, token, members, "", step, reason, tuple(removed)), reason


def group_by_host(members: Sequence[Member], replica_size: int) -> tuple[Member, ...]:
    """Return the members with the replicas of each host adjacent, so that nearby ranks share a
    host.

    Hosts and the replicas of a host keep the order of `members`. A replica counts as its first
    host's.
    """
    by_host: dict[str, list[Member]] = {}
    for first in range(0, len(members), replica_size):
        by_host.setdefault(members[first].host, []).extend(members[first : first + replica_size])
    return tuple(member for replicas in by_host.values() for member in replicas)


def split_members(
    view: CoordinatorView, limits: ElasticLimits
) -> tuple[list[Member], list[Member], list[Removed]] | None:
    """Return the members (staying, of incomplete replicas, to remove). All have reported or are
    gone. None: all are leaving, and no joiner can take over their state yet."""
    members, reports = view.generation.members, view.reports
    alive = [member for member in members if member.id not in view.dead]
    removed = [
        Removed(member.id, view.dead[member.id]) for member in members if member.id in view.dead
    ]
    leaving = [member for member in alive if reports[member.id].leaving]
    if len(leaving) < len(alive):
        removed += [Removed(member.id, reports[member.id].why or "leaving") for member in leaving]
        alive = [member for member in alive if not reports[member.id].leaving]
    elif not select_joiners(view.joiners, alive, limits):
        return None
    stay: list[Member] = []
    for member in alive:
        lost = set(reports[member.id].lost)
        unreachable = next(
            (
                other
                for other in (stay if lost else ())
                if other.id in lost and member.id in reports[other.id].lost
            ),
            None,
        )
        if unreachable:
            removed.append(
                Removed(member.id, f"it and {member_names([unreachable])} cannot reach each other")
            )
        else:
            stay.append(member)
    stay, incomplete = split_whole_replicas(members, stay, limits.replica_size)
    return stay, incomplete, removed + [Removed(member.id, INCOMPLETE) for member in incomplete]


def select_joiners(
    joiners: Iterable[Joiner], stay: Sequence[Member], limits: ElasticLimits
) -> list[Member]:
    """Return the joiners to admit: whole replicas that reach every staying member.
    Replicas of one worker may not reach each other. Then the next generation does not form, and
    one of them is removed. Members of a larger replica would be removed and join together again."""
    ids = {member.id for member in stay}
    fit = [joiner for joiner in joiners if ids <= joiner.reaches]
    if limits.replica_size > 1:
        fit = replicas_that_reach_each_other(fit, limits)
    return first_whole_replicas(
        [joiner.member for joiner in fit], max(0, limits.max_workers - len(stay)), limits
    )


def replicas_that_reach_each_other(
    joiners: Sequence[Joiner], limits: ElasticLimits
) -> list[Joiner]:
    """Return joiners in whole replicas, preferably of one host, that all reach each other."""
    replica_size = limits.replica_size
    chosen: list[Joiner] = []
    waiting = sorted(joiners, key=lambda joiner: joiner.member.sort_key)
    while waiting:
        replica: list[Joiner] = []
        for joiner in waiting:
            may_share = (
                not (limits.one_host and replica) or joiner.member.host == replica[0].member.host
            )
            if (
                may_share
                and len(replica) < replica_size
                and all(joiner.reaches_joiner(other) for other in (*chosen, *replica))
            ):
                replica.append(joiner)
        chosen += replica if len(replica) == replica_size else []
        # The first one is in this replica, or no whole replica has it.
        waiting = [joiner for joiner in waiting[1:] if joiner not in chosen]
    return chosen


def first_whole_replicas(
    members: Sequence[Member], most: int, limits: ElasticLimits
) -> list[Member]:
    """Return as many of the first `most` members as make whole replicas."""
    if limits.one_host:
        by_host: dict[str, list[Member]] = {}
        for member in members:
            by_host.setdefault(member.host, []).append(member)
        members = [
            member
            for group in by_host.values()
            for member in group[: len(group) // limits.replica_size * limits.replica_size]
        ]
    return list(members[: min(len(members), most) // limits.replica_size * limits.replica_size])


def split_whole_replicas(
    members: Sequence[Member], stay: Sequence[Member], replica_size: int
) -> tuple[list[Member], list[Member]]:
    """Split `stay` into (members whose whole replica stays, the others)."""
    ids = {member.id for member in stay}
    whole: list[Member] = []
    others: list[Member] = []
    for first in range(0, len(members), replica_size):
        replica = [member for member in members[first : first + replica_size] if member.id in ids]
        (whole if len(replica) == replica_size else others).extend(replica)
    return whole, others


def rendezvous_status(workers: Sequence[Member], limits: ElasticLimits) -> str:
    """Return the log line of a start that waits for workers."""
    if len(workers) < limits.min_workers:
        return (
            f"too few workers: {len(workers)} available ({member_names(workers)}), "
            f"at least {limits.min_workers} required"
        )
    available = f"{len(workers)} of {limits.expected_workers} available ({member_names(workers)})"
    return (
        f"waiting for workers: {available}; "
        f"training starts without the others after {limits.rendezvous_timeout_s:g} s"
    )


def member_names(members: Sequence[Member]) -> str:
    """ "a/0, b/1"."""
    return ", ".join(f"{member.host}/{member.slot}" for member in members)


def refusal_reason(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Return why a worker with the fingerprint `theirs` cannot join; "" when it can."""

    def describe(key: str, facts: Mapping[str, str]) -> str:
        return repr(facts[key]) if key in facts else "not set"

    different = [key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key)]
    of_run = [key for key in different if key.startswith(RUN_FACT_PREFIXES)]
    differences = "; ".join(
        f"{key} is {describe(key, theirs)} there and {describe(key, ours)} here"
        for key in of_run or different
    )
    if of_run:
        return f"it was started for a different run: {differences}"
    return f"it would compute different bits: {differences}" if differences else ""
