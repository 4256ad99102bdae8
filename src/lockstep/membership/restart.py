"""What follows from the end of a worker: a new one, at once or later; nothing, for it was done; or the end of the run.

A worker that was killed, or lost its peers, gets a successor at once; when that one ends as well before it got anywhere, the next comes
later and later. An error of its own may have been bad luck: the others do the step again, and so does the successor. When it ends the
workers of a slot at the same step again and again, it is a fault of the program or of its data, and the run ends with that error. What no
repetition mends (the run's values, damaged data, a loss that is not finite) ends it the first time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from lockstep.errors import LockstepError
from lockstep.failures import End, code_of, kind, signal_name, tell, tell_early

FATAL = (2, 3, 4)  # usage and config, data and checkpoints, diverged (errors.py)


@dataclass(frozen=True)
class Rules:
    """How patient an agent is.

    crashes    errors of its own after which a slot that got no further ends the run
    pause_s    before the second successor in a row; the first comes at once, and each pause is twice the one before
    longest_s  of these pauses
    forget_s   of life after which the next end is the first in a row
    """

    crashes: int = 3
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
    """

    restarts: int = 0
    crashes: int = 0
    step: int = -1


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


def after(end: End, past: Past, *, lived_s: float, step: int, stopping: bool, rules: Rules) -> tuple[Next, Past]:
    """(what follows from `end`, what its slot remembers then).

    lived_s   from the worker's start to its end
    step      at which the newest generation began: for a worker that could not say how far it was
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
    now = Past(restarts + 1, crashes, max(step, past.step))
    if own_fault(end) and crashes >= rules.crashes:
        where = f"at step {step}" if step >= 0 else "before its first step"
        error = LockstepError(
            f"{end} is worker number {crashes} in a row to end {where} by an error of its own",
            f"log: {end.log}" if end.log else "",
            "mend what the error above says; the same command goes on from the newest checkpoint",
        )
        return Next("end", words, code=code_of(end) or 1, text=f"{own_words(end)}\n{error}"), now
    wait_s = pause(restarts, rules)
    return Next("restart", f"{words}; {f'a new one starts in {wait_s:g} s' if wait_s else 'a new one starts at once'}", wait_s), now


def only_here(code: int, at_work: Collection[str], host: str) -> bool:
    """Whether an end is this host's alone: it came with values or files that are not those of the others, who are at work without it."""
    return code in (2, 3) and bool(at_work) and host not in at_work


def pause(restarts: int, rules: Rules) -> float:
    """Seconds before the next successor, after `restarts` in a row."""
    return min(rules.longest_s, rules.pause_s * 2.0 ** min(restarts - 1, 60)) if restarts else 0.0


def own_fault(end: End) -> bool:
    """Whether a worker ended by itself and not as it should: an exception, or an exit in the middle. Signals come from outside."""
    return kind(end) == "broke off" or (kind(end) == "failed" and bool(end.account or (end.code or 0) > 0))


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
