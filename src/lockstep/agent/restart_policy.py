"""What follows from the end of a worker: a new one, at once or later; nothing, for it was done; or the end of the run.

A worker that was killed, or lost its peers, gets a successor at once; when that one ends as well before it got anywhere, the next comes
later and later. An error of its own may have been bad luck: the others do the step again, and so does the successor. When it ends the
workers of a slot at the same step again and again, it is a fault of the program or of its data, and the run ends with that error. A signal
by which a process ends itself (SIGSEGV and the like) is such an error. SIGKILL comes from outside, at any moment, and ends no run; but when
it strikes at the very same place of the same step again and again, it is the kernel's, for want of memory. What no repetition mends (the
run's values, damaged data, a loss that is not finite) ends it the first time.
"""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import LockstepError
from lockstep.runtime.exit_report import End, code_of, kind, signal_name, tell, tell_early

FATAL = (2, 3, 4)  # usage and config, data and checkpoints, diverged (errors.py)
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)  # a process brings them on itself


@dataclass(frozen=True)
class Rules:
    """How patient an agent is.

    crashes    errors of its own after which a slot that got no further ends the run
    kills      by SIGKILL in a row, all at one place of one step, after which the same follows
    pause_s    before the second successor in a row; the first comes at once, and each pause is twice the one before
    longest_s  of these pauses
    forget_s   of life after which the next end is the first in a row
    """

    crashes: int = 3
    kills: int = 6
    pause_s: float = 0.5
    longest_s: float = 30.0
    forget_s: float = 60.0


RULES = Rules()


@dataclass(frozen=True)
class Past:
    """What the ends of a slot's workers have left.

    restarts  in a row, none of which got further or lived long
    crashes   errors of its own since it last got further
    step      the highest step that an end told of
    kills     by SIGKILL in a row, at `place`
    """

    restarts: int = 0
    crashes: int = 0
    step: int = -1
    kills: int = 0
    place: str = ""


@dataclass(frozen=True)
class Next:
    """What follows, and why.

    wait_s      until the successor starts
    code, text  of the run that ends: its exit code, and what to show
    """

    what: Literal["restart", "done", "end"]
    why: str
    wait_s: float = 0.0
    code: int = 0
    text: str = ""


def after(end: End, past: Past, *, lived_s: float, step: int, stopping: bool, rules: Rules, place: str = "") -> tuple[Next, Past]:
    """(what follows from `end`, what its slot remembers then).

    lived_s   from the worker's start to its end
    step      at which the newest generation began, or that its board shows: for a worker that could not say how far it was
    place     where in which step it was; "": in none, or nobody knows
    stopping  the run, or this host, is on its way out
    """
    account, what, words = end.account, kind(end), in_short(end)
    if account and account.finished and account.drained:
        return Next("done", f"{words}: its host is taken away"), past
    if stopping or (account and account.finished) or what == "left":
        return Next("done", words), past
    if code_of(end) in FATAL:
        return Next("end", words, code=code_of(end), text=own_words(end)), past

    step = account.step if account else step
    further = step > past.step
    crashes = (0 if further else past.crashes) + own_fault(end)
    restarts = 0 if further or lived_s >= rules.forget_s else past.restarts
    place = place if killed(end) else ""
    kills = (past.kills if place == past.place else 0) + 1 if place else 0
    now = Past(restarts + 1, crashes, max(step, past.step), kills, place)
    if own_fault(end) and crashes >= rules.crashes:
        where = f"at step {step}" if step >= 0 else "before its first step"
        by = signal_name(end.signal) if crashed(end) else "an error of its own"
        return the_end(end, f"{end} is worker number {crashes} in a row to end {where} by {by}", "mend what the error above says"), now
    if kills >= rules.kills:
        what = f"{end} is worker number {kills} in a row that SIGKILL has ended in the {place}"
        return the_end(end, what, "give the workers more memory, or want less of it (batch.tokens, memory.recompute)"), now
    wait_s = pause(restarts, rules)
    return Next("restart", f"{words}; {f'a new one starts in {wait_s:g} s' if wait_s else 'a new one starts at once'}", wait_s), now


def the_end(end: End, what: str, hint: str) -> Next:
    """The run ends: first the last words of the worker, then why nobody comes after it."""
    error = LockstepError(what, f"log: {end.log}" if end.log else "", f"{hint}; the same command goes on from the newest checkpoint")
    return Next("end", in_short(end), code=code_of(end) or 1, text=f"{own_words(end)}\n{error}")


def only_here(code: int, at_work: Collection[str], host: str) -> bool:
    """Whether an end is this host's alone: it came with values or files that are not those of the others, who are at work without it."""
    return code in (2, 3) and bool(at_work) and host not in at_work


def pause(restarts: int, rules: Rules) -> float:
    """Seconds before the next successor, after `restarts` in a row."""
    return min(rules.longest_s, rules.pause_s * 2.0 ** min(restarts - 1, 60)) if restarts else 0.0


def own_fault(end: End) -> bool:
    """Whether a worker ended by itself and not as it should: an exception, an exit in the middle, a crash."""
    return kind(end) == "broke off" or (kind(end) == "failed" and bool(end.account or (end.code or 0) > 0 or crashed(end)))


def crashed(end: End) -> bool:
    """Whether a signal ended it that it has brought on itself."""
    return not end.account and end.signal in CRASHES and end.signal not in end.sent


def killed(end: End) -> bool:
    """Whether SIGKILL ended it, and its agent did not send that."""
    return not end.account and end.signal == signal.SIGKILL and signal.SIGKILL not in end.sent


def own_words(end: End) -> str:
    """The failure in the words of the worker, or in ours where it had none."""
    return tell_early(end) if kind(end) == "broke off" else tell(end, [end], ())


def in_short(end: End) -> str:
    """An end in one line."""
    account = end.account
    if account and not account.finished and account.text:
        lines = account.text.strip().splitlines()
        return lines[-1] if lines[0].startswith("Traceback") else lines[0]
    if account and account.finished:
        return f"it left with exit code {account.code}"
    if end.signal:
        return f"ended by {signal_name(end.signal)}"
    if end.code is None:
        return "it ended without a word"
    return "it broke off with exit code 0" if end.code == 0 else f"it ended with exit code {end.code}, without a word"
