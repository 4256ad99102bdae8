"""Nothing moves: who holds the others up, where, since when, and what is done about it.

Each member says what it is doing (board.py), and how long ago it last moved by the clock of its own host: ages are compared, never the
clocks of two hosts. Whoever is not in a collective is on its own and must go on by itself; whoever is in one waits for the others. A
collective that the loop calls by itself stands on no board, but in the stack of its thread.

    somebody on its own does not move                       it is the culprit, the others wait for it
    somebody on its own still moves, or may take its time   nothing hangs, whatever the others wait for
    all wait, not for the same thing                        those that are alone with theirs are the culprits
    all wait for the same thing                             no member is to blame but the network between them
"""

from __future__ import annotations

import math
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from lockstep.runtime.status_board import Doing, Phase
from lockstep.units import show_bytes, show_seconds

WAITING: tuple[Phase, ...] = ("waiting for others", "joining", "reducing", "voting")  # for each other

ALLOWANCES_S: dict[Phase, float] = {
    "starting": 120.0,
    "joining": 120.0,
    "preparing": math.inf,  # as long as the corpus takes; a process that is stopped or has exited is reported all the same
    "compiling": 600.0,
    "saving": 600.0,
    "evaluating": 1800.0,
}

Action = Literal["evict", "regroup", "end", "tell"]


@dataclass(frozen=True)
class Limits:
    """From when on standing still is a hang.

    hang_s         seconds without entering a phase or a collective
    median_steps   the same in median steps, where that is longer: slow machines and slow links get more time
    first_step_s   in a generation's first step, which warms up
    allowances_s   of the phases that may take longer
    common_s       when all hang in something of their own at once, what they share (a disk) may come back; then they are ended too
    silent_s       without an answer for so long, a member is called silent
    then           what is done: "evict" the culprits, "end" the run, or only "tell"
    """

    hang_s: float = 10.0
    median_steps: float = 10.0
    first_step_s: float = 60.0
    allowances_s: Mapping[Phase, float] = field(default_factory=ALLOWANCES_S.copy)
    common_s: float = 300.0
    silent_s: float = 3.0
    then: Literal["evict", "end", "tell"] = "evict"


@dataclass(frozen=True)
class Seen:
    """A member as the one who judges sees it.

    doing     the newest that is known of it, grown older (Doing.after) since it was said
    silent_s  seconds since it last answered
    state     its process as proc(5) has it: "R", "S", "D", "T", "Z"; "" when its host does not say
    stack     where its main thread is, from `stack_of`; may be empty
    """

    id: str
    host: str
    slot: int
    rank: int
    doing: Doing
    silent_s: float = 0.0
    state: str = ""
    stack: str = ""


@dataclass(frozen=True)
class Verdict:
    """What hangs.

    culprits   ids, in the order of their ranks; none when no member is to blame
    paragraph  for people
    action     "evict": end the culprits and go on without them; "regroup": all leave the group and form another; "end" the run; "tell"
    """

    culprits: tuple[str, ...]
    paragraph: str
    action: Action


def judge(members: Iterable[Seen], limits: Limits | None = None) -> Verdict | None:
    """The verdict over the members of one generation; None when nothing hangs, or somebody is only slow."""
    limits = limits or Limits()
    present = sorted((one for one in members if one.doing.phase != "idle"), key=lambda one: one.rank)
    step_s = max((one.doing.step_s for one in present), default=0.0)
    late = [one for one in present if still_s(one, limits) > patience_s(one, limits, step_s)]
    culprits = [one for one in late if halted(one, limits) or not in_collective(one)]
    if len(culprits) == len(present) > 1 and not any(halted(one, limits) for one in culprits):
        return common(culprits, limits)
    if culprits:
        return blame(culprits, [one for one in present if one not in culprits], limits)
    if not late or len(late) < len(present) or all(one.doing.phase == "waiting for others" for one in present):
        return None
    return apart(late, limits)


