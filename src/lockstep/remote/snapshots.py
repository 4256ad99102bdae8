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
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from lockstep.elastic.stored_folder import MEMBERSHIP
from lockstep.errors import CheckpointError, FencedError, StoreError, UsageError
from lockstep.files import add_checksum, parse_json, verify_checksum
from lockstep.log import log
from lockstep.object_store.bucket import RunBucket
from lockstep.units import format_duration

FOLDER, BLOBS, PROBES = "snapshots", "blobs", "probes"
FORMAT = 1
BEAT = "LOCKSTEP_STORE_BEAT_S"  # seconds between two snapshots of a run that trains
DEFAULT_BEAT_S = 15.0
SILENT_BEATS = 5  # an owner that puts no snapshot for as many beats has lost the run to the next start

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
        return json.dumps(add_checksum(json.loads(json.dumps({"format": FORMAT, **asdict(self)})))).encode()

    @staticmethod
    def from_bytes(content: bytes) -> Snapshot | None:
        """Parse a snapshot; None when it is damaged. CheckpointError for a later format."""
        try:
            value: dict[str, Any] = verify_checksum(parse_json(content.decode()))
            if (version := value.pop("format")) != FORMAT:
                what = f"a snapshot has format {version}, this version reads format {FORMAT}"
                raise CheckpointError(what, "the object store", "use a newer version of lockstep")
            if any(PurePosixPath(path).is_absolute() or ".." in path.split("/") for path in value["files"]):
                return None
            files = {path: tuple((str(name), int(size)) for name, size in blobs) for path, blobs in value["files"].items()}
            return Snapshot(**value | {"files": files})
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def blobs(self) -> set[str]:
        return {name for blobs in self.files.values() for name, _ in blobs}


def read_beat_s() -> float:
    text = os.environ.get(BEAT) or str(DEFAULT_BEAT_S)
    with suppress(ValueError):
        if 0.1 <= (beat_s := float(text)) <= 3600:
            return beat_s
    raise UsageError(f"{BEAT}={text[:40]!r} is not a number of seconds from 0.1 to 3600", "environment", f"unset it: {DEFAULT_BEAT_S:g} s")


def name_of(number: int) -> str:
    return f"{FOLDER}/{number:010d}"


def numbers(bucket: RunBucket) -> list[int]:
    return [int(name) for path in bucket.list(FOLDER) if (name := path.rpartition("/")[2]).isdecimal()]


def newest(bucket: RunBucket) -> Snapshot | None:
    """Return the newest whole snapshot; None when there is none. CheckpointError: all are damaged."""
    listed = numbers(bucket)
    for number in reversed(listed):
        try:
            if snapshot := Snapshot.from_bytes(bucket.get(name_of(number))):
                return snapshot
        except FileNotFoundError:  # deleted since: there are newer ones
            return newest(bucket)
    if listed:
        where = f"{bucket.address}/{name_of(listed[-1])}"
        raise CheckpointError("every snapshot of the run is damaged", where, "restore an earlier version of these objects")
    return None


def refuse_unsafe_store(bucket: RunBucket) -> None:
    """StoreError when the store puts an object that exists: two clusters could continue the run."""
    name = f"{PROBES}/{secrets.token_hex(8)}"
    first, second = (bucket.put_if_absent(name, content) for content in (b"first", b"second"))
    bucket.delete([name])
    if (first, second) != (b"first", b"first"):
        hint = "use a store with conditional writes: AWS S3, MinIO, Ceph Squid, Cloudflare R2"
        raise StoreError("the store ignores If-None-Match, so it cannot decide which cluster continues a run", str(bucket.address), hint)


def refuse_other_objects(bucket: RunBucket) -> None:
    """UsageError when the prefix holds objects that are not of a run."""
    if others := [name for name in bucket.names() if name not in (FOLDER, BLOBS, PROBES, MEMBERSHIP)]:
        listed = ", ".join(sorted(others)[:3])
        raise UsageError(f"{bucket.address} holds no run, but {len(others)} other names: {listed}", "--out", "give another prefix")


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
            what = f"another training is already running in {bucket.address}: on {latest.host}, pid {latest.pid}"
            hint = "wait for it, stop it there with SIGTERM, or choose another --out"
            raise UsageError(what, f"it has just put snapshot {latest.number}", hint)
        snapshot = latest
    return snapshot


class Ownership:
    """The right of this process to put the next snapshot, after `before`. It is lost for good when
    another owner puts a snapshot: FencedError."""

    def __init__(self, bucket: RunBucket, owner: str, before: Snapshot | None, generation: int = 0) -> None:
        self.bucket, self.put_s, beat_s = bucket, time.monotonic(), read_beat_s()
        # Owners whose blobs this one may delete. A later owner is not among them, so nothing of its is deleted.
        self.owners = {*bucket.names(BLOBS), owner}
        self.newest = replace(before or Snapshot(0, owner, beat_s, {}), owner=owner, beat_s=beat_s, released=False)
        self.newest = replace(self.newest, host=socket.gethostname(), pid=os.getpid(), generation=generation)
        self.put(self.newest.files)

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
            stored = self.bucket.put_if_absent(name_of(number), content)
            if stored == content:
                break
            winner = Snapshot.from_bytes(stored)
            if winner and winner.owner != snapshot.owner:
                self._refuse(winner)
        # A number that a later owner has put and deleted is free again.
        if numbers(self.bucket)[-1] > number and (winner := newest(self.bucket)):
            self._refuse(winner)
        self.newest, self.put_s = snapshot, start_s

    def _refuse(self, winner: Snapshot) -> None:
        what = f"another start has taken over the run in {self.bucket.address}: {winner.host}, pid {winner.pid}"
        where = f"it put snapshot {winner.number}, while this host did not reach the store"
        raise FencedError(what, where, "nothing of this host is in the store since then; the run continues there")
