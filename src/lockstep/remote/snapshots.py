"""The snapshots of a run in an object store: numbered lists of all its files.

    PREFIX/snapshots/0000000042    path -> blobs of each file of the run folder; put if absent
    PREFIX/blobs/OWNER/SHA256      at most 8 MiB of a file, stored before a snapshot lists them

The run is what the newest snapshot lists. Numbers have no gaps and each is put once. So one *owner*
(a start of the run) can continue the run; an earlier owner finds its next number taken. No clock
decides that. A damaged snapshot, such as a torn upload, belongs to no owner: all skip its number.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.checkpoint.folder import COMMITTED, STEP_FOLDER
from lockstep.errors import CheckpointError, FencedError, StoreError, UsageError
from lockstep.files import add_checksum, parse_json, verify_checksum
from lockstep.log import log
from lockstep.object_store.bucket import RunBucket
from lockstep.object_store.storage import MEMBERSHIP
from lockstep.units import format_duration

FOLDER = "snapshots"
BLOBS = "blobs"
PROBES = "probes"
FORMAT = 1
BEAT = "LOCKSTEP_STORE_BEAT_S"  # seconds between two snapshots of a run that trains
DEFAULT_BEAT_S = 15.0
BEAT_RANGE_S = 0.1, 3600.0
NUMBER = re.compile(r"[0-9]{10}")
BLOB_NAME = re.compile(r"[\w-]+/[\w-]+", re.ASCII)
EXPIRY = "does a lifecycle rule of the bucket delete objects of the run? see docs/object-store.md"
READ_TRIES = 3  # of a listing whose snapshots are deleted before they are read
# An owner that puts no snapshot for as many beats has lost the run to the next start.
SILENT_BEATS = 5

Blob = tuple[str, int]  # (OWNER/SHA256, bytes)
Files = Mapping[str, tuple[Blob, ...]]  # path in the run folder -> its content, in order


@dataclass(frozen=True)
class Snapshot:
    """All files of a run folder at one time.

    owner       id of the start of the run that put it
    beat_s      longest time until its owner puts the next one
    released    the owner ended: the next start does not wait
    generation  from which on its owner publishes a run of several hosts; 0: a run of one host
    """

    number: int
    owner: str
    beat_s: float
    files: Files
    released: bool = False
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    generation: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(
            add_checksum(json.loads(json.dumps({"format": FORMAT, **asdict(self)})))
        ).encode()

    @property
    def blobs(self) -> set[str]:
        return {name for blobs in self.files.values() for name, _ in blobs}


class WrongValueError(ValueError):
    """A snapshot that is a whole JSON text, so no torn upload, and that no owner has put like
    this."""


def parse_snapshot(content: bytes) -> Snapshot:
    """ValueError for a torn upload, WrongValueError, CheckpointError for a later format."""
    try:
        value = verify_checksum(parse_json(content.decode()))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise
    except ValueError as error:
        raise WrongValueError(str(error)) from None
    version = value.pop("format", None)
    if is_count(version) and version > FORMAT:
        raise CheckpointError(
            f"a snapshot has format {version}, this version reads format {FORMAT}",
            "the object store",
            "use a newer version of lockstep",
        )
    if version != FORMAT or not is_count(version):
        raise WrongValueError(f"format is {shorten(version)}")
    for name in value:
        if not is_right(name, value[name]):
            raise WrongValueError(f"{name} is {shorten(value[name])}")
    if missing := sorted({"number", "owner", "beat_s", "files"} - value.keys()):
        raise WrongValueError(f"it has no {missing[0]}")
    files = {
        path: tuple((name, size) for name, size in blobs) for path, blobs in value["files"].items()
    }
    return Snapshot(**value | {"files": files})


def shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def is_right(name: str, value: Any) -> bool:
    """Return whether an owner could have put this value; False for a field that no snapshot has."""
    match name:
        case "owner" | "host":
            return type(value) is str and 0 < len(value) <= 255 and value.isprintable()
        case "number" | "pid" | "generation":
            return is_count(value)
        case "beat_s":
            return type(value) in (int, float) and BEAT_RANGE_S[0] <= value <= BEAT_RANGE_S[1]
        case "released":
            return type(value) is bool
        case "files":
            return type(value) is dict and are_files(value)
    return False


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def are_files(files: dict[str, Any]) -> bool:
    """Whether every path stays in the run folder, and no file is the folder of another one."""
    folders = {path[: match.start()] for path in files for match in re.finditer("/", path)}
    names = [name for path in files for name in path.split("/")]
    return (
        not folders & files.keys()
        and not any(name in ("", ".", "..") or "\0" in name for name in names)
        and all(len(name.encode()) <= 255 for name in names)
        and all(type(blobs) is list and all(map(is_blob_entry, blobs)) for blobs in files.values())
    )


def is_blob_entry(value: Any) -> bool:
    if type(value) is not list or len(value) != 2:
        return False
    name, size = value
    return type(name) is str and bool(BLOB_NAME.fullmatch(name)) and is_count(size)


def read_beat_s() -> float:
    text = os.environ.get(BEAT) or str(DEFAULT_BEAT_S)
    low_s, high_s = BEAT_RANGE_S
    with suppress(ValueError):
        if low_s <= (beat_s := float(text)) <= high_s:
            return beat_s
    raise UsageError(
        f"{BEAT}={text[:40]!r} is not a number of seconds from 0.1 to 3600",
        "environment",
        f"unset it: {DEFAULT_BEAT_S:g} s",
    )


def steps_of(files: Iterable[str]) -> list[int]:
    """Return the steps whose checkpoints are among `files`, ascending."""
    folders = {
        path.split("/")[1]
        for path in files
        if path.startswith("checkpoints/") and path.endswith(f"/{COMMITTED}")
    }
    return sorted(int(match[1]) for match in map(STEP_FOLDER.fullmatch, folders) if match)


def name_of(number: int) -> str:
    return f"{FOLDER}/{number:010d}"


def numbers(bucket: RunBucket) -> list[int]:
    names = [path.rpartition("/")[2] for path in bucket.list(FOLDER)]
    return [int(name) for name in names if NUMBER.fullmatch(name)]


def newest(bucket: RunBucket, *, warns: bool = False) -> Snapshot | None:
    """Return the newest whole snapshot; None when there is none. CheckpointError: all are damaged,
    the newest is no torn upload and has wrong values, or the store has blobs without a snapshot.
    warns: about torn uploads that are skipped"""
    for _ in range(READ_TRIES):
        if not (listed := numbers(bucket)):
            if BLOBS not in bucket.names():
                return None
            if not numbers(bucket):
                raise CheckpointError(
                    "the store has blobs of a run and no snapshot: they were deleted",
                    f"{bucket.address}/{FOLDER}",
                    "restore the snapshots; to train from step 1, "
                    "delete the blobs, too, or give another --out",
                )
            continue
        with suppress(FileNotFoundError):  # deleted since it was listed: there are newer ones
            return newest_of(bucket, listed, warns=warns)
    raise StoreError(
        "snapshots are listed and cannot be read, or deleted at once",
        f"{bucket.address}/{FOLDER}",
        EXPIRY,
    )


def newest_of(bucket: RunBucket, listed: Sequence[int], *, warns: bool) -> Snapshot:
    """Return the newest whole snapshot of `listed`, which is not empty. FileNotFoundError,
    CheckpointError."""
    for number in reversed(listed):
        where = f"{bucket.address}/{name_of(number)}"
        hint = "restore an earlier version of this object, or delete it"
        try:
            snapshot = parse_snapshot(bucket.read(name_of(number)))
        except WrongValueError as error:
            raise CheckpointError(f"snapshot {number} is damaged: {error}", where, hint) from None
        except ValueError as error:
            if warns:
                log.warning(
                    "snapshot %d is damaged and is skipped: %s\n  %s\n  %s",
                    number,
                    error,
                    where,
                    hint,
                )
            continue
        if snapshot.number != number:
            raise CheckpointError(
                f"snapshot {number} is damaged: it holds snapshot {snapshot.number}", where, hint
            )
        return snapshot
    raise CheckpointError(
        "every snapshot of the run is damaged",
        f"{bucket.address}/{name_of(listed[-1])}",
        "restore an earlier version of these objects",
    )


def refuse_unsafe_store(bucket: RunBucket) -> None:
    """StoreError when the store puts an object that exists: two clusters could continue the run."""
    name = f"{PROBES}/{secrets.token_hex(8)}"
    first, second = (bucket.create(name, content) for content in (b"first", b"second"))
    bucket.remove(name)
    if (first, second) != (b"first", b"first"):
        raise StoreError(
            "the store ignores If-None-Match, so it cannot decide which cluster continues a run",
            str(bucket.address),
            "use a store with conditional writes: AWS S3, MinIO, Ceph Squid, Cloudflare R2",
        )


def refuse_other_objects(bucket: RunBucket) -> None:
    """UsageError when the prefix holds objects that are not of a run."""
    if others := [
        name for name in bucket.names() if name not in (FOLDER, BLOBS, PROBES, MEMBERSHIP)
    ]:
        listed = ", ".join(sorted(others)[:3])
        raise UsageError(
            f"{bucket.address} holds no run, but {len(others)} other names: {listed}",
            "--out",
            "give another prefix",
        )


def wait_until_silent(bucket: RunBucket, snapshot: Snapshot) -> Snapshot:
    """Return the newest snapshot once its owner released it, or put none for SILENT_BEATS.
    UsageError when the owner puts another one. Measured by this host's clock alone."""
    wait_s = SILENT_BEATS * snapshot.beat_s
    if not snapshot.released:
        what = "%s was not released by %s; waiting %s to see whether it still trains"
        log.info(what, bucket.address, snapshot.host, format_duration(wait_s))
    until_s = time.monotonic() + wait_s
    while not snapshot.released and time.monotonic() < until_s:
        time.sleep(min(1.0, snapshot.beat_s / 4))
        latest = newest(bucket) or snapshot
        if latest.number > snapshot.number and not latest.released:
            raise UsageError(
                f"another training is already running in {bucket.address}: "
                f"on {latest.host}, pid {latest.pid}",
                f"it has just put snapshot {latest.number}",
                "wait for it, stop it there with SIGTERM, or choose another --out",
            )
        snapshot = latest
    return snapshot


