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
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
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
            except OSError as error:
                left_s = until_s - time.monotonic()
                if left_s < 0:
                    what, where = str(error), str(self.bucket.address)
                    if isinstance(error, StoreError):
                        what, where = error.what, error.where
                    raise StoreError(
                        f"the end of the run was not uploaded: {what}",
                        where,
                        f"the run is in {self.folder}, and the same command uploads it",
                    ) from None
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
        # Of a marker -> files of its checkpoint, as they were verified; none: it is damaged.
        self.whole: dict[Signature | str, dict[str, Signature | str]] = {}
        self.omitted: set[str] = set()  # paths with a warning
        self.uploaded_bytes = 0
        self.superseded = deque[tuple[float, Snapshot]]()  # when, and earlier snapshots
        self.retained_s = -RETENTION_S
        self.list_s = 0.0  # when the blobs are listed again, at the latest with a new checkpoint
        self.reader = ThreadPoolExecutor(1, "mirror")  # this thread puts beats meanwhile
        self.pool = ThreadPoolExecutor(UPLOADS, "upload")

    def step(self) -> None:
        """Publish when a checkpoint is new or a beat is due. FencedError."""
        steps = self._with_beats(self.steps)
        published = steps_of(self.ownership.newest.files)
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
            raise CheckpointError(
                f"the checkpoint of step {last} is damaged "
                "or unreadable on this host, so it is not in the store",
                f"{self.checkpoints / folder_name(last)}; "
                f"newest step in {self.bucket.address}: {max(published, default='none')}",
                "see the warnings above; the same command resumes from the checkpoint before it",
            )

    def steps(self) -> dict[int, dict[str, Signature | str]]:
        """Return step -> files of each whole checkpoint, which is verified once, and again when
        one of its files changes. A damaged one is a warning."""
        steps = {}
        for step in committed_steps(self.checkpoints):
            marker = signature_of(self.checkpoints / folder_name(step) / COMMITTED)
            try:
                with pinned(self.checkpoints, step) as path:
                    known = self.whole.get(marker)
                    if path and (known is None or self._signatures(known) != known):
                        self.whole[marker] = self._verify(path, step)
            except OSError as error:  # rights; tried again
                self._omit(f"checkpoints/{folder_name(step)}", error)
            if files := self.whole.get(marker):
                steps[step] = files
        return steps

    def _signatures(self, paths: Iterable[str]) -> dict[str, Signature | str]:
        return {path: signature_of(self.folder / path) for path in paths}

    def _verify(self, path: Path, step: int) -> dict[str, Signature | str]:
        """Return the files of a checkpoint as they were before they were read; none when it is
        damaged. OSError: it cannot be read."""
        before = self._signatures(f"checkpoints/{path.name}/{name}" for name in os.listdir(path))
        files, problems = verify_listed_files(path, step)
        if problems:
            log.warning("%s is damaged and is not uploaded: %s", path, ", ".join(problems))
            return {}
        for name in unlisted_files(path, files):
            self._omit(
                f"checkpoints/{path.name}/{name}",
                "the manifest of this checkpoint does not list it",
            )
        paths = [f"checkpoints/{path.name}/{name}" for name in (*files, MANIFEST, COMMITTED)]
        return {listed: before.get(listed, "") for listed in paths}

    def publish(self, *, released: bool = False) -> bool:
        """Upload what is new, then put a snapshot. False: a file changed meanwhile; try again.
        StoreError: likewise. FencedError."""
        start_s, before = time.monotonic(), self.ownership.newest
        bytes_before = self.uploaded_bytes
        if (files := self._with_beats(partial(self._collect, released))) is None:
            return False
        self.ownership.put(files, released=released)
        self.superseded.append((time.monotonic(), before))
        for step in sorted({*steps_of(files)} - {*steps_of(before.files)}):
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

    def _collect(self, released: bool) -> Files | None:
        """Upload what is new; return all files of the run, of one moment. None: they changed."""
        with ExitStack() as pins:
            verified: dict[str, Signature | str] = {}
            for step, listed in self.steps().items():
                if pins.enter_context(pinned(self.checkpoints, step)):
                    verified |= listed
            new_steps = set(steps_of(verified)) - set(steps_of(self.ownership.newest.files))
            for _ in range(UPLOAD_TRIES):
                if (files := self._read(verified)) is None:
                    return None
                is_listed = released or new_steps or time.monotonic() > self.list_s
                if not is_listed or not (lost := self._lost_blobs(files)):
                    return files
                self._forget(lost)
        raise StoreError(
            f"{len(lost)} blobs are missing right after their upload",
            str(self.bucket.address),
            EXPIRY,
        )

    def _read(self, verified: Mapping[str, Signature | str]) -> Files | None:
        """Upload the blobs that are new; return all files of the run, None when they are not of
        one moment, or not as they were verified. verified: the files of checkpoints"""
        data = data_paths(self.folder)
        listed = {**list_files(self.folder, self._omit), **verified}
        if lost := sorted(data - listed.keys()):
            raise StoreError(
                f"the run folder lacks its data: {join_names(lost)}",
                str(self.folder),
                "copy it back",
            )
        consistent = verified.keys() | data
        files: dict[str, tuple[Signature | str, tuple[Blob, ...]]] = {}
        for path, signature in listed.items():
            try:
                if self.files.get(path, [None])[0] != signature:
                    self.files[path] = signature, self._upload(path)
                files[path] = self.files[path]
            except FileNotFoundError:  # a temporary file; a consistent one is missed below
                continue
            except OSError as error:
                if path in consistent or isinstance(error, StoreError):
                    raise
                self._omit(path, error)
        after = self._signatures(consistent)
        if changed := {
            path for path in consistent if path not in files or after[path] != listed[path]
        }:
            for path in changed:
                self.files.pop(path, None)
            return None
        self.files = files
        return {path: blobs for path, (_, blobs) in files.items()}

    def _omit(self, path: str, why: OSError | str) -> None:
        if path not in self.omitted:
            self.omitted.add(path)
            # Escaped: a name may have any bytes.
            log.warning(
                "%s is omitted from the snapshots: %s",
                ascii(f"{self.folder}/{path}").strip("'"),
                why if isinstance(why, str) else why.strerror or why,
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
        self.bucket.remove(*(name_of(number) for number in numbers(self.bucket) if number < oldest))
        for owner in self.ownership.owners:
            names = self.bucket.list(f"{BLOBS}/{owner}")
            self.bucket.remove(
                *(name for name in names if name.removeprefix(f"{BLOBS}/") not in kept)
            )
        self.retained_s = now_s

    def _upload(self, path: str) -> tuple[Blob, ...]:
        """Store the blobs of a file that are not known; return all of them, in order."""
        blobs: list[Blob] = []
        uploads: dict[str, Future[str]] = {}  # sha256 -> its blob, once it is stored
        size = BLOB_BYTES if path.endswith(".safetensors") else GROWING_BLOB_BYTES
        with open(self.folder / path, "rb", opener=open_regular) as file:
            while content := file.read(size):
                sha256 = hashlib.sha256(content).hexdigest()
                blob = self.known.get(sha256) or f"{self.ownership.newest.owner}/{sha256}"
                blobs.append((blob, len(content)))
                if sha256 not in self.known and sha256 not in uploads:
                    uploads[sha256] = self.pool.submit(self._put, blob, content)
                    self.uploaded_bytes += len(content)
                if len(uploads) > UPLOADS:
                    self._finish_upload(uploads)
        while uploads:
            self._finish_upload(uploads)
        return tuple(blobs)

    def _put(self, blob: str, content: bytes) -> str:
        self.bucket.write(f"{BLOBS}/{blob}", content)
        return blob

    def _finish_upload(self, uploads: dict[str, Future[str]]) -> None:
        """Wait for the first of the uploads, and remove it."""
        sha256 = next(iter(uploads))
        self.known[sha256] = uploads.pop(sha256).result()

    def _with_beats(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, with beats meanwhile. FencedError: another owner has put a
        snapshot; `work` then ends with its next upload."""
        future = self.reader.submit(work)
        try:
            while not wait([future], timeout=POLL_S).done:
                if self.ownership.beat_due:
                    with suppress(StoreError):  # an outage, in which `work` fails, too
                        self.beat()
        except FencedError:
            self.pool.shutdown(wait=False, cancel_futures=True)
            raise
        return future.result()


def warn_of_failure(error: Exception, what_follows: str) -> None:
    """Log a failure that is tried again; with a traceback if it is a defect of Lockstep."""
    is_expected = isinstance(error, LockstepError | OSError)
    text = str(error) if is_expected else f"the mirror failed: {type(error).__name__}: {error}"
    log.warning("%s\n  %s", text, what_follows, exc_info=None if is_expected else error)


def signature_of(path: Path) -> Signature | str:
    """Return what tells a changed file. Of another kind return "a named pipe" or the like; "" for a
    missing file."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    if stat.S_ISREG(status.st_mode):
        return Signature(status.st_ino, status.st_size, status.st_mtime_ns)
    return KINDS.get(stat.filemode(status.st_mode)[0], "")


def data_paths(folder: Path) -> set[str]:
    """Return the files of the prepared data: they belong together. None while it is being
    prepared."""
    try:
        names = read_json(folder / "data" / DATA_MANIFEST)["files"]
        return {f"data/{name}" for name in (DATA_MANIFEST, *names)}
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def list_files(folder: Path, omit: Callable[[str, OSError | str], None]) -> dict[str, Signature]:
    """Return the files to mirror without checkpoints, by path in `folder`. LOCAL ones and links
    are not among them. omit: called with others, and why"""
    listed: dict[str, Signature] = {}
    folders = [""]
    for prefix in folders:  # which grows
        try:
            names = os.listdir(folder / prefix)
        except FileNotFoundError:
            continue
        except OSError as error:
            omit(prefix.rstrip("/"), error)
            continue
        for path in [prefix + name for name in names]:
            if LOCAL.fullmatch(path):
                continue
            try:
                signature = signature_of(folder / path)
            except OSError as error:
                omit(path, error)
                continue
            if signature in ("", KINDS["l"]):
                continue
            if why := problem_of(path.rpartition("/")[2]):
                omit(path, why)
            elif isinstance(signature, Signature):
                listed[path] = signature
            elif signature == KINDS["d"]:
                folders.append(f"{path}/")
            else:
                omit(path, f"it is {signature}")
    return listed


def problem_of(name: str) -> str:
    """Return why another host could not create a file of this name; "" if it can."""
    try:
        return "its name is too long" if len(name.encode()) > NAME_BYTES else ""
    except UnicodeEncodeError:
        return "its name is not UTF-8"
