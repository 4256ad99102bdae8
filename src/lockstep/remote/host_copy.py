"""The working copy of one host, of a run whose hosts share no disk and meet in the store.

PREFIX/membership/identity   token and id of the run; put by the host that starts first

Each host trains in its own copy. The host of rank 0 of the newest generation publishes its copy as
snapshots. The others follow them: metrics, events and other small files. So any of them can become
the host of rank 0. It then downloads the checkpoints that it lacks, and publishes in turn.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.checkpoint.fingerprints import RUN_ID
from lockstep.checkpoint.folder import COMMITTED, committed_steps, folder_name, retire, set_aside
from lockstep.data.manifest import locked
from lockstep.elastic.generation_log import (
    NO_GENERATION,
    GenerationLog,
    open_generation_log,
)
from lockstep.elastic.link import TOKEN_BYTES
from lockstep.errors import CheckpointError, DamagedFileError, FencedError, StoreError, UsageError
from lockstep.files import (
    fsync_folder,
    open_regular,
    parse_json,
    read_bytes,
    read_text,
    try_lock,
    write_if_absent,
    write_json,
)
from lockstep.log import log
from lockstep.object_store.bucket import RunBucket
from lockstep.object_store.storage import MEMBERSHIP, STORE_FILE, store_address
from lockstep.remote.download import download, is_blob
from lockstep.remote.snapshots import (
    Files,
    Ownership,
    Snapshot,
    newest,
    read_beat_s,
    refuse_other_objects,
    refuse_unsafe_store,
    wait_until_silent,
)
from lockstep.remote.upload import FINAL_BEATS, Mirror, steps_of, warn_of_failure
from lockstep.remote.working_copy import (
    add_owner,
    has_run,
    is_of_several_hosts,
    locked_copy,
    read_owners,
    refuse_lost_store,
    refuse_running_workers,
    set_copy_aside,
    temporary_copy,
)
from lockstep.runtime.worker_env import running_workers, state_folder

IDENTITY, EVENTS = f"{MEMBERSHIP}/identity", "events.jsonl"
HEX = re.compile(r"[0-9a-f]{8,}")
OWN = re.compile(
    r"(checkpoints|data|logs|generations)/"
)  # not followed: large, or written by each host
POLL_S = 0.5
FOLLOW_PAUSE = 20  # times as long as the last download: each one reads metrics.jsonl from its start


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
        hint = "start it without --hosts and --nodes on one host, or give another --out"
        raise UsageError(
            f"the run in {bucket.address} is one of a single host",
            f"its snapshots; there is no {MEMBERSHIP}/",
            hint,
        )
    refuse_other_objects(bucket)


def identity_of(bucket: RunBucket) -> tuple[str, str]:
    """Return (token, id) of the run; new ones if this host is the first."""
    new_identity = json.dumps(
        {"token": secrets.token_hex(TOKEN_BYTES), "run_id": secrets.token_hex(8)}
    )
    try:
        identity = parse_json(bucket.put_if_absent(IDENTITY, new_identity.encode()).decode())
        for name in ("token", "run_id"):
            if not (isinstance(identity[name], str) and HEX.fullmatch(identity[name])):
                raise ValueError(f"{name} is no text of hexadecimal digits")
        return identity["token"], identity["run_id"]
    except (ValueError, LookupError, TypeError) as error:
        hint = "restore an earlier version of this object"
        raise DamagedFileError(
            f"the identity of the run is damaged: {error}", f"{bucket.address}/{IDENTITY}", hint
        ) from None


def write_identity(bucket: RunBucket, copy: Path, token: str, run_id: str) -> None:
    (copy / "generations").mkdir(parents=True, exist_ok=True)
    write_if_absent(copy / "token", token, 0o600)
    write_json(copy / RUN_ID, {"id": run_id})
    write_json(copy / STORE_FILE, {"address": str(bucket.address)})


@contextmanager
def ended_copy(bucket: RunBucket, host: str) -> Iterator[tuple[Path, Ownership]]:
    """Own an ended run, to add scores to it; yield (the copy of this host, the right to put
    snapshots). A start of the run takes it over. UsageError: the run has not ended. Errors of
    `joined_copy`."""
    with joined_copy(bucket, host) as (copy, _):
        last, before = GenerationLog(copy / "generations").newest(), newest(bucket)
        if before is None or not (last and last.end):
            hint = "wait for its end, or let it score by itself: evaluate.at_end, or launch --with-evaluator on each host"
            raise UsageError(
                f"the run in {bucket.address} has not ended", "its newest generation", hint
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
    """Add the generations after the newest one in the copy of this host, in order; to an empty copy
    only the newest."""
    stored, copy = open_generation_log(run), GenerationLog(run / "generations")
    before = copy.newest() or NO_GENERATION
    newest = stored.newest(before.number)
    if newest:
        for number in range(before.number + 1 if before.number else newest.number, newest.number):
            copy.add(stored.read(number))
        copy.add(newest)


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
    log.info(
        "reading snapshot %d of %s, put by %s, to %s", snapshot.number, address, snapshot.host, run
    )
    problems, _ = update_copy(
        bucket,
        snapshot,
        run,
        lambda path: path not in keep and (not OWN.match(path) or not (run / path).exists()),
    )
    if problems and not committed_steps(run / "checkpoints"):
        raise CheckpointError(
            "no checkpoint in the store is whole",
            "\n".join(problems),
            "restore earlier versions of these objects",
        )
    return snapshot.files


def is_listed(checkpoint: Path, name: str, snapshot: Snapshot) -> bool:
    """Return whether `checkpoint` is the one that a snapshot lists as `name`."""
    marker = snapshot.files.get(f"checkpoints/{name}/{COMMITTED}", ())
    return bool(marker) and is_blob(read_bytes(checkpoint / COMMITTED), *marker[0])


def add_checkpoints(bucket: RunBucket, snapshot: Snapshot, copy: Path) -> None:
    """Bring the checkpoints of a snapshot to the copy of a host that trains. Omit a checkpoint
    that this host has set aside because the run returned to an earlier step."""
    names, folder = [folder_name(step) for step in steps_of(snapshot.files)], copy / "checkpoints"
    wanted = {
        name
        for name in names
        if not any(is_listed(aside, name, snapshot) for aside in folder.glob(f"{name}.abandoned*"))
    }
    for name in wanted:
        with suppress(FileNotFoundError):
            if not is_listed(folder / name, name, snapshot):
                set_aside(folder / name, "abandoned")  # saved before that return, or a second time
    update_copy(
        bucket,
        snapshot,
        copy,
        lambda path: "".join(path.split("/")[1:2]) in wanted and not (copy / path).exists(),
    )


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
    local_steps, bucket = committed_steps(run / "checkpoints"), bucket_of(run)
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
    update_copy(
        bucket, snapshot, run, lambda path: path.startswith(f"checkpoints/{folder_name(step)}/")
    )
    return step


def bucket_of(run: Path) -> RunBucket:
    address = store_address(run)
    assert address is not None, f"{run} is no copy"
    return RunBucket(address, waits=False)


def update_copy(
    bucket: RunBucket, snapshot: Snapshot, copy: Path, wanted: Callable[[str], bool]
) -> tuple[list[str], bool]:
    """Put the wanted files of a snapshot into a copy, also beside a training. Return the problems
    of its checkpoints, and whether everything was put: not while rank 0 on this host writes its
    metrics."""
    with (
        locked(copy.with_name(f"{copy.name}.update")),
        TemporaryDirectory(dir=copy.parent, prefix="update-") as parent,
    ):
        (folder := Path(parent) / copy.name).mkdir()
        _, problems = download(bucket, snapshot, folder, wanted, copy)
        for problem in problems:
            log.warning("%s; it is omitted", problem)
        for step in (folder / "checkpoints").glob("*"):
            (copy / "checkpoints").mkdir(exist_ok=True)
            if not (
                copy / "checkpoints" / step.name
            ).exists():  # else the run has just saved this step
                os.rename(step, copy / "checkpoints" / step.name)
                fsync_folder(copy / "checkpoints")
        if (folder / EVENTS).exists():
            add_lines(copy / EVENTS, read_bytes(folder / EVENTS))
            (folder / EVENTS).unlink()
        if (lock := try_lock(copy / "tracker.lock")) is None:
            return problems, False
        try:
            for path in [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]:
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(folder / path, copy / path)
        finally:
            os.close(lock)
        return problems, True


def add_lines(path: Path, content: bytes) -> None:
    """Append the lines of `content` that a file lacks. Other processes may append meanwhile."""
    lines = read_bytes(path).splitlines(keepends=True) if path.exists() else []
    torn = b"\n" if lines and not lines[-1].endswith(b"\n") else b""
    known = set(lines)
    with open(path, "ab", buffering=0, opener=open_regular) as file:
        file.write(
            torn + b"".join(line for line in content.splitlines(keepends=True) if line not in known)
        )


class HostMirror:
    """Publishes the copy of a host while rank 0 trains there, and else follows the snapshots.
    Call it from one thread. seen: files of a snapshot that the copy has, or newer ones"""

    def __init__(self, copy: Path, bucket: RunBucket, host: str, seen: Files) -> None:
        self.folder, self.bucket, self.host = copy, bucket, host
        self.generations = GenerationLog(copy / "generations")
        last = self.generations.newest() or NO_GENERATION
        self.number, self.ended = last.number, False
        self.leading = last  # the newest generation with members
        self.mirror: Mirror | None = None  # while this host publishes
        self.seen = seen  # of the last snapshot that was followed
        self.follow_s, self.problem = 0.0, ""

    @property
    def leads(self) -> bool:
        return bool(self.leading.members) and self.leading.members[0].host == self.host

    def poll(self) -> None:
        """Publish or follow. An outage of the store is a warning."""
        try:
            self.read_generations()
            if self.leads:
                self.mirror = self.mirror or self.take_over()
                self.mirror.poll()
            else:
                self.mirror = None
                self.follow()
        except FencedError:  # the next generation, led by another host, is about to be read
            self.mirror = None
        except (
            Exception
        ) as error:  # of any type: training continues, and `finish` decides on the exit code
            if not self.problem:
                warn_of_failure(error, "training continues; the store is tried again")
            self.problem = str(error)
        else:
            self.problem = ""

    def read_generations(self) -> None:
        newest_generation = self.generations.newest(self.number)
        for number in range(
            self.number + 1, newest_generation.number + 1 if newest_generation else 0
        ):
            generation = self.generations.read(number)
            self.number, self.ended = number, bool(generation.end)
            self.leading = generation if generation.members else self.leading

    def take_over(self) -> Mirror:
        """Own the run after the snapshots of an earlier generation. FencedError: a later one has
        put some."""
        before = newest(self.bucket)
        if (
            before
            and before.generation >= self.leading.number
            and before.owner not in read_owners(self.folder)
        ):
            raise FencedError(
                f"generation {before.generation} publishes",
                str(self.bucket.address),
                "this host does not",
            )
        if before:  # now, since the owner of the newest snapshot continues its copy as it is
            add_checkpoints(self.bucket, before, self.folder)
        ownership = Ownership(self.bucket, add_owner(self.folder), before, self.leading.number)
        log.info(
            "this host publishes the run to %s, from generation %d on",
            self.bucket.address,
            self.leading.number,
        )
        return Mirror(self.folder, ownership)

    def follow(self) -> None:
        """Copy what rank 0 has written since the last call."""
        if time.monotonic() < self.follow_s or (snapshot := newest(self.bucket)) is None:
            return
        start_s = time.monotonic()
        changed = {
            path
            for path, blobs in snapshot.files.items()
            if not OWN.match(path) and self.seen.get(path) != blobs
        }
        if changed and update_copy(self.bucket, snapshot, self.folder, changed.__contains__)[1]:
            self.seen = snapshot.files
        now_s = time.monotonic()
        self.follow_s = now_s + max(snapshot.beat_s / 4, FOLLOW_PAUSE * (now_s - start_s))

    def finish(self) -> None:
        """Upload the rest and release the run after its end, if this host had its last rank 0. A
        host that leaves a run does neither. StoreError when it fails for FINAL_BEATS."""
        until_s = time.monotonic() + FINAL_BEATS * read_beat_s()
        while True:
            try:
                copy_generations(self.folder)
                self.read_generations()
                if self.ended and self.leads:
                    (self.mirror or self.take_over()).finish()
                return
            except FencedError:
                return  # another host has continued the run
            except (StoreError, OSError) as error:
                if time.monotonic() > until_s:
                    hint = f"this host has its part in {self.folder}; start it again with the same command"
                    raise StoreError(
                        f"the end of the run was not uploaded: {error}",
                        str(self.bucket.address),
                        hint,
                    ) from None
            time.sleep(POLL_S)
