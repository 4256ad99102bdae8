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
"""

import math
import re
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.runtime.status_board import Phase, Status
from lockstep.units import format_bytes, format_duration, join_words

WAITING: tuple[Phase, ...] = ("joining", "reducing", "voting")

ALLOWANCES_S: dict[Phase, float] = {  # without progress, in phases that may take longer
    "starting": 120.0,
    "joining": 120.0,
    "preparing": math.inf,  # no limit: grows with the corpus; a stopped or exited process is still reported
    "compiling": 600.0,
    "saving": 600.0,
}
# Entering a phase or a collective is progress. A rank may be without progress for
# `hang_timeout_s`, or longer:
MEDIAN_STEPS = 10.0  # for slow machines
FIRST_STEP_S = 60.0  # in a generation's first step, which warms up
COMMON_S = 300.0  # before all ranks are killed if all hang outside collectives: their shared cause (a disk) may recover

# Kill the culprits and continue without them; form a new group of all members; end the run; only
# log.
Action = Literal["evict", "regroup", "abort", "warn"]


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
    culprits = [
        member for member in late if cannot_move(member, limits) or not in_collective(member)
    ]
    if len(culprits) == len(present) > 1 and not any(
        cannot_move(member, limits) for member in culprits
    ):
        return blame_shared_cause(culprits, limits)
    if culprits:
        return blame_culprits(
            culprits, [member for member in present if member not in culprits], limits
        )
    return blame_mismatch(late, limits) if late and len(late) == len(present) else None


def in_collective(member: MemberSnapshot) -> bool:
    """Whether it waits in a collective of the library or, by its stack, of the user's loop."""
    return member.status.phase in WAITING or user_collective(member) != ""


def user_collective(member: MemberSnapshot) -> str:
    """Return the collective that the user's loop called, such as "all_reduce of 8 B", or ""."""
    match = (
        None
        if member.status.phase in WAITING
        else COLLECTIVE.search(member.stack.rpartition("\n")[2])
    )
    return match[1] if match else ""


def cannot_move(
    member: MemberSnapshot, limits: ElasticLimits
) -> Literal["", "exited", "stopped", "unheard"]:
    """Return why the member's process cannot run at all; "" if it can."""
    if member.state in ("Z", "X", "T", "t"):
        return "exited" if member.state in ("Z", "X") else "stopped"
    return "unheard" if member.state == "" and member.silent_s > limits.heartbeat_timeout_s else ""


def stalled_s(member: MemberSnapshot, limits: ElasticLimits) -> float:
    """Return seconds without progress; for a stopped process, since its last heartbeat."""
    stopped = cannot_move(member, limits) in ("stopped", "unheard")
    return min(member.status.moved_s, member.silent_s) if stopped else member.status.moved_s


def stall_limit_s(member: MemberSnapshot, limits: ElasticLimits, step_s: float) -> float:
    """Return the allowed seconds without progress. step_s: median step of the slowest member."""
    if cannot_move(member, limits):
        return limits.hang_timeout_s
    first_s = FIRST_STEP_S if member.status.first_step else 0.0
    allowance_s = (
        limits.evaluate_timeout_s
        if member.status.phase == "evaluating"
        else ALLOWANCES_S.get(member.status.phase, 0.0)
    )
    return max(limits.hang_timeout_s, MEDIAN_STEPS * step_s, first_s, allowance_s)


def blame_culprits(
    culprits: Sequence[MemberSnapshot], others: Sequence[MemberSnapshot], limits: ElasticLimits
) -> HangVerdict:
    """Some members hang by themselves; the others wait for them."""
    waiting = grouped(filter(in_collective, others), place)
    clauses = describe_all(culprits, limits)
    clauses += [f"{rank_words(group)}: waiting {place_and_time(group)}" for group in waiting]
    return verdict("; ".join(clauses), culprits, limits)


def blame_shared_cause(members: Sequence[MemberSnapshot], limits: ElasticLimits) -> HangVerdict:
    """All members hang, each by itself."""
    clauses = "; ".join(describe_all(members, limits))
    cause = f"none of the {len(members)} ranks makes progress or waits for another, so look for a shared cause, such as a disk: {clauses}"
    if limits.on_hang == "evict" and min(member.status.moved_s for member in members) <= COMMON_S:
        text = f"{cause}. They have {format_duration(COMMON_S)} to recover."
        return HangVerdict((), text, "warn")
    return verdict(cause, members, limits)


def blame_mismatch(members: Sequence[MemberSnapshot], limits: ElasticLimits) -> HangVerdict:
    """All members wait in collectives, the same or different ones."""
    groups = grouped(members, collective_of)
    if len(groups) == 1:
        return blame_network(members, limits)
    groups.sort(key=lambda group: (len(group), group[0].rank))
    has_majority = len(groups[-1]) > len(groups[-2])
    culprits = [member for group in groups[:-1] for member in group] if has_majority else []
    clauses = "; ".join(f"{who(group)}: {place_and_time(group, numbered=True)}" for group in groups)
    rule = "every rank must call the same collectives, in the same order and with tensors of the same size"
    culprits.sort(key=lambda member: member.rank)
    return verdict(f"mismatched collectives: {clauses}; {rule}", culprits, limits)


