"""Mirror the run folder of this host into the store, beside the training.

A snapshot lists checkpoints, which are pinned meanwhile, and data, both as they were at one moment:
if one of their files changed or vanished, no snapshot is put, and the next attempt reads again. The
metrics are read after the checkpoints were listed, so they reach at least as far.

A snapshot with a new checkpoint, or the last one, is put after a listing of the store has shown all
of its blobs, with their sizes. Blobs that the store lacks, such as expired ones, are uploaded
again. Files that Lockstep did not write are mirrored, too, but none of them can keep a checkpoint
out of the store: what cannot be read or named there is omitted, with one warning.
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
from pathlib import Path
from typing import NamedTuple, TypeVar

from lockstep.checkpoint.commit import MANIFEST, unlisted_files, verify_listed_files
from lockstep.checkpoint.folder import COMMITTED, committed_steps, folder_name, pinned
from lockstep.data.manifest import MANIFEST as DATA_MANIFEST
from lockstep.errors import CheckpointError, FencedError, LockstepError, StoreError
from lockstep.files import KINDS, open_regular, read_json
from lockstep.log import log
from lockstep.object_store.bucket import RunBucket
from lockstep.record.events import append_event
from lockstep.remote.snapshots import (
    BLOBS,
    EXPIRY,
    Blob,
    Files,
    Ownership,
    Snapshot,
    name_of,
    numbers,
    read_beat_s,
    steps_of,
)
from lockstep.units import format_bytes, format_duration, join_names

BLOB_BYTES = 2**23
GROWING_BLOB_BYTES = 2**18  # the last blob of a file that grows is uploaded with each snapshot
UPLOADS = 4  # at once
RETENTION_S = 600.0  # a reader may use a snapshot for as long after the next one
FINAL_BEATS = 40  # how long the last upload is tried again
# The token is a secret. The others belong to the processes of this host.
LOCAL = re.compile(
    r"token|store\.json|run\.lock|waiting|evaluators|state|checkpoints|.*/\..*|\..*", re.DOTALL
)
LIST_PAUSE = 20  # times as long as the last listing of the blobs, which takes a request for 1000
POLL_S = 0.5
NAME_BYTES = 240  # of a file that can be written beside its temporary file
UPLOAD_TRIES = 3  # of blobs that are missing in the store after their upload


T = TypeVar("T")


class Signature(NamedTuple):
    inode: int
    bytes: int
    mtime_ns: int


class StoreTask:
    """Work of a thread beside a training: `poll` until the training ends, then `finish`."""

    def __init__(self, folder: Path, bucket: RunBucket) -> None:
        self.folder = folder
        self.bucket = bucket
        self.problem = ""  # of the last attempt

    def step(self) -> None:
        """Upload or download once, if it is time."""
        raise NotImplementedError

    def end(self) -> None:
        """Upload the rest, after the training."""
        raise NotImplementedError

    def poll(self) -> None:
        """Call `step`. Any failure is a warning, and the next call tries again. FencedError: the
        run belongs to another owner."""
        try:
            self.step()
        except FencedError:
            raise
        except Exception as error:  # of any type: `finish` decides on the exit code
            self._note(error, "training continues; the store is tried again")
        else:
            if self.problem:
                log.warning("%s can be used again; nothing is missing", self.bucket.address)
            self.problem = ""

    def finish(self) -> None:
        """Call `end` until it succeeds. StoreError when it fails for FINAL_BEATS."""
        until_s = time.monotonic() + FINAL_BEATS * read_beat_s()
        while True:
            try:
                return self.end()
            except (StoreError, OSError) as error:
                left_s = until_s - time.monotonic()
                if left_s < 0:
                    what, where = str(error), str(self.bucket.address)
                    if isinstance(error, StoreError):
                        what, where = error.what, error.where
                    hint = f"the run is in {self.folder}, and the same command uploads it"
                    what = f"the end of the run was not uploaded: {what}"
                    raise StoreError(what, where, hint) from None
                self._note(error, f"tried again for up to {format_duration(left_s)}")
            time.sleep(POLL_S)

    def _note(self, error: Exception, what_follows: str) -> None:
        """Log the first of several failures."""
        if not self.problem:
            warn_of_failure(error, what_follows)
        self.problem = str(error)


class Mirror(StoreTask):
    """Uploads `folder` for the owner of the run. Call it from one thread."""

    def __init__(self, folder: Path, ownership: Ownership) -> None:
        super().__init__(folder, ownership.bucket)
        self.checkpoints = folder / "checkpoints"
        self.ownership = ownership
        # sha256 -> blob in the store
        self.known = {blob.rpartition("/")[2]: blob for blob in ownership.newest.blobs}
        # Whose blobs are in the store.
        self.files: dict[str, tuple[Signature | str, tuple[Blob, ...]]] = {}
        # Of a marker -> files of its checkpoint; none: it is damaged.
        self.whole: dict[Signature | str, list[str]] = {}
        self.omitted: set[str] = set()  # paths with a warning
        self.uploaded_bytes = 0
        self.superseded = deque[tuple[float, Snapshot]]()  # when, and earlier snapshots
        self.retained_s = -RETENTION_S
        self.list_s = 0.0  # when the blobs are listed again, at the latest with a new checkpoint
        self.pool = ThreadPoolExecutor(UPLOADS, "upload")

    def step(self) -> None:
        """Publish when a checkpoint is new or a beat is due. FencedError."""
        steps, published = self.steps(), steps_of(self.ownership.newest.files)
        returned = max(published, default=0) > max(steps, default=0)  # to an earlier step
        if not set(steps) <= set(published) or returned or self.ownership.beat_due:
            if self.publish():
                self.retain()
            elif self.ownership.beat_due:
                self.beat()

    def end(self) -> None:
        """Upload the rest and release the run. CheckpointError: the last checkpoint of this host
        is damaged, so it is not in the store."""
        # Two snapshots with all steps: a run whose last one is damaged later is still whole.
        if not (self.publish() and self.publish(released=True)):
            raise StoreError("its files kept changing")
        last = max(committed_steps(self.checkpoints), default=0)
        published = steps_of(self.ownership.newest.files)
        if last > max(published, default=0):
            what = f"the checkpoint of step {last} is damaged or unreadable on this host, so it is not in the store"
            where = f"{self.checkpoints / folder_name(last)}; newest step in {self.bucket.address}: {max(published, default='none')}"
            raise CheckpointError(
                what,
                where,
                "see the warnings above; the same command resumes from the checkpoint before it",
            )

    def steps(self) -> dict[int, list[str]]:
        """Return step -> files of each whole checkpoint, which is verified once. A damaged one is
        a warning."""
        steps = {}
        for step in committed_steps(self.checkpoints):
            marker = signature_of(self.checkpoints / folder_name(step) / COMMITTED)
            try:
                with pinned(self.checkpoints, step) as path:
                    if path and marker not in self.whole:
                        self.whole[marker] = self._result(
                            self.pool.submit(self._verify, path, step)
                        )
            except OSError as error:  # rights; tried again
                self._omit(f"checkpoints/{folder_name(step)}", error.strerror or str(error))
            if files := self.whole.get(marker):
                steps[step] = files
        return steps

    def _verify(self, path: Path, step: int) -> list[str]:
        """Return the files of a checkpoint; none when it is damaged. OSError: it cannot be read."""
        files, problems = verify_listed_files(path, step)
        if problems:
            log.warning("%s is damaged and is not uploaded: %s", path, ", ".join(problems))
            return []
        for name in unlisted_files(path, files):
            self._omit(
                f"checkpoints/{path.name}/{name}",
                "the manifest of this checkpoint does not list it",
            )
        return [f"checkpoints/{path.name}/{name}" for name in (*files, MANIFEST, COMMITTED)]

    def publish(self, *, released: bool = False) -> bool:
        """Upload what is new, then put a snapshot. False: a file changed meanwhile; try again.
        StoreError: likewise. FencedError."""
        start_s, before = time.monotonic(), self.ownership.newest
        bytes_before = self.uploaded_bytes
        with ExitStack() as pins:
            steps = {
                step: paths
                for step, paths in self.steps().items()
                if pins.enter_context(pinned(self.checkpoints, step))
            }
            paths = {path for listed in steps.values() for path in listed}
            new_steps = set(steps) - set(steps_of(before.files))
            for _ in range(UPLOAD_TRIES):
                if (files := self._read(paths)) is None:
                    return False
                if not (released or new_steps or time.monotonic() > self.list_s):
                    break
                if not (lost := self._lost_blobs(files)):
                    break
                self._forget(lost)
            else:
                raise StoreError(
                    f"{len(lost)} blobs are missing right after their upload",
                    str(self.bucket.address),
                    EXPIRY,
                )
        self.ownership.put(files, released=released)
        self.superseded.append((time.monotonic(), before))
        for step in sorted(new_steps):
            seconds, size = time.monotonic() - start_s, self.uploaded_bytes - bytes_before
            append_event(self.folder, "uploaded", step=step, seconds=round(seconds, 3), bytes=size)
            log.info(
                "uploaded step %d to %s: %s in %s",
                step,
                self.bucket.address,
                format_bytes(size),
                format_duration(seconds),
            )
        return True

    def _read(self, checkpoint_paths: set[str]) -> Files | None:
        """Upload the blobs that are new; return all files of the run, None when they are not of
        one moment."""
        data, listed = data_paths(self.folder), self._list(checkpoint_paths)
        if lost := sorted(data - listed.keys()):
            raise StoreError(
                f"the run folder lacks its data: {join_names(lost)}",
                str(self.folder),
                "copy it back",
            )
        consistent = checkpoint_paths | data
        files: dict[str, tuple[Signature | str, tuple[Blob, ...]]] = {}
        for path, signature in listed.items():
            try:
                if self.files.get(path, [None])[0] != signature:
                    self.files[path] = signature, tuple(self._upload(path))
                files[path] = self.files[path]
            except FileNotFoundError:  # a temporary file; a consistent one is missed below
                continue
            except OSError as error:
                if path in consistent:
                    raise
                self._omit(path, error.strerror or str(error))
        after = self._list(checkpoint_paths)
        if any(path not in files or after.get(path) != listed[path] for path in consistent):
            return None
        self.files = files
        return {path: blobs for path, (_, blobs) in files.items()}

    def _list(self, checkpoint_paths: set[str]) -> dict[str, Signature | str]:
        listed, omitted = list_files(self.folder)
        for path, why in omitted.items():
            self._omit(path, why)
        return listed | {path: signature_of(self.folder / path) for path in checkpoint_paths}

    def _omit(self, path: str, why: str) -> None:
        if path not in self.omitted:
            self.omitted.add(path)
            # Escaped: a name may have any bytes.
            log.warning(
                "%s is omitted from the snapshots: %s",
                ascii(f"{self.folder}/{path}").strip("'"),
                why,
            )

    def _lost_blobs(self, files: Files) -> set[str]:
        """Return the blobs that the store lacks, or has with another size. One listing is cheaper
        than a request for each blob."""
        start_s = time.monotonic()
        stored = self.bucket.sizes(BLOBS)
        self.list_s = time.monotonic() + LIST_PAUSE * (time.monotonic() - start_s)
        return {
            blob
            for blobs in files.values()
            for blob, size in blobs
            if stored.get(f"{BLOBS}/{blob}") != size
        }

    def _forget(self, lost: set[str]) -> None:
        """Read the files with these blobs again, to upload them."""
        log.warning(
            "%d blobs of %s are gone from the store, and are uploaded again; %s",
            len(lost),
            self.bucket.address,
            EXPIRY,
        )
        self.known = {sha256: blob for sha256, blob in self.known.items() if blob not in lost}
        self.files = {
            path: read
            for path, read in self.files.items()
            if lost.isdisjoint(blob for blob, _ in read[1])
        }

    def beat(self) -> None:
        """Show other starts that this one is alive. StoreError, FencedError."""
        self.ownership.put(self.ownership.newest.files)

    def retain(self) -> None:
        """Delete snapshots that ended RETENTION_S ago, then the blobs that no other snapshot
        lists."""
        now_s = time.monotonic()
        if now_s < self.retained_s + RETENTION_S / 4:
            return
        while self.superseded and self.superseded[0][0] < now_s - RETENTION_S:
            self.superseded.popleft()
        snapshots = [self.ownership.newest, *(snapshot for _, snapshot in self.superseded)]
        oldest = min(snapshot.number for snapshot in snapshots)
        kept = {blob for snapshot in snapshots for blob in snapshot.blobs}
        self.known = {sha256: blob for sha256, blob in self.known.items() if blob in kept}
        self.bucket.delete([name_of(number) for number in numbers(self.bucket) if number < oldest])
        for owner in self.ownership.owners:
            names = self.bucket.list(f"{BLOBS}/{owner}")
            self.bucket.delete(
                [name for name in names if name.removeprefix(f"{BLOBS}/") not in kept]
            )
        self.retained_s = now_s

    def _upload(self, path: str) -> Iterator[Blob]:
        """Yield the blobs of a file. At the end all are in the store; only unknown ones are
        uploaded."""
        uploads: deque[tuple[Future[None], str, str]] = deque()
        size = BLOB_BYTES if path.endswith(".safetensors") else GROWING_BLOB_BYTES
        with open(self.folder / path, "rb", opener=open_regular) as file:
            while content := file.read(size):
                sha256 = hashlib.sha256(content).hexdigest()
                blob = self.known.get(sha256) or f"{self.ownership.newest.owner}/{sha256}"
                if sha256 not in self.known and all(sha256 != pending for _, pending, _ in uploads):
                    upload = self.pool.submit(self.bucket.put, f"{BLOBS}/{blob}", content)
                    uploads.append((upload, sha256, blob))
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


def warn_of_failure(error: Exception, what_follows: str) -> None:
    """Log a failure that is tried again; with a traceback if it is a defect of Lockstep."""
    is_expected = isinstance(error, LockstepError | OSError)
    text = str(error) if is_expected else f"the mirror failed: {type(error).__name__}: {error}"
    log.warning("%s\n  %s", text, what_follows, exc_info=None if is_expected else error)


def signature_of(path: Path) -> Signature | str:
    """Return what tells a changed file. Of another kind return "a named pipe" or the like; "" for a
    link and a missing file."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if stat.S_ISREG(status.st_mode):
        return Signature(status.st_ino, status.st_size, status.st_mtime_ns)
    letter = stat.filemode(status.st_mode)[0]
    return KINDS.get(letter, "") if letter != "l" else ""


