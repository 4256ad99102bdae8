"""Copy the files of snapshots to this host, every blob verified: once, or as long as a run is
watched."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from lockstep.checkpoint.folder import COMMITTED
from lockstep.data.manifest import locked
from lockstep.elastic.generation_log import GenerationLog
from lockstep.errors import CheckpointError, DamagedFileError, StoreError
from lockstep.files import fsync_folder, open_regular, read_bytes, try_lock, write_atomic
from lockstep.object_store.address import Address
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.snapshots import BLOBS, SILENT_BEATS, Blob, Files, Snapshot, name_of, newest
from lockstep.units import format_duration

DOWNLOADS = 8  # at once
RESTORE = "restore an earlier version of this object"
TRIES = 3  # of a blob with other bytes: a network may change them
EVENTS = "events.jsonl"
UNREAD = ("data/", "logs/", "checkpoints/")  # by a command that watches
ReadStatus = Callable[[], dict[str, Any]]


class Download(NamedTuple):
    """The result of `download`.

    snapshot     the given one, or a newer one if the blobs of that were deleted meanwhile
    problems     of damaged checkpoints, which are omitted
    is_complete  False while rank 0 on this host writes its metrics: checkpoints and events only
    """

    snapshot: Snapshot
    problems: list[str]
    is_complete: bool


def download(
    bucket: RunBucket,
    snapshot: Snapshot,
    copy: Path,
    wanted: Callable[[str], bool] = lambda path: True,
) -> Download:
    """Put the wanted files of a snapshot into a copy, also beside a training. Blobs that the copy
    has are not requested again: most of a growing file. DamagedFileError when a file that is in no
    checkpoint is damaged."""
    copy.mkdir(parents=True, exist_ok=True)
    with (
        locked(copy.with_name(f"{copy.name}.update")),
        TemporaryDirectory(dir=copy.parent, prefix="update-") as parent,
    ):
        folder = Path(parent) / copy.name
        snapshot, problems = fetch(bucket, snapshot, folder, wanted, copy)
        for step in (folder / "checkpoints").glob("*"):
            (copy / "checkpoints").mkdir(exist_ok=True)
            if not (copy / "checkpoints" / step.name).exists():
                # Else the run has just saved this step.
                os.rename(step, copy / "checkpoints" / step.name)
                fsync_folder(copy / "checkpoints")
        if (folder / EVENTS).exists():
            add_lines(copy / EVENTS, read_bytes(folder / EVENTS))
            (folder / EVENTS).unlink()
        if (lock := try_lock(copy / "tracker.lock")) is None:
            return Download(snapshot, problems, False)
        try:
            moved = [path for path in folder.rglob("*") if path.is_file()]
            targets = [copy / path.relative_to(folder) for path in moved]
            for path, target in zip(moved, targets, strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
            for parent_folder in {target.parent for target in targets}:
                fsync_folder(parent_folder)
        finally:
            os.close(lock)
        return Download(snapshot, problems, True)


def fetch(
    bucket: RunBucket,
    snapshot: Snapshot,
    folder: Path,
    wanted: Callable[[str], bool],
    earlier: Path,
) -> tuple[Snapshot, list[str]]:
    """Write the wanted files to a new folder; return (snapshot, problems of checkpoints)."""
    problems = []
    with ThreadPoolExecutor(DOWNLOADS, "download") as pool:
        paths = sorted(filter(wanted, snapshot.files), key=checkpoint_of)
        for name, group in groupby(paths, key=checkpoint_of):
            try:
                for path in group:
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    chunks = contents(pool, bucket, snapshot.files[path], earlier / path)
                    write_atomic(folder / path, chunks)
            except DamagedFileError as error:
                latest = newest(bucket) or snapshot
                if latest.number > snapshot.number and not latest.blobs >= snapshot.blobs:
                    shutil.rmtree(folder)
                    return fetch(bucket, latest, folder, wanted, earlier)
                if not name:
                    raise
                problems.append(f"{name} is damaged in {bucket.address}: {error.what}")
                shutil.rmtree(folder / name)
    return snapshot, problems


def checkpoint_of(path: str) -> str:
    """Return the folder of the checkpoint that a file belongs to; "" for other files."""
    return "/".join(path.split("/")[:2]) if path.startswith("checkpoints/") else ""


def contents(
    pool: ThreadPoolExecutor, bucket: RunBucket, blobs: Sequence[Blob], earlier: Path
) -> Iterator[bytes]:
    """Yield the content of each blob, in order, with a few downloads ahead."""
    waiting: deque[Future[bytes]] = deque()
    offset = 0
    for name, size in blobs:
        waiting.append(pool.submit(read_blob, bucket, name, size, earlier, offset))
        offset += size
        if len(waiting) == DOWNLOADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def read_blob(bucket: RunBucket, name: str, size: int, earlier: Path, offset: int) -> bytes:
    """Return the verified content of a blob: from the file `earlier` if it is at `offset` there,
    else from the store. DamagedFileError when it is missing or damaged."""
    with suppress(FileNotFoundError), open(earlier, "rb", opener=open_regular) as file:
        file.seek(offset)
        if is_blob(content := file.read(size), name, size):
            return content
    for _ in range(TRIES):
        try:
            content = bucket.read(f"{BLOBS}/{name}")
        except FileNotFoundError:
            raise DamagedFileError(
                f"blob {name} is missing", str(bucket.address), RESTORE
            ) from None
        if is_blob(content, name, size):
            return content
    raise DamagedFileError(
        f"blob {name} has changed: its sha256 differs, "
        f"or its size, {len(content)} instead of {size} bytes",
        str(bucket.address),
        RESTORE,
    )


def is_blob(content: bytes, name: str, size: int) -> bool:
    return len(content) == size and hashlib.sha256(content).hexdigest() == name.rpartition("/")[2]


def add_lines(path: Path, content: bytes) -> None:
    """Append the lines of `content` that a file lacks. Other processes may append meanwhile."""
    lines = read_bytes(path).splitlines(keepends=True) if path.exists() else []
    torn = b"\n" if lines and not lines[-1].endswith(b"\n") else b""
    known = set(lines)
    with open(path, "ab", buffering=0, opener=open_regular) as file:
        file.write(
            torn + b"".join(line for line in content.splitlines(keepends=True) if line not in known)
        )


class Follower:
    """Keeps the wanted files of a copy as they are in the newest snapshot.

    seen   the files of a snapshot that the copy has, or newer ones
    pause  times as long as the last download, at least, until the next one
    """

    def __init__(
        self,
        bucket: RunBucket,
        folder: Path,
        wanted: Callable[[str], bool],
        seen: Files,
        pause: int,
    ) -> None:
        self.bucket = bucket
        self.folder = folder
        self.wanted = wanted
        self.seen = seen
        self.pause = pause
        self.next_s = 0.0

    def update(self) -> Snapshot | None:
        """Copy what is new; return the newest snapshot. None when it is early, or there is none."""
        start_s = time.monotonic()
        if start_s < self.next_s or (snapshot := newest(self.bucket)) is None:
            return None
        files = {path: blobs for path, blobs in snapshot.files.items() if self.wanted(path)}
        changed = {path for path, blobs in files.items() if self.seen.get(path) != blobs}
        if (
            not changed
            or download(self.bucket, snapshot, self.folder, changed.__contains__).is_complete
        ):
            self.seen = files
        now_s = time.monotonic()
        self.next_s = now_s + max(snapshot.beat_s / 4, self.pause * (now_s - start_s))
        return snapshot


class FollowedCopy(Follower):
    """The files of the newest snapshot that describe a run: no data, no logs, and of each
    checkpoint its marker."""

    def __init__(self, bucket: RunBucket, folder: Path) -> None:
        super().__init__(bucket, folder, is_description, {}, pause=0)
        self.snapshot = Snapshot(0, "", 0.0, {})
        self.put_s = 0.0  # when the snapshot was put: since 1970, by the clock of the store

    def status(self) -> dict[str, Any]:
        """Copy what is new; return the status of the run as far as the store has it: `run`,
        `ended`, `source`, and `silent`: no snapshot for as long as counts as a lost host.
        CheckpointError."""
        problem = ""
        try:
            self._follow()
        except (StoreError, FileNotFoundError) as error:
            if not self.snapshot.number:
                raise
            # An outage, or the snapshot was just deleted. The next call tries again.
            problem = f"; {getattr(error, 'what', error)}"
        snapshot, age_s = self.snapshot, max(0.0, time.time() - self.put_s)
        generations = self.folder / "generations"
        end = GenerationLog(generations).newest().end if generations.is_dir() else None
        return {
            "run": str(self.bucket.address),
            "source": (
                f"snapshot {snapshot.number}, "
                f"put by {snapshot.host} {format_duration(age_s)} ago{problem}"
            ),
            "silent": not snapshot.released and age_s > SILENT_BEATS * snapshot.beat_s,
            "ended": end and {"code": end.code, "text": end.text},
        }

    def _follow(self) -> None:
        snapshot = self.update()
        if snapshot is None and not self.snapshot.number:
            raise no_run(self.bucket.address)
        if snapshot is None or snapshot.number == self.snapshot.number:
            return
        self.put_s = self.bucket.modified_s(name_of(snapshot.number))
        for gone in self.snapshot.files.keys() - snapshot.files.keys():
            (self.folder / gone).unlink(missing_ok=True)
        self.snapshot = snapshot


def is_description(path: str) -> bool:
    """Return whether a command that watches a run reads this file."""
    return not path.startswith(UNREAD) or path.endswith(f"/{COMMITTED}")


def no_run(address: Address) -> CheckpointError:
    return CheckpointError(
        "there is no run", str(address), "give the address of a run, as with --out"
    )


@contextmanager
def followed_copy(address: Address) -> Iterator[tuple[Path, ReadStatus | None]]:
    """Yield (copy, function that updates it and returns the status): the working copy, which needs
    no function, if a training on this host uses it, else a copy that follows the store."""
    copy = address.working_copy
    if copy.is_dir():
        lock = try_lock(copy.with_name(f"{copy.name}.lock"))
        if lock is None:
            yield copy, None
            return
        os.close(lock)
    with temporary_copy(address) as folder:
        yield folder, FollowedCopy(RunBucket(address, waits=False), folder).status


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
