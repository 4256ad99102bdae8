"""The sha256 of files, computed once per host and start of a run.

One worker of a host hashes at a time; the others wait for its file lock, which the kernel releases
when it exits or dies, and read the digests that it wrote. A replaced worker reads them, too. A file
is hashed again when its size, time of modification, time of change or inode differs, and at the
next start of the run: then also a byte that the disk lost is found.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.files import add_checksum, open_regular, read_json, sha256_file, verify_checksum, write_json

CLOCK_TICK_S = 0.02
THREADS = min(8, os.cpu_count() or 1)
Known = dict[str, list[int | str]]  # path -> identity of the file, then its digest


@dataclass(frozen=True)
class FileDigests:
    """Digests of files, shared by the workers of a host.

    path   file that holds them, in the state folder of this host; None: not shared
    start  identifies the start of the run: digests of another start are not used
    """

    path: Path | None = None
    start: str = ""

    def of(self, paths: Iterable[Path]) -> dict[Path, str]:
        """Return path -> hex sha256. OSError: a file cannot be read."""
        with locked(self.path.with_suffix(".lock")) if self.path else nullcontext():
            known = self._read()
            identities = {path: identity(path) for path in paths}
            # The identity is read before the bytes: a file that changes meanwhile is hashed again.
            changed = [path for path, current in identities.items() if known.get(str(path.resolve()), [])[:-1] != current]
            if changed:  # a later edit must get a later time, and the kernel's clock for files is coarse
                newest_ns = max(int(identities[path][2]) for path in changed)
                time.sleep(min(CLOCK_TICK_S, max(0.0, newest_ns / 1e9 + CLOCK_TICK_S - time.time())))
            with ThreadPoolExecutor(THREADS) as pool:
                hashed = zip(changed, pool.map(sha256_file, changed), strict=True)
                known |= {str(path.resolve()): [*identities[path], digest] for path, digest in hashed}
            if changed and self.path:
                with suppress(OSError):  # a full disk: the other workers hash, too
                    write_json(self.path, add_checksum({"start": self.start, "files": known}))
        return {path: str(known[str(path.resolve())][-1]) for path in identities}

    def _read(self) -> Known:
        """Return what is known of this start; nothing when the file is missing or damaged."""
        try:
            value = verify_checksum(read_json(self.path)) if self.path else {}
            return value["files"] if value.get("start") == self.start else {}
        except (OSError, ValueError, KeyError):
            return {}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock on the file and hold it. The kernel releases it when the process exits."""
    lock = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child would keep it
        os.close(lock)


def identity(path: Path) -> list[int | str]:
    """Return numbers that differ after a file was edited or replaced. No program can set st_ctime."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


NOT_SHARED = FileDigests()
