"""Hang detection: which rank blocks the others, where, for how long, and what to do.

Each member sends its status (status_board.py) with every heartbeat, including the seconds since its
last progress by its own clock: durations are compared, never clocks of two hosts. A rank inside a
collective waits for the others; a rank outside must make progress by itself. Collectives of the
library are on the status board. A collective that the user's loop calls shows in the stack of its
thread.

    a rank outside a collective makes no progress     it is the culprit, the others wait for it
    a rank outside makes progress, or may take long   no hang, though the others wait
    all wait, in different collectives                ranks in the less common ones are culprits
    all wait, in the same collective                  the network is to blame, no rank

The coordinator's Watchdog collects the status of all members and diagnoses twice: to detect a hang,
and again with the stacks of the culprits.
"""

import math
import re
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal

from lockstep.elastic.generation_log import Generation, Member
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.runtime import status_board
from lockstep.runtime.status_board import Phase, Status
from lockstep.runtime.worker_env import process_stat
from lockstep.units import format_bytes, format_duration, join_words

WAITING: tuple[Phase, ...] = ("joining", "reducing", "voting")

ALLOWANCES_S: dict[Phase, float] = {  # without progress, in phases that may take longer
    "starting": 120.0,
    "joining": 120.0,
    # No limit: it grows with the corpus; a stopped or exited process is still reported.
    "preparing": math.inf,
    "compiling": 600.0,
    "saving": 600.0,
}
# Entering a phase or a collective is progress. A rank may be without progress for
# `hang_timeout_s`, or longer:
MEDIAN_STEPS = 10.0  # for slow machines
FIRST_STEP_S = 60.0  # in a generation's first step, which warms up
CHECK_S = 1.0  # interval between diagnoses
STACK_S = 1.0  # how long to wait for the stack of a culprit
# Before all ranks are killed if all hang outside collectives: their shared cause (a disk) may
# recover.
COMMON_S = 300.0

# Kill the culprits and continue without them; form a new group of all members; end the run; only
# log.
Action = Literal["evict", "regroup", "abort", "warn"]
ACTION_WORDS: dict[Action, str] = {
    "evict": "The run continues without {ranks}.",
    "regroup": "All ranks form a new group and retry the step.",
    "abort": "The run is aborted.",
    "warn": "No action is taken.",
}
PHASE_WORDS: dict[Phase, str] = {
    "starting": "starting",
    "joining": "joining generation {generation}",
    "preparing": "preparing the run's data",
    "compiling": "compiling in step {step}",
    "data": "fetching the data of step {step}",
    "forward": "in the forward pass of step {step}",
    "backward": "in the backward pass of step {step}",
    "reducing": "in the reduction of step {step}",
    "voting": "in the vote of step {step}",
    "updating": "in the update of step {step}",
    "saving": "saving step {step}",
    "evaluating": "evaluating step {step}",
}
# {where}: the phase, for how long, and the line; {silent}: since the last heartbeat.
PROBLEM_WORDS = {
    "": "{where}",
    "waiting": "waiting {where}",
    "exited": "exited, last seen {where}",
    "unheard": "no heartbeat for {silent}, nor of any other process of the host; last seen {where}",
    "stopped": "stopped (by SIGSTOP or a debugger) {where}",
    "blocked": "{where}, alive but without a heartbeat for {silent} (blocked in I/O)",
    "spinning": "{where}, alive but without a heartbeat for {silent} (a thread holds the GIL)",
}
MISMATCH = (
    "mismatched collectives: {clauses}; "
    "every rank must call the same collectives, in the same order and with tensors of the same size"
)
NETWORK = "{clauses}; no other rank is missing, so look at the network of {hosts}"
SHARED_CAUSE = (
    "none of the {count} ranks makes progress or waits for another, "
    "so look for a shared cause, such as a disk: {clauses}"
)