def blame_network(members: Sequence[MemberSnapshot], limits: ElasticLimits) -> HangVerdict:
    """All members are in one collective, and it does not complete."""
    hosts = join_words(sorted({member.host for member in members}))
    cause = f"{who(members)}: {place_and_time(members, numbered=True)}; no other rank is missing, so look at the network of {hosts}"
    return verdict(cause, (), limits)


def verdict(text: str, culprits: Sequence[MemberSnapshot], limits: ElasticLimits) -> HangVerdict:
    """Return the verdict with what `limits.on_hang` makes of it."""
    action: Action = limits.on_hang
    if action == "evict" and not culprits:
        action = "regroup"
    end = ACTION_WORDS[action].format(ranks=rank_words(culprits))
    return HangVerdict(tuple(member.id for member in culprits), f"{text}. {end}", action)


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
# By `cannot_move`, or "silent": its process may run, and sends no heartbeat.
PROBLEM_WORDS = {
    "": "{place}",
    "exited": "exited, last seen {place}",
    "unheard": "no heartbeat for {silent}, nor of any other process of the host; last seen {place}",
    "stopped": "stopped (by SIGSTOP or a debugger) {place}",
    "silent": "{place}, alive but without a heartbeat for {silent} ({holder})",
}


def grouped(
    members: Iterable[MemberSnapshot], key: Callable[[MemberSnapshot], Hashable]
) -> list[list[MemberSnapshot]]:
    groups: dict[Hashable, list[MemberSnapshot]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return list(groups.values())


def describe_all(members: Sequence[MemberSnapshot], limits: ElasticLimits) -> list[str]:
    """Return a clause for each group of members with the same problem at the same line."""

    def problem_of(member: MemberSnapshot) -> tuple[str, str]:
        silent = "silent" if member.silent_s > limits.heartbeat_timeout_s else ""
        holder = "blocked in I/O" if member.state == "D" else "a thread holds the GIL"
        return cannot_move(member, limits) or silent, holder

    clauses = []
    for group in grouped(
        members, lambda member: (problem_of(member), place(member), innermost(member.stack))
    ):
        problem, holder = problem_of(group[0])
        silent = format_duration(max(member.silent_s for member in group))
        words = PROBLEM_WORDS[problem].format(
            place=place_and_time(group), silent=silent, holder=holder
        )
        clauses.append(f"{who(group)}: {words}")
    return clauses


def collective_of(member: MemberSnapshot) -> Hashable:
    """Return what is equal on members that wait in the same collective."""
    status, own = member.status, user_collective(member)
    number = status.generation, status.collective, status.collective_bytes
    return place(member), number, own and innermost(member.stack)


def place(member: MemberSnapshot) -> str:
    status, own = member.status, user_collective(member)
    words = f"in its own {own} of step {{step}}" if own else PHASE_WORDS[status.phase]
    return words.format(step=status.step, generation=status.generation)


def place_and_time(group: Sequence[MemberSnapshot], *, numbered: bool = False) -> str:
    """numbered: with the number and size of a collective of the library."""
    first, status, number = group[0], group[0].status, ""
    if numbered and not user_collective(first):
        size = f", {format_bytes(status.collective_bytes)}" if status.collective_bytes else ""
        number = f" (collective {status.collective} of generation {status.generation}{size})"
    seconds = format_duration(max(member.status.moved_s for member in group))
    line = innermost(first.stack)
    return f"{place(first)}{number} for {seconds}" + (f", at {line}" if line else "")


def who(members: Sequence[MemberSnapshot]) -> str:
    """ "rank 2 (host b, slot 0, pid 4711)", "ranks 2 and 3 (host b)"."""
    hosts = join_words(sorted({member.host for member in members}))
    more = f", slot {members[0].slot}, pid {members[0].status.pid}" if len(members) == 1 else ""
    return f"{rank_words(members)} (host {hosts}{more})"


def rank_words(members: Sequence[MemberSnapshot]) -> str:
    ranks = join_words([str(rank) for rank in sorted(member.rank for member in members)])
    return f"rank{'s' if len(members) > 1 else ''} {ranks}"


LINE = re.compile(r"(.+):(\d+) in (.+?): (.*)")
COLLECTIVES = "distributed_c10d.py"
COLLECTIVE = re.compile(rf"{re.escape(COLLECTIVES)}:\d+ in (.+?): ")
NOT_THE_USERS = re.compile(
    r"[/\\]lib(64)?[/\\]python3|site-packages|dist-packages|^<"
)  # Python's files, installed packages


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
