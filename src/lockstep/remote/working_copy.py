"""The run folder of this host, whose mirror is in the store.

    COPIES/NAME                  the working copy: an ordinary run folder
    COPIES/NAME.lock             held by the process that mirrors it
    COPIES/NAME.owners           ids of the owners that this copy has had, the newest last
    PREFIX/membership/identity   token and id of a run of several hosts; put by the first of them

Each of several hosts trains in its own copy (host_mirror.py).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from lockstep.checkpoint.fingerprints import RUN_ID
from lockstep.checkpoint.folder import COMMITTED, committed_steps, folder_name, retire, set_aside
from lockstep.elastic.generation_log import (
    NO_GENERATION,
    GenerationLog,
    RunResult,
    name_of,
    open_generation_log,
)
from lockstep.elastic.run_folder import TOKEN_BYTES, create_run_folder
from lockstep.errors import CheckpointError, DamagedFileError, FencedError, StoreError, UsageError
from lockstep.files import (
    fsync_folder,
    parse_json,
    read_bytes,
    read_text,
    try_lock,
    write_atomic,
    write_if_absent,
    write_json,
)
from lockstep.log import log
from lockstep.object_store.address import parse_address
from lockstep.object_store.bucket import RunBucket
from lockstep.object_store.storage import MEMBERSHIP, STORE_FILE, store_address
from lockstep.remote.download import RESTORE, Download, download, is_blob, temporary_copy
from lockstep.remote.snapshots import (
    Files,
    Ownership,
    Snapshot,
    newest,
    read_beat_s,
    refuse_other_objects,
    refuse_unsafe_store,
    steps_of,
    wait_until_silent,
)
from lockstep.remote.upload import FINAL_BEATS, POLL_S, warn_of_failure
from lockstep.runtime.worker_env import running_workers, state_folder

IDENTITY = f"{MEMBERSHIP}/identity"
HEX = re.compile(r"[0-9a-f]{8,}")
# Not followed: large, or written by each host.
OWN = re.compile(r"(checkpoints|data|logs|generations)/")


class RunPlace:
    """Where a run is, given a folder on a disk or an address. UsageError: another scheme.

    folder      in which the workers of this host train
    log_folder  exists before the run
    """

    def __init__(self, run: object) -> None:
        text = str(run)
        self.address = parse_address(text)
        self.folder = self.address.working_copy if self.address else Path(text)
        self.log_folder = self.folder.parent if self.address else self.folder

    def __str__(self) -> str:
        return str(self.address or self.folder)

    def is_empty(self) -> bool:
        return not (RunBucket(self.address).names() if self.address else has_run(self.folder))

    def create(self) -> str:
        """Create what is missing for a start on several hosts; return the id of the folder that
        all of them see, or ""."""
        return "" if self.address else create_run_folder(self.folder, socket.gethostname())

    def evaluators(self, hosts: int) -> int:
        """Return how many hosts need an evaluator: that of rank 0 has the newest checkpoints, and
        the others if they see its disk."""
        return hosts if self.address else 1

    def driver_folder(self) -> AbstractContextManager[Path]:
        """Context manager with the generations of the run, for a process that is no agent."""
        return driver_copy(RunBucket(self.address)) if self.address else nullcontext(self.folder)

    def refuse_plain_script(self) -> None:
        """UsageError where hosts share no disk."""
        if self.address:
            raise UsageError(
                "a script without lockstep is not supported where hosts share no disk",
                f"--out {self}",
                "save with lockstep.Session, or give --out on a disk that all hosts share; "
                "--restart one if it opens a Session",
            )

    def refuse_split(self, replica_size: int, workers: int, where: str) -> None:
        """UsageError if a host with `workers` would hold a part of a replica, and hosts share no
        disk."""
        if self.address and workers % replica_size:
            raise UsageError(
                f"{workers} workers per host for replicas of {replica_size}, each of which must "
                "share a disk",
                where,
                f"give each host a multiple of {replica_size} workers, or a run folder on a disk "
                "that all hosts share",
            )


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
            raise UsageError(
                f"the run in {bucket.address} is one of several hosts",
                f"its generation log, {MEMBERSHIP}/",
                "start it with lockstep launch --hosts, "
                "also on a single host, or give another --out",
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
        raise UsageError(
            f"another training is already running in {bucket.address}, on this host",
            f"it holds {copy}.lock",
            "wait for it, stop it, or choose another --out",
        )
    try:
        yield copy
    finally:
        os.close(lock)


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
        raise UsageError(
            f"{bucket.address} is empty, and this host has a copy of its run",
            str(copy),
            f"restore the objects; or move {copy} aside to train from step 1",
        )


def refuse_running_workers(bucket: RunBucket, copy: Path, host: str) -> None:
    """UsageError when workers of `lockstep launch` still train in a copy that must be set aside."""
    if copy.exists() and (workers := running_workers(state_folder(copy, host))):
        raise UsageError(
            f"{len(workers)} workers train in a copy of {bucket.address}, "
            "which another start has taken over",
            str(copy),
            f"stop them: lockstep launch --stop {copy}",
        )


def download_copy(bucket: RunBucket, snapshot: Snapshot, copy: Path) -> Snapshot:
    """Download a snapshot as the working copy; return it, or a newer one. CheckpointError when
    none of its checkpoints is whole."""
    partial = copy.with_name(f"{copy.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    snapshot = start_from(bucket, snapshot, partial)
    # Its members are on other hosts, and lost the run. Without an end, new workers would wait for
    # them.
    generations = GenerationLog(partial / "generations")
    last = generations.newest() if (partial / "generations").is_dir() else NO_GENERATION
    if last.number and not last.end:
        generations.record_end(RunResult(0, ""), f"continued from {bucket.address}", after=0)
    os.rename(partial, copy)
    fsync_folder(copy.parent)
    return snapshot


def start_from(
    bucket: RunBucket,
    snapshot: Snapshot,
    copy: Path,
    wanted: Callable[[str], bool] = lambda path: True,
) -> Snapshot:
    """Bring the wanted files of a snapshot to a copy in which no worker trains; return it, or a
    newer one. CheckpointError when the copy then has no whole checkpoint."""
    log.info("reading snapshot %d of %s, put by %s", snapshot.number, bucket.address, snapshot.host)
    done = put_into_copy(bucket, snapshot, copy, wanted)
    if done.problems and not committed_steps(copy / "checkpoints"):
        raise CheckpointError(
            "no checkpoint in the store is whole",
            "\n".join(done.problems),
            "restore earlier versions of these objects",
        )
    return done.snapshot


def put_into_copy(
    bucket: RunBucket, snapshot: Snapshot, copy: Path, wanted: Callable[[str], bool]
) -> Download:
    """Download; warn of damaged checkpoints, which are omitted."""
    done = download(bucket, snapshot, copy, wanted)
    for problem in done.problems:
        log.warning("%s; it is omitted", problem)
    return done


# Runs whose hosts share no disk and meet in the store.


@contextmanager
def joined_copy(bucket: RunBucket, host: str) -> Iterator[tuple[Path, Files]]:
    """Join the run; yield the working copy of this host, as new as the newest snapshot, and the
    files of that. UsageError: a run of one host is in the store, or another agent of this host
    runs; StoreError."""
    with locked_copy(bucket) as copy:
        refuse_unsafe_store(bucket)
        if not is_of_several_hosts(bucket):
            refuse_single_host(bucket)
            refuse_lost_store(bucket, copy)
        token, run_id = identity_of(bucket)
        if has_run(copy) and (not (copy / "token").exists() or read_text(copy / "token") != token):
            refuse_running_workers(bucket, copy, host)
            set_copy_aside(copy, "the store holds another run")
        write_identity(bucket, copy, token, run_id)
        files = refresh_copy(copy) if not running_workers(state_folder(copy, host)) else {}
        with copying_generations(copy):
            yield copy, files


@contextmanager
def driver_copy(bucket: RunBucket) -> Iterator[Path]:
    """Yield a folder with the generations of a run of several hosts, for a process that starts and
    stops its agents and is none of them. UsageError: a run of one host is in the store;
    StoreError."""
    if not is_of_several_hosts(bucket):
        refuse_single_host(bucket)
    with temporary_copy(bucket.address) as copy:
        write_identity(bucket, copy, *identity_of(bucket))
        with copying_generations(copy):
            yield copy


def refuse_single_host(bucket: RunBucket) -> None:
    """UsageError when the prefix holds a run of one host, or objects that are not of a run."""
    if newest(bucket):
        raise UsageError(
            f"the run in {bucket.address} is one of a single host",
            f"its snapshots; there is no {MEMBERSHIP}/",
            "start it without --hosts and --nodes on one host, or give another --out",
        )
    refuse_other_objects(bucket)


def identity_of(bucket: RunBucket) -> tuple[str, str]:
    """Return (token, id) of the run; new ones if this host is the first."""
    new_identity = json.dumps(
        {"token": secrets.token_hex(TOKEN_BYTES), "run_id": secrets.token_hex(8)}
    )
    try:
        identity = parse_json(bucket.create(IDENTITY, new_identity.encode()).decode())
        token, run_id = identity["token"], identity["run_id"]
        if not (HEX.fullmatch(token) and HEX.fullmatch(run_id)):
            raise ValueError("token or run_id is no text of hexadecimal digits")
        return token, run_id
    except (ValueError, LookupError, TypeError) as error:
        raise DamagedFileError(
            f"the identity of the run is damaged: {error}", f"{bucket.address}/{IDENTITY}", RESTORE
        ) from None


def write_identity(bucket: RunBucket, copy: Path, token: str, run_id: str) -> None:
    for name in ("generations", "checkpoints"):
        (copy / name).mkdir(parents=True, exist_ok=True)
    write_if_absent(copy / "token", token, 0o600)
    write_json(copy / RUN_ID, {"id": run_id})
    write_json(copy / STORE_FILE, {"address": str(bucket.address)})


@contextmanager
def ended_copy(bucket: RunBucket, host: str) -> Iterator[tuple[Path, Ownership]]:
    """Own an ended run, to add scores to it; yield (the copy of this host, the right to put
    snapshots). A start of the run takes it over. UsageError: the run has not ended. Errors of
    `joined_copy`."""
    with joined_copy(bucket, host) as (copy, _):
        end = GenerationLog(copy / "generations").newest().end
        before = newest(bucket)
        if before is None or not end:
            raise UsageError(
                f"the run in {bucket.address} has not ended",
                "its newest generation",
                "wait for its end, or let it score by itself: "
                "evaluate.at_end, or launch --with-evaluator on each host",
            )
        before = wait_until_silent(bucket, before)
        refresh_copy(copy)
        yield copy, Ownership(bucket, add_owner(copy), before, before.generation)


@contextmanager
def copying_generations(copy: Path) -> Iterator[None]:
    """Copy new generations to the copy meanwhile. OSError when the first attempt fails."""
    copy_generations(copy)
    ended = threading.Event()

    def follow() -> None:
        problem = ""
        while not ended.wait(POLL_S):
            try:
                copy_generations(copy)
            except OSError:
                pass  # an outage; the mirror warns of it
            except Exception as error:  # of any type: the agents see no other generation log
                if problem != str(error):
                    warn_of_failure(error, "the generation log is tried again")
                problem = str(error)

    thread = threading.Thread(target=follow, name="generations", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def copy_generations(run: Path) -> None:
    """Add the generations after the newest one in the copy of this host, in order and as they are,
    damaged ones included; to an empty copy only the newest."""
    stored = open_generation_log(run)
    copy = GenerationLog(run / "generations")
    before = copy.newest_number()
    last = stored.newest_number(before)
    for number in range(before + 1 if before else max(1, last), last + 1):
        copy.folder.create(name_of(number), stored.read_bytes(number))


def refresh_copy(run: Path, *, keep: Collection[str] = ()) -> Files:
    """Bring a copy in which no worker trains to the newest snapshot, unless this host has put that:
    then the copy may be newer. Return its files. Without a store: do nothing. StoreError,
    CheckpointError. keep: names of files that this start has written already"""
    if (address := store_address(run)) is None or (
        snapshot := newest(bucket := RunBucket(address), warns=True)
    ) is None:
        return {}
    if snapshot.owner in read_owners(run):
        return snapshot.files
    oldest = min(steps_of(snapshot.files), default=0)
    for step in committed_steps(run / "checkpoints"):
        folder = run / "checkpoints" / folder_name(step)
        if step < oldest:  # the publisher has retired it, too
            retire(folder.parent, step)
        elif not is_listed(folder, folder.name, snapshot):
            log.warning(
                "this checkpoint of step %d is not in the store: set aside as %s",
                step,
                set_aside(folder, "abandoned"),
            )
    start_from(
        bucket,
        snapshot,
        run,
        lambda path: path not in keep and (not OWN.match(path) or not (run / path).exists()),
    )
    return snapshot.files


def is_listed(checkpoint: Path, name: str, snapshot: Snapshot) -> bool:
    """Return whether `checkpoint` is the one that a snapshot lists as `name`."""
    marker = snapshot.files.get(f"checkpoints/{name}/{COMMITTED}", ())
    return bool(marker) and is_blob(read_bytes(checkpoint / COMMITTED), *marker[0])


def wait_until_published(run: Path, step: int) -> None:
    """For rank 0: wait until the store has the checkpoint of `step`. After FINAL_BEATS / 2, less
    than counts as a hang, it is a warning."""
    bucket, until_s = bucket_of(run), time.monotonic() + FINAL_BEATS / 2 * read_beat_s()
    while time.monotonic() < until_s:
        with suppress(StoreError):  # an outage
            if (snapshot := newest(bucket)) and step in steps_of(snapshot.files):
                return
        time.sleep(POLL_S)
    log.warning("step %d is not in %s yet; only this host has it", step, bucket.address)


def fetch_checkpoint(run: Path, step: int = -1) -> int:
    """Download the checkpoint of `step`, by default the newest one, if this host lacks it; return
    the step. StoreError, CheckpointError."""
    local_steps = committed_steps(run / "checkpoints")
    bucket = bucket_of(run)
    snapshot = newest(bucket)
    published_steps = steps_of(snapshot.files) if snapshot else []
    step = max([*local_steps, *published_steps], default=-1) if step < 0 else step
    if step in local_steps:
        return step
    if snapshot is None or step not in published_steps:
        raise CheckpointError(
            f"the store has no checkpoint of step {step}",
            str(bucket.address),
            "see the warnings of the host of rank 0",
        )
    folder = f"checkpoints/{folder_name(step)}/"
    put_into_copy(bucket, snapshot, run, lambda path: path.startswith(folder))
    return step


def bucket_of(run: Path) -> RunBucket:
    address = store_address(run)
    assert address is not None, f"{run} is no copy"
    return RunBucket(address, waits=False)