def in_collective(one: Seen) -> bool:
    """Whether it waits for others: in a collective of ours, or, by its stack, in one that the loop itself has called."""
    return one.doing.phase in WAITING or its_own_collective(one) != ""


def its_own_collective(one: Seen) -> str:
    """The function of torch.distributed in which its loop waits for others, and the size of its tensor; "" when it is in none, or in one of
    ours. As in: all_reduce of 8 bytes"""
    found = None if one.doing.phase in WAITING else COLLECTIVE.search(one.stack.rpartition("\n")[2])
    return found[1] if found else ""


def halted(one: Seen, limits: Limits) -> Literal["", "exited", "stopped", "unheard"]:
    """Why its process cannot move at all; "" when it can."""
    if one.state in ("Z", "X"):
        return "exited"
    if one.state in ("T", "t"):
        return "stopped"
    return "unheard" if one.state == "" and one.silent_s > limits.silent_s else ""


def still_s(one: Seen, limits: Limits) -> float:
    """For how long it has not moved. Being stopped begins with the silence, also where a long phase began before."""
    stopped = halted(one, limits) in ("stopped", "unheard")
    return min(one.doing.moved_s, one.silent_s) if stopped else one.doing.moved_s


def patience_s(one: Seen, limits: Limits, step_s: float) -> float:
    """How long it may go without moving. step_s: median seconds of a step, of the slowest member."""
    if halted(one, limits):
        return limits.hang_s
    first_s = limits.first_step_s if one.doing.first_step else 0.0
    return max(limits.hang_s, limits.median_steps * step_s, first_s, limits.allowances_s.get(one.doing.phase, 0.0))


# The three verdicts.


def blame(culprits: Sequence[Seen], others: Sequence[Seen], limits: Limits) -> Verdict:
    """Members that hang by themselves, and who waits for them."""
    told = "; ".join([*clauses(culprits, limits), *waits(others, "it" if alone(culprits) else "them")])
    subject = "It" if alone(culprits) else "They"
    return Verdict(ids(culprits), f"{told}. {consequence(subject, culprits, others, limits)}", limits.then)


def common(members: Sequence[Seen], limits: Limits) -> Verdict:
    """All members hang, each by itself: the cause is something that they share."""
    told = "; ".join(clauses(members, limits))
    begin = f"none of the {len(members)} ranks moves, and none waits for another, so look for what they share, such as a disk: {told}."
    if limits.then == "evict" and min(one.doing.moved_s for one in members) <= limits.common_s:
        return Verdict((), f"{begin} They are given {show_seconds(limits.common_s)}.", "tell")
    return Verdict(ids(members), f"{begin} {consequence('They', members, (), limits)}", limits.then)


def apart(members: Sequence[Seen], limits: Limits) -> Verdict:
    """All members wait for each other: for the same thing, or for different ones."""
    groups: dict[tuple[object, ...], list[Seen]] = {}
    for one in members:
        doing = one.doing
        where = doing.generation, doing.step, doing.phase, doing.collective, doing.collective_bytes
        own = (its_own_collective(one), innermost(one.stack)) if its_own_collective(one) else ()
        groups.setdefault((*where, *own), []).append(one)
    if len(groups) == 1:
        return link(members, limits)
    most = max(map(len, groups.values()))
    astray = [one for group in groups.values() if len(group) < most for one in group]
    if len([group for group in groups.values() if len(group) == most]) > 1:
        astray = []  # nobody can say which half is right
    told = ", while ".join(
        f"{who(group)} {have(group)} waited in {entered(group[0])} for {age(group)}{at(group[0])}"
        for group in sorted(groups.values(), key=lambda group: (len(group), group[0].rank))
    )
    rule = "All must enter the same collectives, in the same order and with tensors of the same size."
    end = consequence(names(astray).capitalize(), astray, members, limits)
    action: Action = "regroup" if limits.then == "evict" and not astray else limits.then
    return Verdict(ids(astray), f"the ranks wait, but not for the same thing: {told}. {rule} {end}", action)


