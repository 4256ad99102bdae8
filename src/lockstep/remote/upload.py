"""Mirror the run folder of this host into the store, beside the training.

A snapshot lists checkpoints, which are pinned meanwhile, and data, both as they were at one moment:
if one of their files changed or vanished, no snapshot is put, and the next attempt reads again. The
metrics are read after the checkpoints were listed, so they reach at least as far.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from lockstep.checkpoint.commit import find_damage
from lockstep.checkpoint.folder import COMMITTED, STEP_FOLDER, committed_steps, folder_name, pinned
from lockstep.errors import FencedError, LockstepError, StoreError
from lockstep.files import open_regular
from lockstep.log import log
from lockstep.record.events import append_event
from lockstep.remote.snapshots import BLOBS, Blob, Files, Ownership, name_of, numbers
from lockstep.units import format_bytes, format_duration

BLOB_BYTES, GROWING_BLOB_BYTES = 2**23, 2**18  # the last blob of a file that grows is uploaded again with each snapshot
UPLOADS = 4  # at once
RETENTION_S = 600.0  # a reader may use a snapshot for as long after the next one
FINAL_BEATS = 40  # how long the last upload is tried again
# The token is a secret. The others belong to the processes of this host.
LOCAL = re.compile(r"token|store\.json|run\.lock|waiting|evaluators|state|checkpoints|.*/\..*|\..*")
CONSISTENT = re.compile(r"(checkpoints|data)/")  # files that must be of one moment


T = TypeVar("T")


class Signature(NamedTuple):
    inode: int
    bytes: int
    mtime_ns: int


class Mirror:
    """Uploads `folder` for the owner of the run. Call it from one thread."""

    def __init__(self, folder: Path, ownership: Ownership) -> None:
        self.folder, self.checkpoints, self.ownership, self.bucket = folder, folder / "checkpoints", ownership, ownership.bucket
        self.known = {blob.rpartition("/")[2]: blob for blob in ownership.newest.blobs}  # sha256 -> blob in the store
        self.files: dict[str, tuple[Signature, tuple[Blob, ...]]] = {}  # whose blobs are in the store
        self.whole: dict[Signature, bool] = {}  # of a marker -> whether its checkpoint is whole
        self.uploaded_bytes = 0
        self.superseded: deque[tuple[float, int, set[str]]] = deque()  # when, number and blobs of earlier snapshots
        self.retained_s = -RETENTION_S
        self.problem = ""
        self.pool = ThreadPoolExecutor(UPLOADS, "upload")

    def poll(self) -> None:
        """Publish when a checkpoint is new or a beat is due. An outage of the store is a warning.
        FencedError: the run belongs to another owner."""
        try:
            steps, published = self.steps(), steps_of(self.ownership.newest.files)
            returned = max(published, default=0) > max(steps, default=0)  # to an earlier step
            if not set(steps) <= set(published) or returned or self.ownership.beat_due:
                if self.publish():
                    self.retain()
                elif self.ownership.beat_due:
                    self.beat()
        except FencedError:
            raise
        except (LockstepError, OSError) as error:
            if not self.problem:
                log.warning("%s\n  training continues; uploads are tried again", error)
            self.problem = str(error)
        else:
            if self.problem:
                log.warning("%s can be written again; nothing is missing", self.bucket.address)
            self.problem = ""

    def finish(self) -> None:
        """Upload the rest and release the run. StoreError when that fails for FINAL_BEATS."""
        until_s = time.monotonic() + FINAL_BEATS * self.ownership.newest.beat_s
        while True:
            try:
                if self.publish(released=True):
                    return
                raise StoreError("its files kept changing")
            except StoreError as error:
                if time.monotonic() > until_s:
                    hint = f"the run is whole in {self.folder}, and the same command uploads it"
                    raise StoreError(f"the end of the run was not uploaded: {error.what}", error.where, hint) from None
            time.sleep(min(1.0, self.ownership.newest.beat_s))

    def steps(self) -> list[int]:
        """Return the steps of the whole checkpoints. Each is verified once; a damaged one is a warning."""
        steps = []
        for step in committed_steps(self.checkpoints):
            marker = signature_of(self.checkpoints / folder_name(step) / COMMITTED)
            with pinned(self.checkpoints, step) as path:
                if path and marker not in self.whole:
                    problems = self._result(self.pool.submit(find_damage, path, step))
                    self.whole[marker] = not problems
                    if problems:
                        log.warning("%s is damaged and is not uploaded: %s", path, ", ".join(problems))
            steps += [step] * self.whole.get(marker, False)
        return steps

    def publish(self, *, released: bool = False) -> bool:
        """Upload what is new, then put a snapshot. False: a file changed meanwhile; try again.
        StoreError: likewise. FencedError."""
        start_s, bytes_before, before = time.monotonic(), self.uploaded_bytes, self.ownership.newest
        with ExitStack() as pins:
            steps = [step for step in self.steps() if pins.enter_context(pinned(self.checkpoints, step))]
            listed, files = list_files(self.folder, steps), dict[str, tuple[Signature, tuple[Blob, ...]]]()
            for path, signature in listed.items():
                read = self.files.get(path)
                with suppress(FileNotFoundError):  # a temporary file; one of CONSISTENT is missed below
                    files[path] = read if read and read[0] == signature else (signature, tuple(self._upload(path)))
                    self.files[path] = files[path]
            after = list_files(self.folder, steps)
        if any(path not in files or after.get(path) != listed[path] for path in listed if CONSISTENT.match(path)):
            return False
        self.files = files
        self.ownership.put({path: blobs for path, (_, blobs) in self.files.items()}, released=released)
        self.superseded.append((time.monotonic(), before.number, before.blobs))
        for step in sorted(set(steps) - set(steps_of(before.files))):
            seconds, size = time.monotonic() - start_s, self.uploaded_bytes - bytes_before
            append_event(self.folder, "uploaded", step=step, seconds=round(seconds, 3), bytes=size)
            log.info("uploaded step %d to %s: %s in %s", step, self.bucket.address, format_bytes(size), format_duration(seconds))
        return True

    def beat(self) -> None:
        """Show other starts that this one is alive. StoreError, FencedError."""
        self.ownership.put(self.ownership.newest.files)

    def retain(self) -> None:
        """Delete snapshots that ended RETENTION_S ago, then the blobs that no other snapshot lists."""
        now_s = time.monotonic()
        if now_s < self.retained_s + RETENTION_S / 4:
            return
        while self.superseded and self.superseded[0][0] < now_s - RETENTION_S:
            self.superseded.popleft()
        oldest = min([self.ownership.newest.number, *(number for _, number, _ in self.superseded)])
        kept = self.ownership.newest.blobs.union(*(blobs for _, _, blobs in self.superseded))
        self.known = {sha256: blob for sha256, blob in self.known.items() if blob in kept}
        self.bucket.delete([name_of(number) for number in numbers(self.bucket) if number < oldest])
        for owner in self.ownership.owners:
            names = self.bucket.list(f"{BLOBS}/{owner}")
            self.bucket.delete([name for name in names if name.removeprefix(f"{BLOBS}/") not in kept])
        self.retained_s = now_s

    def _upload(self, path: str) -> Iterator[Blob]:
        """Yield the blobs of a file. At the end all are in the store; only unknown ones are uploaded."""
        uploads: deque[tuple[Future[None], str, str]] = deque()
        with open(self.folder / path, "rb", opener=open_regular) as file:
            for content in iter(partial(file.read, BLOB_BYTES if path.endswith(".safetensors") else GROWING_BLOB_BYTES), b""):
                sha256 = hashlib.sha256(content).hexdigest()
                blob = self.known.get(sha256) or f"{self.ownership.newest.owner}/{sha256}"
                if sha256 not in self.known and all(sha256 != pending for _, pending, _ in uploads):
                    uploads.append((self.pool.submit(self.bucket.put, f"{BLOBS}/{blob}", content), sha256, blob))
                    self.uploaded_bytes += len(content)
                yield blob, len(content)
                if self.ownership.beat_due:
                    self.beat()
                while len(uploads) > UPLOADS:
                    self._finish_upload(*uploads.popleft())
        while uploads:
            self._finish_upload(*uploads.popleft())

    def _finish_upload(self, upload: Future[None], sha256: str, blob: str) -> None:
        self._result(upload)
        self.known[sha256] = blob

    def _result(self, future: Future[T]) -> T:
        """Wait for the result, with beats meanwhile."""
        while True:
            if self.ownership.beat_due:
                self.beat()
            with suppress(TimeoutError):
                return future.result(timeout=1.0)


def signature_of(path: Path) -> Signature:
    """Return what tells a changed file; zeros for a missing one or another kind."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if stat.S_ISREG((status := os.lstat(path)).st_mode):
            return Signature(status.st_ino, status.st_size, status.st_mtime_ns)
    return Signature(0, 0, 0)


def list_files(folder: Path, steps: list[int]) -> dict[str, Signature]:
    """Return the files to mirror, by their path in `folder`: all but LOCAL ones and links, and of the
    checkpoints those of `steps`."""
    listed: dict[str, Signature] = {}
    roots = [folder / "checkpoints" / folder_name(step) for step in steps]
    for root in [*roots, folder]:
        for parent, folders, names in os.walk(root):
            prefix = "" if parent == str(folder) else f"{os.path.relpath(parent, folder)}/"
            folders[:] = [name for name in folders if not LOCAL.fullmatch(prefix + name)]
            paths = [prefix + name for name in names if not LOCAL.fullmatch(prefix + name)]
            listed |= {path: signature for path in paths if (signature := signature_of(folder / path)).inode}
    return listed


def steps_of(files: Files) -> list[int]:
    """Return the steps whose checkpoints are among `files`, ascending."""
    folders = {path.split("/")[1] for path in files if path.startswith("checkpoints/") and path.endswith(f"/{COMMITTED}")}
    return sorted(int(match[1]) for match in map(STEP_FOLDER.fullmatch, folders) if match)