class Ownership:
    """The right of this process to put the next snapshot, after `before`. It is lost for good when
    another owner puts a snapshot: FencedError."""

    def __init__(
        self, bucket: RunBucket, owner: str, before: Snapshot | None, generation: int = 0
    ) -> None:
        self.bucket = bucket
        self.put_s = time.monotonic()
        beat_s = read_beat_s()
        # Owners whose blobs this one may delete. A later owner is not among them, so nothing of
        # its is deleted.
        self.owners = {*bucket.names(BLOBS), owner}
        number, files = (before.number, before.files) if before else (0, {})
        self.newest = Snapshot(number, owner, beat_s, files, generation=generation)
        self.put(files)

    @property
    def beat_due(self) -> bool:
        return time.monotonic() > self.put_s + self.newest.beat_s

    def put(self, files: Files, *, released: bool = False) -> None:
        """Put the next snapshot. StoreError: try again; FencedError: another owner has put one."""
        start_s, number = time.monotonic(), self.newest.number
        while True:
            number += 1
            snapshot = replace(self.newest, number=number, files=files, released=released)
            content = snapshot.to_bytes()
            self._require_readable(content)
            stored = self.bucket.create(name_of(number), content)
            if stored == content:
                break
            with suppress(ValueError):  # damaged: it belongs to no owner
                if (winner := parse_snapshot(stored)).owner != snapshot.owner:
                    self._refuse(winner)
        listed = numbers(self.bucket)
        # A number that a later owner has put and deleted is free again. Later numbers may also be
        # damaged.
        if max(listed, default=0) > number:
            latest = newest(self.bucket)
            if latest and latest.number > number:
                self._refuse(latest)
        if number not in listed:
            raise StoreError(
                f"snapshot {number} was stored, and was gone at once",
                str(self.bucket.address),
                EXPIRY,
            )
        self.newest, self.put_s = snapshot, start_s

    def _require_readable(self, content: bytes) -> None:
        """StoreError when the hosts that read this snapshot would take it for damaged."""
        try:
            parse_snapshot(content)
        except ValueError as error:
            raise StoreError(
                f"no host could read the next snapshot: {error}",
                str(self.bucket.address),
                "rename or move the file that it names, if it names one; else report this",
            ) from None

    def _refuse(self, winner: Snapshot) -> None:
        raise FencedError(
            f"another start has taken over the run in {self.bucket.address}: "
            f"{winner.host}, pid {winner.pid}",
            f"it put snapshot {winner.number}, while this host did not reach the store",
            "nothing of this host is in the store since then; the run continues there",
        )
