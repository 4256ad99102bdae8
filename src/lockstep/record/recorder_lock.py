"""The lock of the process that records a run: rank 0, or for a moment an evaluator."""

import os
from pathlib import Path

from lockstep.files import try_lock

RECORDER_LOCK = "tracker.lock"


def is_recorded(folder: Path) -> bool:
    """Return whether a living process records the run in `folder`, even if it is paused or cut
    off."""
    if not (folder / RECORDER_LOCK).exists():
        return False
    lock = try_lock(folder / RECORDER_LOCK)
    if lock is not None:
        os.close(lock)
    return lock is None