@dataclass(frozen=True)
class MemberSnapshot:
    """A member, as the coordinator knows it."""

    id: str
    host: str
    slot: int
    rank: int
    status: Status  # the newest, with durations as of now
    silent_s: float = 0.0  # since its last heartbeat
    state: str = ""  # of its process, by proc(5): "R", "S", "D", "T", "Z"; "" if unknown
    stack: str = ""  # of its main thread, from `stack_of`; may be empty

    @property
    def own_collective(self) -> str:
        """The collective that the user's loop called, such as "all_reduce of 8 B", or ""."""
        if self.status.phase in WAITING:
            return ""
        match = COLLECTIVE.search(self.stack.rpartition("\n")[2])
        return match[1] if match else ""

    @property
    def is_waiting(self) -> bool:
        """Whether it is in a collective of the library or, by its stack, of the user's loop."""
        return self.status.phase in WAITING or self.own_collective != ""

    @property
    def place(self) -> str:
        own = self.own_collective
        words = f"in its own {own} of step {{step}}" if own else PHASE_WORDS[self.status.phase]
        return words.format(step=self.status.step, generation=self.status.generation)

    @property
    def collective(self) -> Hashable:
        """Equal on all members that wait in the same collective."""
        number = self.status.generation, self.status.collective, self.status.collective_bytes
        return self.place, number, self.own_collective and innermost(self.stack)


@dataclass(frozen=True)
class HangVerdict:
    culprits: tuple[str, ...]  # ids in rank order; empty if no member is to blame
    paragraph: str  # for the log
    action: Action


def diagnose(
    members: Iterable[MemberSnapshot], limits: ElasticLimits | None = None
) -> HangVerdict | None:
    """Return the verdict on a generation; None if nothing hangs or a rank is only slow."""
    limits = limits or ElasticLimits()
    present = sorted(members, key=lambda member: member.rank)
    step_s = max((member.status.step_s for member in present), default=0.0)
    late = [
        member
        for member in present
        if stalled_s(member, limits) > stall_limit_s(member, limits, step_s)
    ]
    stuck = [member for member in late if cannot_move(member, limits)]
    culprits = [member for member in late if member in stuck or not member.is_waiting]
    clauses = [describe(group, limits) for group in grouped(culprits, lambda m: problem(m, limits))]
    if len(culprits) == len(present) > 1 and not stuck:
        text = SHARED_CAUSE.format(count=len(culprits), clauses="; ".join(clauses))
        if limits.on_hang != "evict" or min(member.status.moved_s for member in late) > COMMON_S:
            return verdict(text, culprits, limits)
        return HangVerdict((), f"{text}. They have {format_duration(COMMON_S)} to recover.", "warn")
    if culprits:
        others = [member for member in present if member.is_waiting and member not in culprits]
        waiting = grouped(others, lambda member: member.place)
        clauses += [clause(ranks_of(group), "waiting", group) for group in waiting]
        return verdict("; ".join(clauses), culprits, limits)
    return blame_mismatch(late, limits) if late and len(late) == len(present) else None


def blame_mismatch(members: Sequence[MemberSnapshot], limits: ElasticLimits) -> HangVerdict:
    """All members wait in collectives, in different ones or, if the network is cut, in one."""
    groups = grouped(members, lambda member: member.collective)
    groups.sort(key=lambda group: (len(group), group[0].rank))
    clauses = "; ".join(clause(who(group), "", group, numbered=True) for group in groups)
    if len(groups) == 1:
        return verdict(NETWORK.format(clauses=clauses, hosts=hosts_of(members)), (), limits)
    has_majority = len(groups[-1]) > len(groups[-2])
    fewer = [member for group in groups[:-1] for member in group if has_majority]
    culprits = sorted(fewer, key=lambda member: member.rank)
    return verdict(MISMATCH.format(clauses=clauses), culprits, limits)


def verdict(text: str, culprits: Sequence[MemberSnapshot], limits: ElasticLimits) -> HangVerdict:
    """Return the verdict with what `limits.on_hang` makes of it."""
    action: Action = limits.on_hang
    if action == "evict" and not culprits:
        action = "regroup"
    end = ACTION_WORDS[action].format(ranks=ranks_of(culprits))
    return HangVerdict(tuple(member.id for member in culprits), f"{text}. {end}", action)


