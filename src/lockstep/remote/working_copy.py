"""The run folder of this host, whose mirror is in the store.

COPIES/NAME           the working copy: an ordinary run folder
COPIES/NAME.lock      held by the process that mirrors it
COPIES/NAME.owners    ids of the owners that this copy has had, the newest last
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.checkpoint.folder import set_aside
from lockstep.elastic.generation_log import GenerationLog, RunResult
from lockstep.errors import CheckpointError, FencedError, UsageError
from lockstep.files import fsync_folder, read_text, try_lock, write_atomic
from lockstep.log import log
from lockstep.object_store.address import Address
from lockstep.object_store.bucket import RunBucket
from lockstep.object_store.storage import MEMBERSHIP
from lockstep.remote.download import download
from lockstep.remote.snapshots import (
    Ownership,
    Snapshot,
    newest,
    refuse_other_objects,
    refuse_unsafe_store,
    wait_until_silent,
)
from lockstep.remote.upload import steps_of
from lockstep.runtime.worker_env import running_workers, state_folder


@contextmanager
def owned_copy(bucket: RunBucket, host: str) -> Iterator[tuple[Path, Ownership]]:
    """Own the run; yield (its working copy, the right to put snapshots).

    A copy of the newest snapshot's owner is continued as it is: it may be ahead of the store. Any
    other copy is set aside, and the snapshot downloaded. UsageError: another training runs;
    StoreError.
    """
    with locked_copy(bucket) as copy:
        refuse_unsafe_store(bucket)
        if is_of_several_hosts(bucket):
            hint = "start it with lockstep launch --hosts, also on a single host, or give another --out"
            raise UsageError(
                f"the run in {bucket.address} is one of several hosts",
                f"its generation log, {MEMBERSHIP}/",
                hint,
            )
        owners = read_owners(copy)
        before = newest(bucket, warns=True)
        if before is None:
            refuse_other_objects(bucket)
            if owners:
                refuse_lost_store(bucket, copy)
            set_copy_aside(copy, "the store holds no run yet")
        elif before.owner not in owners:
            refuse_running_workers(bucket, copy, host)
            before = wait_until_silent(bucket, before)
            set_copy_aside(copy, f"{before.host} has continued the run")
            before = download_copy(bucket, before, copy)
        copy.mkdir(exist_ok=True)
        try:
            ownership = Ownership(bucket, add_owner(copy, owners), before)
        except FencedError as error:
            raise UsageError(
                f"another training has just started in {bucket.address}",
                error.where,
                "wait for it, or stop it there",
            ) from None
        yield copy, ownership


def is_of_several_hosts(bucket: RunBucket) -> bool:
    return MEMBERSHIP in bucket.names()


@contextmanager
def locked_copy(bucket: RunBucket) -> Iterator[Path]:
    """Hold the lock of the working copy; yield its path. UsageError when another process holds
    it."""
    copy = bucket.address.working_copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    lock = try_lock(copy.with_name(f"{copy.name}.lock"))
    if lock is None:
        what = f"another training is already running in {bucket.address}, on this host"
        raise UsageError(
            what, f"it holds {copy}.lock", "wait for it, stop it, or choose another --out"
        )
    try:
        yield copy
    finally:
        os.close(lock)


@contextmanager
def temporary_copy(address: Address) -> Iterator[Path]:
    """Yield an empty folder for a copy that is only read; it has the name of the run, and is
    deleted."""
    address.copies.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(
        prefix="read-", dir=address.copies, ignore_cleanup_errors=True
    ) as parent:
        (folder := Path(parent) / address.working_copy.name).mkdir()
        yield folder


def read_owners(copy: Path) -> list[str]:
    """Return the ids of the owners that a copy has had; none when it is gone."""
    path = copy.with_name(f"{copy.name}.owners")
    return read_text(path).split() if path.exists() and copy.is_dir() else []


def add_owner(copy: Path, owners: Sequence[str] | None = None) -> str:
    """Return the id of a new owner, noted before it puts a snapshot: a kill in between must not
    disown the copy. owners: the earlier ones, if known."""
    owner = secrets.token_hex(8)
    write_atomic(
        copy.with_name(f"{copy.name}.owners"),
        "\n".join([*(read_owners(copy) if owners is None else owners), owner]),
    )
    return owner


def has_run(copy: Path) -> bool:
    """Return whether a copy has files; a start that failed leaves an empty one."""
    return copy.is_dir() and any(copy.iterdir())


def set_copy_aside(copy: Path, why: str) -> None:
    if has_run(copy):
        log.warning("%s was set aside as %s: %s", copy, set_aside(copy, "old"), why)


def refuse_lost_store(bucket: RunBucket, copy: Path) -> None:
    """UsageError when this host has a copy of a run that the store has no longer."""
    if has_run(copy):
        what = f"{bucket.address} is empty, and this host has a copy of its run"
        raise UsageError(
            what, str(copy), f"restore the objects; or move {copy} aside to train from step 0"
        )


def refuse_running_workers(bucket: RunBucket, copy: Path, host: str) -> None:
    """UsageError when workers of `lockstep launch` still train in a copy that must be set aside."""
    if copy.exists() and (workers := running_workers(state_folder(copy, host))):
        what = f"{len(workers)} workers train in a copy of {bucket.address}, which another start has taken over"
        raise UsageError(what, str(copy), f"stop them: lockstep launch --stop {copy}")


def download_copy(bucket: RunBucket, snapshot: Snapshot, copy: Path) -> Snapshot:
    """Download a snapshot as the working copy; return it, or a newer one. CheckpointError when
    none of its checkpoints is whole."""
    partial = copy.with_name(f"{copy.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    log.info(
        "downloading snapshot %d of %s, put by %s, to %s",
        snapshot.number,
        bucket.address,
        snapshot.host,
        copy,
    )
    snapshot, problems = download(bucket, snapshot, partial)
    if problems and len(problems) == len(steps_of(snapshot.files)):
        raise CheckpointError(
            "no checkpoint in the store is whole",
            "\n".join(problems),
            "restore earlier versions of these objects",
        )
    for problem in problems:
        log.warning("%s; it is omitted", problem)
    # Its members are on other hosts, and lost the run. Without an end, new workers would wait for
    # them.
    generations = GenerationLog(partial / "generations")
    if (partial / "generations").is_dir() and (last := generations.newest()) and not last.end:
        generations.record_end(RunResult(0, ""), f"continued from {bucket.address}", after=0)
    os.rename(partial, copy)
    fsync_folder(copy.parent)
    return snapshot
