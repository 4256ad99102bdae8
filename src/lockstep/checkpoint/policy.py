"""Which checkpoint to resume from, which ones to delete: decisions over lists of steps. No disk in here."""

from __future__ import annotations

from collections.abc import Collection

from lockstep.errors import CheckpointError, UsageError


def choose(resume: str, steps: Collection[int]) -> tuple[int | None, str]:
    """(the step to resume from, or None to start at step 0; why).

    resume  "auto": the newest if there is one; "required": the newest; "never": none; or a step
    steps   those with a committed checkpoint
    """
    there = show_steps(steps)
    if resume == "never":
        return None, f"starts at step 0, as --resume never asks ({there})"
    if resume in ("auto", "required"):
        if steps:
            return max(steps), f"goes on at step {max(steps)}, the newest checkpoint"
        if resume == "auto":
            return None, "starts at step 0: there is no checkpoint yet"
        raise CheckpointError("there is no checkpoint to resume from", "--resume required", "try --resume auto")
    if not resume.isdecimal() or len(resume) > 18:
        raise UsageError(
            f"--resume {resume[:40]!r} is neither a step nor auto, never or required",
            there,
            "leave --resume out to go on from the newest checkpoint",
        )
    if int(resume) not in steps:
        raise CheckpointError(
            f"there is no checkpoint of step {int(resume)}", f"--resume {resume}; {there}", "see lockstep checkpoint list"
        )
    return int(resume), f"goes on at step {int(resume)}, as --resume asks"


def expendable(steps: Collection[int], *, keep: int, protect: Collection[int], good: int | None) -> list[int]:
    """The steps that retention deletes, ascending.

    keep     newest ones to keep; 0: all
    protect  steps to keep besides (the best ones)
    good     the last one known to be whole: kept, though it may be older than others that nobody has read
    """
    newest = sorted(steps)[-keep:] if keep else steps
    return sorted(step for step in steps if step not in newest and step not in protect and step != good)


def show_steps(steps: Collection[int]) -> str:
    """A phrase that lists the steps there are, the middle left out when they are many."""
    words = [str(step) for step in sorted(steps)]
    if not words:
        return "there are no checkpoints"
    return "checkpoints: " + ", ".join(words if len(words) <= 12 else [*words[:3], "...", *words[-8:]])