def cannot_move(
    member: MemberSnapshot, limits: ElasticLimits
) -> Literal["", "exited", "stopped", "unheard"]:
    """Return why the member's process cannot run at all; "" if it can."""
    if member.state in ("Z", "X"):
        return "exited"
    if member.state in ("T", "t"):
        return "stopped"
    return "unheard" if member.state == "" and member.silent_s > limits.heartbeat_timeout_s else ""


def stalled_s(member: MemberSnapshot, limits: ElasticLimits) -> float:
    """Return seconds without progress; for a stopped process, since its last heartbeat."""
    stopped = cannot_move(member, limits) in ("stopped", "unheard")
    return min(member.status.moved_s, member.silent_s) if stopped else member.status.moved_s


def stall_limit_s(member: MemberSnapshot, limits: ElasticLimits, step_s: float) -> float:
    """Return the allowed seconds without progress. step_s: median step of the slowest member."""
    if cannot_move(member, limits):
        return limits.hang_timeout_s
    phase = member.status.phase
    first_s = FIRST_STEP_S if member.status.first_step else 0.0
    allowance_s = {**ALLOWANCES_S, "evaluating": limits.evaluate_timeout_s}.get(phase, 0.0)
    return max(limits.hang_timeout_s, MEDIAN_STEPS * step_s, first_s, allowance_s)


@dataclass
class Watchdog:
    limits: ElasticLimits
    host: str  # of the coordinator, where it can see the state of processes
    # Requests the stack of a member's main thread; `on_stack` takes the answer.
    ask_stack: Callable[[str], None]
    statuses: dict[str, tuple[Status, float]] = field(default_factory=dict)  # id -> (newest, when)
    stacks: dict[str, str] = field(default_factory=dict)
    _checked_s: float = 0.0
    _suspects: tuple[str, ...] = ()
    _suspected_s: float = 0.0
    _reported: tuple[Any, ...] = ()

    def on_heartbeat(self, id: str, status: Mapping[str, Any] | None, now_s: float) -> None:
        if status:
            self.statuses[id] = (Status(**status), now_s)

    def on_stack(self, id: str, text: str) -> None:
        self.stacks[id] = text

    def reset(self) -> None:
        """Forget the previous generation."""
        self.statuses = {}
        self.stacks = {}
        self._suspects = ()
        self._reported = ()

    def new_verdict(self, generation: Generation, now_s: float) -> HangVerdict | None:
        """Return each verdict once; None while nothing hangs or stacks are awaited."""
        if now_s - self._checked_s < CHECK_S:
            return None
        self._checked_s = now_s
        snapshots = [
            self._snapshot(member, rank, now_s) for rank, member in enumerate(generation.members)
        ]
        verdict = diagnose([snapshot for snapshot in snapshots if snapshot], self.limits)
        if verdict is None:
            self._suspects, self.stacks = (), {}  # the next hang is elsewhere
            return None
        missing = [id for id in verdict.culprits if id not in self.stacks]
        if verdict.culprits and self._suspects != verdict.culprits:
            self._suspects, self._suspected_s = verdict.culprits, now_s
            for id in missing:
                self.ask_stack(id)
            return None
        if missing and now_s - self._suspected_s < STACK_S:
            return None
        if self._reported == (verdict.culprits, verdict.action):
            return None
        self._reported = (verdict.culprits, verdict.action)
        return verdict

    def _snapshot(self, member: Member, rank: int, now_s: float) -> MemberSnapshot | None:
        if member.id not in self.statuses:
            return None
        status, at_s = self.statuses[member.id]
        state = ""
        with suppress(OSError):
            state = process_stat(member.pid)[0] if member.host == self.host else "R"
        age_s, stack = now_s - at_s, self.stacks.get(member.id, "")
        return MemberSnapshot(
            member.id, member.host, member.slot, rank, status.after(age_s), age_s, state, stack
        )


def read_status(path: Path) -> dict[str, Any] | None:
    """Read the status board at `path` as JSON; None when there is none."""
    try:
        return asdict(status_board.read_status(path))
    except OSError:
        return None


# Words.


