"""The task that a run names."""

from __future__ import annotations

from pathlib import Path

from lockstep.config import Run
from lockstep.tasks.language import Language
from lockstep.tasks.task import Task
from lockstep.tasks.translation import Translation
from lockstep.world import World


def open_task(run: Run, folder: Path, world: World) -> Task:
    """Collective. What the run trains, with its data prepared under `folder`. DataError when that cannot be done."""
    if run.task == "pretrain":
        return Language.open(run, folder, world)
    return Translation.open(run, folder, world)
