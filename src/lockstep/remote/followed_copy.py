"""A copy of a run in a store that follows it, for a host that only watches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.checkpoint.folder import COMMITTED
from lockstep.elastic.generation_log import GenerationLog
from lockstep.errors import CheckpointError, StoreError
from lockstep.files import try_lock
from lockstep.object_store.address import Address
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.download import download
from lockstep.remote.snapshots import SILENT_BEATS, Files, Snapshot, name_of, newest
from lockstep.remote.working_copy import temporary_copy
from lockstep.units import format_duration

ReadStatus = Callable[[], dict[str, Any]]
UNREAD = ("data/", "logs/", "checkpoints/")


class FollowedCopy:
    """The files of the newest snapshot that describe a run: no data, no logs, and of each
    checkpoint its marker."""

    def __init__(self, bucket: RunBucket, folder: Path) -> None:
        self.bucket, self.folder = bucket, folder
        self.snapshot = Snapshot(0, "", 0.0, {})
        self.files: Files = {}  # that the copy has
        self.put_s = 0.0  # when the snapshot was put: since 1970, by the clock of the store
        self.next_s = 0.0

    def status(self) -> dict[str, Any]:
        """Copy what is new; return the status of the run as far as the store has it: `run`,
        `ended`, `source`, and `silent`: no snapshot for as long as counts as a lost host.
        CheckpointError."""
        problem = ""
        try:
            if time.monotonic() >= self.next_s:
                self._update()
        except (StoreError, FileNotFoundError) as error:
            if not self.snapshot.number:
                raise
            # An outage, or the snapshot was just deleted. The next call tries again.
            problem = f"; {getattr(error, 'what', error)}"
        snapshot, age_s = self.snapshot, max(0.0, time.time() - self.put_s)
        record = (
            GenerationLog(self.folder / "generations").newest()
            if (self.folder / "generations").is_dir()
            else None
        )
        ended = (
            {"code": record.end.code, "text": record.end.text} if record and record.end else None
        )
        source = f"snapshot {snapshot.number}, put by {snapshot.host} {format_duration(age_s)} ago{problem}"
        silent = not snapshot.released and age_s > SILENT_BEATS * snapshot.beat_s
        return {"run": str(self.bucket.address), "source": source, "silent": silent, "ended": ended}

    def _update(self) -> None:
        snapshot = newest(self.bucket)
        if snapshot is None:
            raise CheckpointError(
                "there is no run",
                str(self.bucket.address),
                "give the address of a run, as with --out",
            )
        self.next_s = time.monotonic() + snapshot.beat_s / 4
        if snapshot.number == self.snapshot.number:
            return
        put_s = self.bucket.modified_s(name_of(snapshot.number))
        files = {
            path: blobs
            for path, blobs in snapshot.files.items()
            if not path.startswith(UNREAD) or path.endswith(f"/{COMMITTED}")
        }
        changed = {path for path, blobs in files.items() if self.files.get(path) != blobs}
        with TemporaryDirectory(dir=self.folder.parent) as parent:
            (folder := Path(parent) / self.folder.name).mkdir()
            download(self.bucket, snapshot, folder, changed.__contains__, self.folder)
            for new in [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]:
                (self.folder / new).parent.mkdir(parents=True, exist_ok=True)
                os.replace(folder / new, self.folder / new)
        for gone in self.files.keys() - files.keys():
            (self.folder / gone).unlink(missing_ok=True)
        self.files, self.snapshot, self.put_s = files, snapshot, put_s


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
