"""Additions to saves and resumes for a run in an object store.

Only a run whose folder is a working copy of a store loads the code for it.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.object_store.storage import STORE_FILE


def refresh(run: Path) -> None:
    """Bring the working copy to the newest snapshot, but for the run.json that this start has
    written. StoreError, CheckpointError."""
    if (run / STORE_FILE).exists():
        from lockstep.remote.host_copy import refresh_copy

        refresh_copy(run, keep=["run.json"])


def wait_until_published(run: Path, step: int) -> None:
    """Wait until the store has the checkpoint of `step`: else the next rank 0 saves the step
    again."""
    from lockstep.remote.host_copy import wait_until_published

    wait_until_published(run, step)
