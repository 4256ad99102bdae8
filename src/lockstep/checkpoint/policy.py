"""Which checkpoint to resume from and which ones to delete: pure functions over lists of steps."""

from collections.abc import Collection
from pathlib import Path

from lockstep.errors import CheckpointError, UsageError


def choose_resume_step(resume: str, steps: Collection[int]) -> tuple[int | None, str]:
    """Return (the step to resume from, or None to start at step 1; the reason).

    resume  "auto": the newest of `steps`, if any; "required": the newest; "never": none; or a step
    CheckpointError when the requested checkpoint is missing; UsageError for another `resume`.
    """
    available = show_steps(steps)
    if resume == "never":
        return None, f"starts at step 1, as --resume never asks ({available})"
    if resume in ("auto", "required"):
        if steps:
            return max(steps), f"resumes from step {max(steps)}, the newest checkpoint"
        if resume == "auto":
            return None, "starts at step 1: there is no checkpoint yet"
        raise CheckpointError(
            "there is no checkpoint to resume from", "--resume required", "try --resume auto"
        )
    if not resume.isdecimal() or len(resume) > 18:
        raise UsageError(
            f"--resume {resume[:40]!r} is neither a step nor auto, never or required",
            available,
            "omit --resume to resume from the newest checkpoint",
        )
    if int(resume) not in steps:
        raise missing_checkpoint(int(resume), steps, f"--resume {resume}")
    return int(resume), f"resumes from step {int(resume)}, as --resume asks"


def choose_step(step: int | None, steps: Collection[int], folder: Path | str) -> int:
    """Return `step`, or the newest of `steps` when None. CheckpointError when there is none."""
    if step is None and steps:
        return max(steps)
    if step is None:
        raise CheckpointError(
            "there is no checkpoint yet", str(folder), "wait for the first save of the run"
        )
    if step not in steps:
        raise missing_checkpoint(step, steps, str(folder))
    return step


def missing_checkpoint(step: int, steps: Collection[int], where: str) -> CheckpointError:
    return CheckpointError(
        f"there is no checkpoint of step {step}",
        f"{where}; {show_steps(steps)}",
        "see lockstep checkpoint list",
    )


def steps_to_delete(
    steps: Collection[int], *, keep: int, protect: Collection[int], good: int | None
) -> list[int]:
    """Return the steps that retention deletes, ascending.

    keep     number of newest checkpoints to keep; 0: all
    protect  further steps to keep, such as the best
    good     newest step verified by this process: kept even when newer, unverified ones exist
    """
    newest = sorted(steps)[-keep:] if keep else steps
    return sorted(
        step for step in steps if step not in newest and step not in protect and step != good
    )


def show_steps(steps: Collection[int]) -> str:
    """Return a phrase that lists the steps, without the middle ones of more than 12."""
    words = [str(step) for step in sorted(steps)]
    if not words:
        return "there are no checkpoints"
    return "checkpoints: " + ", ".join(
        words if len(words) <= 12 else [*words[:3], "...", *words[-8:]]
    )