def link(members: Sequence[Seen], limits: Limits) -> Verdict:
    """All members are in one collective, and it does not move."""
    hosts = sorted({one.host for one in members})
    between = f"the network between {listed(hosts)}" if len(hosts) > 1 else f"their connection on {hosts[0]}"
    if alone(members):
        told = f"{clauses(members, limits)[0]}, in which nobody else is"
    else:
        what = f"{entered(members[0])} for {age(members)}{at(members[0])}"
        told = f"all {len(members)} ranks have been in {what}; each of them is there, so it is {between} that does not move"
    return Verdict((), f"{told}. {consequence('', (), members, limits)}", "regroup" if limits.then == "evict" else limits.then)


# Their words.

AT: dict[Phase, str] = {
    "idle": "standing by",
    "starting": "starting",
    "waiting for others": "waiting for more members",
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


def clauses(members: Sequence[Seen], limits: Limits) -> list[str]:
    """What is wrong with these members, without a full stop: a clause for all that are in the same trouble at the same place."""
    groups: dict[tuple[object, ...], list[Seen]] = {}
    for one in members:
        doing = one.doing
        trouble = halted(one, limits), one.silent_s > limits.silent_s, one.state == "D"
        groups.setdefault((*trouble, doing.generation, doing.step, doing.phase, innermost(one.stack)), []).append(one)
    return [clause(group, limits) for group in groups.values()]


def clause(group: Sequence[Seen], limits: Limits) -> str:
    """What is wrong with members that are in the same trouble at the same place."""
    one = group[0]
    where = AT[one.doing.phase].format(step=one.doing.step, generation=one.doing.generation)
    been = f"{have(group)} been {where} for {show_seconds(max(each.doing.since_s for each in group))}{at(one)}"
    silent = show_seconds(max(each.silent_s for each in group))
    why = halted(one, limits)
    if why == "exited":
        return f"{who(group)} {have(group)} exited, {age(group)} after {'it was' if alone(group) else 'they were'} last seen {where}"
    if why == "unheard":
        return f"{who(group)} {have(group)} not answered for {silent}, and nothing else on the host has; last seen {where}"
    if why == "stopped":
        return f"{who(group)} {'is' if alone(group) else 'are'} stopped (by SIGSTOP, or a debugger) and {been}"
    if one.silent_s > limits.silent_s:
        holder = "waiting for a disk or a device" if one.state == "D" else "something holds Python's lock"
        return f"{who(group)} {been}, alive but without an answer for {silent} ({holder})"
    return f"{who(group)} {been}"


def waits(others: Sequence[Seen], whom: str) -> list[str]:
    """Who waits, in what and since when: a clause for each thing that is waited for."""
    groups: dict[str, list[Seen]] = {}
    for one in others:
        if in_collective(one):
            groups.setdefault(thing(one), []).append(one)
    return [f"{names(group)} {have(group)} waited for {whom} in {what} for {age(group)}" for what, group in groups.items()]


def thing(one: Seen) -> str:
    """What a waiting member waits in."""
    doing = one.doing
    if name := its_own_collective(one):
        return f"its own {name} in step {doing.step}"
    return {
        "reducing": f"the reduction of step {doing.step}",
        "voting": f"the vote of step {doing.step}",
        "joining": f"the group of generation {doing.generation}",
    }.get(doing.phase, "the gathering of the next generation")


def entered(one: Seen) -> str:
    """The same with the number of the collective, if it has one."""
    doing = one.doing
    if its_own_collective(one):
        return thing(one)
    size = f", {show_bytes(doing.collective_bytes)}" if doing.collective_bytes else ""
    return f"{thing(one)} (collective {doing.collective} of generation {doing.generation}{size})"


def consequence(subject: str, culprits: Sequence[Seen], others: Sequence[Seen], limits: Limits) -> str:
    """What is done about it. subject: what the culprits are called here."""
    if limits.then == "end":
        return "The run is ended."
    if limits.then == "tell":
        return "Nothing is done about it."
    if not culprits:
        return "The group is formed anew, and the step is done again."
    deed = "left out" if all(halted(one, limits) in ("exited", "unheard") for one in culprits) else "ended"
    go_on = "without" if others else "with others in place of"
    return f"{subject} {'is' if alone(culprits) else 'are'} {deed}, and the run goes on {go_on} {'it' if alone(culprits) else 'them'}."


def ids(members: Sequence[Seen]) -> tuple[str, ...]:
    """In the order of their ranks."""
    return tuple(one.id for one in sorted(members, key=lambda one: one.rank))


def who(members: Sequence[Seen]) -> str:
    """ "rank 2 (host b, slot 0, pid 4711)", "ranks 2 and 3 (host b)"."""
    hosts = sorted({one.host for one in members})
    more = f", slot {members[0].slot}, pid {members[0].doing.pid}" if alone(members) else ""
    return f"{names(members)} (host{'s' if len(hosts) > 1 else ''} {listed(hosts)}{more})"


def names(members: Sequence[Seen]) -> str:
    """ "rank 1", "ranks 0, 2 and 3"."""
    return f"rank{'' if alone(members) else 's'} {listed([str(rank) for rank in sorted(one.rank for one in members)])}"


def listed(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def alone(members: Sequence[Seen]) -> bool:
    return len(members) == 1


def have(members: Sequence[Seen]) -> str:
    return "has" if alone(members) else "have"


def age(members: Sequence[Seen]) -> str:
    """Since when the first of them waits."""
    return show_seconds(max(one.doing.moved_s for one in members))


def at(one: Seen) -> str:
    line = innermost(one.stack)
    return f", at {line}" if line else ""


# Stacks.

LINE = re.compile(r"(.+):(\d+) in (.+?): (.*)")
COLLECTIVES = "distributed_c10d.py"
COLLECTIVE = re.compile(rf"{re.escape(COLLECTIVES)}:\d+ in (.+?): ")
NOT_THE_USERS = re.compile(r"[/\\]lib(64)?[/\\]python3|site-packages|dist-packages|^<")  # Python's own files, and what pip installed


def stack_of(thread_id: int | None = None, *, frames: int = 40) -> str:
    """Where a thread is (None: the main one), a line for each call, innermost last; "" when there is no such thread.

    PATH:LINE in FUNCTION: SOURCE. Reads the source files, so not for a thread that must not wait for a disk. The size of the tensor that a
    collective of torch.distributed waits with stands behind its name.
    """
    frame = sys._current_frames().get(thread_id or threading.main_thread().ident or 0)
    calls = traceback.extract_stack(frame, frames) if frame else []
    lines = [f"{call.filename}:{call.lineno} in {call.name}: {call.line or ''}" for call in calls]
    if frame and frame.f_code.co_filename.endswith(COLLECTIVES):
        bytes = getattr(frame.f_locals.get("tensor"), "nbytes", None)
        size = f" of {show_bytes(bytes)}" if bytes is not None else ""
        lines[-1] = f"{calls[-1].filename}:{calls[-1].lineno} in {calls[-1].name}{size}: {calls[-1].line or ''}"
    return "\n".join(lines)


def innermost(stack: str) -> str:
    """The innermost line of a stack outside Python and its installed packages, the innermost at all if none is; "" for no stack.

    As in: model.py:83 in forward: `time.sleep(600)`
    """
    calls = [match.groups() for match in map(LINE.fullmatch, stack.splitlines()) if match]
    theirs = [call for call in calls if not NOT_THE_USERS.search(call[0])]
    for path, line, function, source in (theirs or calls)[-1:]:
        return f"{PurePath(path).name}:{line} in {function}" + (f": `{source}`" if source else "")
    return ""
