"""The manifest of prepared data: its settings and the sha256 of every file, written last.

An interrupted preparation has no manifest and is repeated. Each reader of the folder verifies every
file, since a damaged one would silently train a wrong model. A host computes each sha256 once per
start of the run: one worker hashes at a time; the others wait for its file lock, which the kernel
releases when it exits or dies, and read the digests that it wrote. A replaced worker reads them,
too. A file is hashed again when its size, time of modification, time of change or inode differs,
and at the next start of the run: then also a byte that the disk lost is found.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.files import (
    add_checksum,
    open_regular,
    read_json,
    sha256_file,
    verify_checksum,
    write_json,
)
from lockstep.log import log

MANIFEST = "prepared.json"
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
            changed = [
                path
                for path, current in identities.items()
                if known.get(str(path.resolve()), [])[:-1] != current
            ]
            # A later edit must get a later time, and the kernel's clock for files is coarse.
            if changed:
                newest_ns = max(int(identities[path][2]) for path in changed)
                time.sleep(
                    min(CLOCK_TICK_S, max(0.0, newest_ns / 1e9 + CLOCK_TICK_S - time.time()))
                )
            with ThreadPoolExecutor(THREADS) as pool:
                hashed = zip(changed, pool.map(sha256_file, changed), strict=True)
                known |= {
                    str(path.resolve()): [*identities[path], digest] for path, digest in hashed
                }
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
    """Return numbers that differ after a file was edited or replaced, or got or lost a hard link.
    No program can set st_ctime."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


NOT_SHARED = FileDigests()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest without verifying the files that it lists. DataError."""
    try:
        return verify_checksum(read_json(folder / MANIFEST))
    except FileNotFoundError:
        raise DataError(
            f"no data was prepared in {folder}",
            f"{MANIFEST} is missing",
            "start the training run once: it prepares the data",
        ) from None
    except ValueError as error:
        raise DataError(
            f"{folder / MANIFEST} is damaged: {error}",
            str(folder),
            "remove this folder to prepare the data again",
        ) from None


def matches_prepared(folder: Path, settings: dict[str, Any], source: Callable[[], Any]) -> bool:
    """Whether data was prepared in `folder`. Adds a description of the source to the settings.
    DataError: other settings or files, or neither prepared data nor a readable source."""
    exists = (folder / MANIFEST).exists()
    try:
        settings["source"] = source()
    except DataError as error:
        if not exists:
            raise
        # The source files are gone or moved; the prepared data is sufficient.
        log.warning(
            "using the prepared data in %s; its source cannot be compared: %s", folder, error.what
        )
    if not exists:
        return False
    prepared = read_manifest(folder)["asked"]
    different = [name for name, value in settings.items() if prepared.get(name) != value]
    if different:
        lines = [
            f"{name}: prepared with {prepared.get(name)}, asked for {settings[name]}"
            for name in different
        ]
        verb = "differs" if len(different) == 1 else "differ"
        raise DataError(
            f"the data was prepared with other settings: {', '.join(different)} {verb}",
            "\n".join([str(folder), *lines]),
            "use another run folder, or the settings and files of this one",
        )
    return True


def write_manifest(
    folder: Path, files: Iterable[Path], digests: FileDigests, **fields: Any
) -> Path:
    """Write the fields that `read_manifest` expects, and the sha256 of `files`; return the file."""
    listed = {path.name: digest for path, digest in digests.of(files).items()}
    write_json(folder / MANIFEST, add_checksum({**fields, "files": listed}))
    return folder / MANIFEST


def verify_files(expected: Mapping[Path, str], folder: Path, digests: FileDigests) -> None:
    """DataError when a file is missing or its sha256 differs from the expected one."""
    actual = digests.of(path for path in expected if path.exists())
    for path, digest in expected.items():
        if (found := actual.get(path, "missing")) != digest:
            raise DataError(
                f"{path} is {'missing' if found == 'missing' else 'damaged'}",
                f"sha256 {found}\nwas    {digest}",
                f"remove {folder} to prepare the data again",
            )


def open_manifest(folder: Path, digests: FileDigests) -> dict[str, Any]:
    """Return the manifest after verifying every file: about 1 s per gigabyte. DataError."""
    manifest = read_manifest(folder)
    verify_files(
        {folder / name: digest for name, digest in manifest["files"].items()}, folder, digests
    )
    return manifest