def problem(member: MemberSnapshot, limits: ElasticLimits) -> tuple[str, str, str]:
    """Return (key of PROBLEM_WORDS, place, line): members with the same share a clause."""
    kind: str = cannot_move(member, limits)
    if not kind and member.silent_s > limits.heartbeat_timeout_s:
        kind = "blocked" if member.state == "D" else "spinning"
    return kind, member.place, innermost(member.stack)


def describe(group: Sequence[MemberSnapshot], limits: ElasticLimits) -> str:
    return clause(who(group), problem(group[0], limits)[0], group)


def clause(name: str, kind: str, group: Sequence[MemberSnapshot], *, numbered: bool = False) -> str:
    """numbered: with the number and size of a collective of the library."""
    first, status = group[0], group[0].status
    where, line = first.place, innermost(first.stack)
    if numbered and not first.own_collective:
        size = f", {format_bytes(status.collective_bytes)}" if status.collective_bytes else ""
        where += f" (collective {status.collective} of generation {status.generation}{size})"
    where += f" for {format_duration(max(member.status.moved_s for member in group))}"
    where += f", at {line}" if line else ""
    silent = format_duration(max(member.silent_s for member in group))
    return f"{name}: {PROBLEM_WORDS[kind].format(where=where, silent=silent)}"


def grouped(
    members: Iterable[MemberSnapshot], key: Callable[[MemberSnapshot], Hashable]
) -> list[list[MemberSnapshot]]:
    groups: dict[Hashable, list[MemberSnapshot]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return list(groups.values())


def who(members: Sequence[MemberSnapshot]) -> str:
    """ "rank 2 (host b, slot 0, pid 4711)", "ranks 2 and 3 (host b)"."""
    more = f", slot {members[0].slot}, pid {members[0].status.pid}" if len(members) == 1 else ""
    return f"{ranks_of(members)} (host {hosts_of(members)}{more})"


def hosts_of(members: Sequence[MemberSnapshot]) -> str:
    return join_words(sorted({member.host for member in members}))


def ranks_of(members: Sequence[MemberSnapshot]) -> str:
    ranks = join_words([str(rank) for rank in sorted(member.rank for member in members)])
    return f"rank{'s' if len(members) > 1 else ''} {ranks}"


LINE = re.compile(r"(.+):(\d+) in (.+?): (.*)")
COLLECTIVES = "distributed_c10d.py"
COLLECTIVE = re.compile(rf"{re.escape(COLLECTIVES)}:\d+ in (.+?): ")
# Python's files, installed packages.
NOT_THE_USERS = re.compile(r"[/\\]lib(64)?[/\\]python3|site-packages|dist-packages|^<")


def stack_of(thread_id: int | None = None, *, frames: int = 40) -> str:
    """Return the stack of a thread (None: the main thread), innermost call last; "" if it exited.
    PATH:LINE in FUNCTION: SOURCE. Reads the source files, so call it on a thread that may block on
    disk. The tensor size of a torch.distributed collective follows its name."""
    frame = sys._current_frames().get(thread_id or threading.main_thread().ident or 0)
    if frame is None:
        return ""
    *outer, inner = traceback.extract_stack(frame, frames)
    tensor_bytes = (
        getattr(frame.f_locals.get("tensor"), "nbytes", None)
        if inner.filename.endswith(COLLECTIVES)
        else None
    )
    size = f" of {format_bytes(tensor_bytes)}" if tensor_bytes is not None else ""
    calls = [(call, "") for call in outer] + [(inner, size)]
    return "\n".join(
        f"{call.filename}:{call.lineno} in {call.name}{size}: {call.line or ''}"
        for call, size in calls
    )


def innermost(stack: str) -> str:
    """Return the innermost line, preferably of the user: "model.py:83 in forward: `sleep(9)`"."""
    calls = [match.groups() for match in map(LINE.fullmatch, stack.splitlines()) if match]
    user_calls = [call for call in calls if not NOT_THE_USERS.search(call[0])]
    for path, line, function, source in (user_calls or calls)[-1:]:
        return f"{PurePath(path).name}:{line} in {function}" + (f": `{source}`" if source else "")
    return ""
