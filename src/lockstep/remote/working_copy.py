"""The run folder of this host, whose mirror is in the store.

COPIES/NAME           the working copy: an ordinary run folder
COPIES/NAME.lock      held by the process that mirrors it
COPIES/NAME.owners    ids of the owners that this copy has had, the newest last
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.checkpoint.folder import set_aside
from lockstep.elastic.generation_log import GenerationLog, RunResult
from lockstep.errors import CheckpointError, FencedError, UsageError
from lockstep.files import read_text, try_lock, write_atomic
from lockstep.log import log
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.download import download
from lockstep.remote.snapshots import Ownership, Snapshot, newest, refuse_other_objects, refuse_unsafe_store, wait_until_silent
from lockstep.remote.upload import steps_of
from lockstep.runtime.worker_env import running_workers, state_folder


@contextmanager
def owned_copy(bucket: RunBucket, host: str) -> Iterator[tuple[Path, Ownership]]:
    """Own the run; yield (its working copy, the right to put snapshots).

    A copy of the newest snapshot's owner is continued as it is: it may be ahead of the store. Any
    other copy is set aside, and the snapshot downloaded. UsageError: another training runs; StoreError.
    """
    copy = bucket.address.working_copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    lock = try_lock(copy.with_name(f"{copy.name}.lock"))
    if lock is None:
        what = f"another training is already running in {bucket.address}, on this host"
        raise UsageError(what, f"it holds {copy}.lock", "wait for it, stop it, or choose another --out")
    try:
        refuse_unsafe_store(bucket)
        owners_file = copy.with_name(f"{copy.name}.owners")
        owners = read_text(owners_file).split() if owners_file.exists() and copy.is_dir() else []
        before = newest(bucket)
        if before is None:
            refuse_other_objects(bucket)
            refuse_lost_store(bucket, copy, owners)
            set_copy_aside(copy, "the store holds no run yet")
        elif before.owner not in owners:
            refuse_running_workers(bucket, copy, host)
            before = wait_until_silent(bucket, before)
            set_copy_aside(copy, f"{before.host} has continued the run")
            before = download_copy(bucket, before, copy)
        copy.mkdir(exist_ok=True)
        owner = secrets.token_hex(8)
        write_atomic(owners_file, "\n".join([*owners, owner]))  # before the snapshot: a kill in between must not disown the copy
        try:
            ownership = Ownership(bucket, owner, before)
        except FencedError as error:
            raise UsageError(
                f"another training has just started in {bucket.address}", error.where, "wait for it, or stop it there"
            ) from None
        yield copy, ownership
    finally:
        os.close(lock)


def has_run(copy: Path) -> bool:
    """Return whether a copy has files; a start that failed leaves an empty one."""
    return copy.is_dir() and any(copy.iterdir())


def set_copy_aside(copy: Path, why: str) -> None:
    if has_run(copy):
        log.warning("%s was set aside as %s: %s", copy, set_aside(copy, "old"), why)


def refuse_lost_store(bucket: RunBucket, copy: Path, owners: list[str]) -> None:
    """UsageError when this host has a copy of a run that the store has no longer."""
    if owners and has_run(copy):
        what = f"{bucket.address} is empty, and this host has a copy of its run"
        raise UsageError(what, str(copy), f"restore the objects; or move {copy} aside to train from step 0")


def refuse_running_workers(bucket: RunBucket, copy: Path, host: str) -> None:
    """UsageError when workers of `lockstep launch` still train in a copy that must be set aside."""
    if copy.exists() and (workers := running_workers(state_folder(copy, host))):
        what = f"{len(workers)} workers train in a copy of {bucket.address}, which another start has taken over"
        raise UsageError(what, str(copy), f"stop them: lockstep launch --stop {copy}")


def download_copy(bucket: RunBucket, snapshot: Snapshot, copy: Path) -> Snapshot:
    """Download a snapshot as the working copy; return it, or a newer one. CheckpointError when none of
    its checkpoints is whole."""
    partial = copy.with_name(f"{copy.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    log.info("downloading snapshot %d of %s, put by %s, to %s", snapshot.number, bucket.address, snapshot.host, copy)
    snapshot, problems = download(bucket, snapshot, partial)
    if problems and len(problems) == len(steps_of(snapshot.files)):
        raise CheckpointError("no checkpoint in the store is whole", "\n".join(problems), "restore earlier versions of these objects")
    for problem in problems:
        log.warning("%s; it is omitted", problem)
    # Its members are on other hosts, and lost the run. Without an end, new workers would wait for them.
    generations = GenerationLog(partial / "generations")
    if generations.folder.is_dir() and (last := generations.newest()) and not last.end:
        generations.record_end(RunResult(0, ""), f"continued from {bucket.address}", after=0)
    os.rename(partial, copy)
    return snapshot