def data_paths(folder: Path) -> set[str]:
    """Return the files of the prepared data: they belong together. None while it is being
    prepared."""
    try:
        names = read_json(folder / "data" / DATA_MANIFEST)["files"]
        return {f"data/{name}" for name in (DATA_MANIFEST, *names)}
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def list_files(folder: Path) -> tuple[dict[str, Signature], dict[str, str]]:
    """Return (the files to mirror without checkpoints, why others are omitted), by path in
    `folder`. LOCAL ones and links are in neither."""
    listed: dict[str, Signature] = {}
    omitted: dict[str, str] = {}

    def omit(path: str, error: OSError) -> None:
        omitted[path] = error.strerror or str(error)

    def refuse_folder(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            omit(os.path.relpath(error.filename, folder), error)

    for parent, folders, names in os.walk(folder, onerror=refuse_folder):
        prefix = "" if parent == str(folder) else f"{os.path.relpath(parent, folder)}/"
        omitted |= {prefix + name: why for name in (*folders, *names) if (why := problem_of(name))}
        for group in (folders, names):
            group[:] = [
                name
                for name in group
                if prefix + name not in omitted and not LOCAL.fullmatch(prefix + name)
            ]
        for path in [prefix + name for name in names]:
            try:
                signature = signature_of(folder / path)
            except OSError as error:
                omit(path, error)
                continue
            if isinstance(signature, Signature):
                listed[path] = signature
            elif signature:
                omitted[path] = f"it is {signature}"
    return listed, omitted


def problem_of(name: str) -> str:
    """Return why another host could not create a file of this name; "" if it can."""
    try:
        return "its name is too long" if len(name.encode()) > NAME_BYTES else ""
    except UnicodeEncodeError:
        return "its name is not UTF-8"
