"""Make a folder of files a checkpoint, and verify one. The states of the folder are in `folder.py`.

A commit, in order: write and fsync each file; write and fsync the content of the marker; fsync the
folder; rename the folder to its final name; fsync the parent; rename the marker to COMMITTED; fsync
the folder. Everything that needs disk space is written before the first rename.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.folder import (
    COMMITTED,
    REMOVING,
    WRITING,
    FailPoint,
    discard,
    folder_name,
    hidden_name,
    is_unfinished,
    lock_marker,
    no_fail_point,
    remove_folder,
    set_aside,
    unlock_marker,
)
from lockstep.errors import CheckpointError, DamagedFileError
from lockstep.files import fsync_folder, open_regular
from lockstep.log import log
from lockstep.units import format_bytes

MANIFEST = "manifest.json"
FACTS = "facts.json"  # besides the manifest the only file without tensors
FORMAT = 1
CHUNK_BYTES = 4 * 2**20
# Few: a thread of idle priority that is preempted with the interpreter lock delays training.
PIECE_BYTES = 2**24
COMMITTER_TIMEOUT_S = 60.0

Bytes = npt.NDArray[np.uint8]
Run = Callable[[Iterator[None]], None]  # exhausts an iterator


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str


def marker_content(step: int, manifest: bytes | bytearray) -> bytes:
    digest = hashlib.sha256(manifest).hexdigest()
    return f"lockstep checkpoint, step {step}, sha256 of {MANIFEST}: {digest}\n".encode()


def read_manifest(path: Path, step: int) -> tuple[dict[str, FileRecord], list[str]]:
    """Return (the files that the manifest of `path` lists, the problems of manifest and marker).
    CheckpointError when it is whole but has a later format: that is not damage."""
    manifest, problem = read_verified(path / MANIFEST)
    marker, marker_problem = read_verified(path / COMMITTED)
    if problem or marker_problem:
        return {}, [text for text in (problem, marker_problem) if text]
    if marker != marker_content(step, manifest):
        return {}, [f"{MANIFEST} and {COMMITTED} do not match: one of them was changed"]
    try:
        value = json.loads(manifest)
        if value["format"] != FORMAT:
            raise CheckpointError(
                f"the checkpoint of step {step} has format {value['format']}, "
                f"this version reads format {FORMAT}",
                str(path),
                "use a newer version of lockstep",
            )
        files = parse_file_records(value["files"])
        return files, [] if FACTS in files else [f"the manifest does not list {FACTS}"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {}, [f"{MANIFEST} is malformed: {error}"]


def parse_file_records(files: dict[str, Any]) -> dict[str, FileRecord]:
    """Return the files listed in a manifest or by a shard writer. ValueError, TypeError."""
    for name in files:
        if "/" in name or "\0" in name or name in ("", ".", "..", MANIFEST, COMMITTED):
            raise ValueError(f"it lists {name!r}, which is not a file of this folder")
    return {name: FileRecord(**record) for name, record in files.items()}


def read_verified(
    path: Path, record: FileRecord | None = None, *, keep: bool = True
) -> tuple[bytearray, str]:
    """Return (the file's bytes, "") or (no bytes, the problem). Each byte is read and hashed once;
    without `keep`, only one chunk is in memory. record: None: any content is right"""
    sha256 = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0, opener=open_without_links) as file:
            size = os.fstat(file.fileno()).st_size
            if record and size != record.bytes:
                problem = f"{path.name} has {size} bytes, the manifest lists {record.bytes}"
                return bytearray(), problem
            content, start = bytearray(size if keep else CHUNK_BYTES), 0
            view = memoryview(content)
            while count := file.readinto(view[start : start + CHUNK_BYTES]):
                sha256.update(view[start : start + count])
                start += count if keep else 0
    except OSError as error:
        return bytearray(), damage_of(path.name, error)
    if record and sha256.hexdigest() != record.sha256:
        return bytearray(), f"{path.name} has changed: its sha256 differs from the manifest's"
    return content, ""


def open_without_links(path: str, flags: int) -> int:
    """Opener for files of a checkpoint: regular files only, as a link could point elsewhere."""
    return open_regular(path, flags | os.O_NOFOLLOW)


def damage_of(name: str, error: OSError) -> str:
    """Return the damage that `error` reports; re-raise one that is not about the content."""
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    if isinstance(error, DamagedFileError):
        return error.what
    if error.errno == errno.EIO:
        return f"{name} cannot be read: {error.strerror}"
    raise error


def unlisted_files(path: Path, files: Collection[str]) -> list[str]:
    return sorted(set(os.listdir(path)) - {*files, MANIFEST, COMMITTED})


def find_damage(path: Path, step: int) -> list[str]:
    """Return the problems of the committed checkpoint at `path`; empty when it is whole. Reads
    every byte, with one chunk in memory."""
    files, problems = verify_listed_files(path, step)
    if files:
        problems += [
            f"{name} does not belong here: the manifest does not list it"
            for name in unlisted_files(path, files)
        ]
    return problems


def verify_listed_files(path: Path, step: int) -> tuple[dict[str, FileRecord], list[str]]:
    """Return (the files that the manifest lists, the problems of these and of the manifest)."""
    files, problems = read_manifest(path, step)
    for name, record in sorted(files.items()):
        _, problem = read_verified(path / name, record, keep=False)
        problems += [problem] if problem else []
    return files, problems


def exhaust(pieces: Iterator[None]) -> None:
    for _ in pieces:
        pass


class Attempt(AbstractContextManager["Attempt"]):
    """An attempt to write a checkpoint, in a hidden folder: afterwards committed or deleted."""

    def __init__(self, folder: Path, step: int, fail_point: FailPoint = no_fail_point) -> None:
        self.folder = folder
        self.step = step
        self.fail_point = fail_point
        self.files: dict[str, FileRecord] = {}
        self.committed = False
        self.state = WRITING
        while (created := self._create()) is None:
            pass  # a sweep by another process deleted the folder before it had a marker
        self.path, self.marker = created

    def _create(self) -> tuple[Path, int] | None:
        path = self.folder / hidden_name(self.step)
        path.mkdir()
        try:
            (path / WRITING).touch(0o644, exist_ok=False)
            marker = lock_marker(path / WRITING, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileExistsError, FileNotFoundError):
            return None
        except OSError:
            (path / WRITING).unlink(missing_ok=True)
            path.rmdir()
            raise
        return None if marker is None else (path, marker)

    def put(self, name: str, chunks: Iterable[bytes | memoryview], run: Run = exhaust) -> None:
        self.files[name] = write_file(self.path / name, chunks, self.fail_point, run)
        self.fail_point(f"after {name}")

    def seal(self) -> None:
        """Write the manifest, and its hash into the marker."""
        files = {name: vars(self.files[name]) for name in sorted(self.files)}
        manifest = (
            json.dumps({"format": FORMAT, "step": self.step, "files": files}, indent=1).encode()
            + b"\n"
        )
        self.put(MANIFEST, [manifest])
        with open(self.path / WRITING, "r+b") as marker:
            marker.write(marker_content(self.step, manifest))
            marker.flush()
            os.fsync(marker.fileno())
        fsync_folder(self.path)
        self.fail_point("sealed")

    def commit(self) -> bool:
        """Make it the checkpoint of its step; False, without changes, when there is one."""
        self.seal()
        target = self.folder / folder_name(self.step)
        while True:
            try:
                os.rename(self.path, target)  # which replaces an empty folder (rename(2))
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            if (target / COMMITTED).exists():
                return False
            clear_target(target)
        self.path = target
        self.fail_point("renamed")
        fsync_folder(self.folder)
        self.fail_point("before the marker")
        os.rename(target / WRITING, target / COMMITTED)
        self.state = COMMITTED
        self.fail_point("marked")
        fsync_folder(target)
        self.committed = True
        return True

    def __exit__(self, *_: object) -> None:
        if self.committed:
            unlock_marker(self.marker)
            return
        try:
            if self.state == COMMITTED:
                # Revoke it: it may not be on the disk, and the save is reported as failed.
                try:
                    os.rename(self.path / COMMITTED, self.path / REMOVING)
                except OSError:
                    unlock_marker(self.marker)
                    raise
                self.state = REMOVING
            remove_folder(self.path, self.marker, self.state, self.fail_point)
        except OSError as problem:
            log.warning(
                "%s could not be removed (%s); the next save tries again",
                self.path,
                problem.strerror,
            )


def try_disk(folder: Path) -> None:
    """Write a small checkpoint without its commit, rename it, and remove it. OSError. CIFS refuses
    to write a locked marker and to rename the folder of an open one."""
    with Attempt(folder, 0) as attempt:
        attempt.put(FACTS, [b"{}"])
        attempt.seal()
        hidden = folder / hidden_name(0)
        os.rename(attempt.path, hidden)
        os.rename(hidden, attempt.path)


def write_file(
    path: Path,
    chunks: Iterable[bytes | memoryview],
    fail_point: FailPoint = no_fail_point,
    run: Run = exhaust,
) -> FileRecord:
    """Write a new file and flush it to the disk. `run` exhausts an iterator that hashes and writes
    one piece per item; it may do so in another thread.

    Whole pieces bypass the page cache where the file system supports it: to fill the cache takes
    more processor time than to hash.
    """
    sha256 = hashlib.sha256()
    buffer = np.frombuffer(mmap.mmap(-1, PIECE_BYTES), np.uint8)  # page-aligned for O_DIRECT
    with open(path, "xb", buffering=0) as file:
        set_direct(file, True)

        def write_pieces() -> Iterator[None]:
            for piece in fill(buffer, chunks):
                sha256.update(piece.data)
                # The last piece may end inside a sector, which O_DIRECT cannot write.
                if len(piece) < len(buffer):
                    fail_point(f"in {path.name}")
                    set_direct(file, False)
                write_all(file, piece)
                yield

        run(write_pieces())
        os.fsync(file.fileno())
        return FileRecord(file.tell(), sha256.hexdigest())


def fill(buffer: Bytes, chunks: Iterable[bytes | memoryview]) -> Iterator[Bytes]:
    """Yield `buffer` whenever it is full of the bytes of `chunks`, and last the part that is
    not."""
    used = 0
    for chunk in chunks:
        data = np.frombuffer(chunk, np.uint8)
        while len(data):
            count = min(len(data), len(buffer) - used)
            # Releases the interpreter lock, unlike memoryview.
            np.copyto(buffer[used : used + count], data[:count])
            data, used = data[count:], used + count
            if used == len(buffer):
                yield buffer
                used = 0
    yield buffer[:used]


def write_all(file: FileIO, data: Bytes) -> None:
    rest = data.data
    while rest:
        try:
            rest = rest[file.write(rest) :]
        except OSError as error:
            # Some file systems accept the flag and then refuse to write with it.
            if error.errno != errno.EINVAL or not set_direct(file, False):
                raise


def set_direct(file: FileIO, direct: bool) -> bool:
    """Switch the page cache off or on for `file`; return False when it was so already, or when the
    file system does not support it."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    with suppress(OSError):  # EINVAL: not supported
        fcntl.fcntl(file, fcntl.F_SETFL, wanted)
        return wanted != flags
    return False


def clear_target(target: Path) -> None:
    """Free the name of something other than a checkpoint: wait for another process that is between
    its rename and its marker; delete the folder of a process that died there; set aside one
    without."""
    deadline = time.monotonic() + COMMITTER_TIMEOUT_S
    while not target.is_symlink() and is_unfinished(target):
        if discard(target):
            log.info("removed %s, left unfinished by a process that died", target)
            return
        if time.monotonic() > deadline:
            raise CheckpointError(
                "another process did not finish "
                f"committing {target.name} within {COMMITTER_TIMEOUT_S:.0f} s",
                str(target),
                "stop any second run in the same folder",
            )
        time.sleep(0.01)
    if (
        os.path.lexists(target)
        and not (target / COMMITTED).exists()
        and (aside := set_aside(target, "unmarked"))
    ):
        log.warning(
            "%s has no marker, so it is not a checkpoint; set aside as %s", target, aside.name
        )


HINTS = {
    errno.ENOSPC: (
        "free some space, or keep fewer checkpoints (checkpoint.keep); older checkpoints are whole"
    ),
    errno.EDQUOT: (
        "disk quota exceeded: free some space, or keep fewer checkpoints (checkpoint.keep)"
    ),
    errno.EROFS: (
        "the file system is mounted read-only: "
        "choose another folder with --out, or mount it for writing"
    ),
    errno.EACCES: (
        "this user may not write there: choose another folder with --out, or change its "
        "permissions; on CIFS no checkpoint can be saved: use NFS or a store"
    ),
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENOENT: "the folder is missing and is not created again: mount its disk",
    errno.EIO: "the disk reports an error (see dmesg); choose another folder with --out",
    errno.ENOLCK: "this file system has no file locks (mount Lustre with -o flock)",
}
HINTS |= {
    errno.EPERM: HINTS[errno.EACCES],
    errno.EOPNOTSUPP: HINTS[errno.ENOLCK],
    errno.ENOSYS: HINTS[errno.ENOLCK],
}


def free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


@contextmanager
def explain_write_errors(what: str, folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn an OSError inside into a CheckpointError: reason, bytes needed and free, hint."""
    try:
        yield
    except OSError as error:
        where = f"{format_bytes(needed_bytes)} needed in {folder}"
        with suppress(OSError):
            where = (
                f"{format_bytes(needed_bytes)} needed, "
                f"{format_bytes(free_bytes(folder))} free in {folder}"
            )
            if not os.statvfs(folder).f_favail:
                where += ", but no room for another file name (inodes)"
        if error.filename and Path(error.filename) != folder:
            where += f"\n{error.filename}"
        raise CheckpointError(
            f"{what}: {error.strerror or error}",
            where,
            HINTS.get(error.errno or 0, "try again, or choose another folder with --out"),
        ) from error


@contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside, such as a missing permission, into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"a checkpoint cannot be read: {error.strerror or error}",
            str(error.filename or path),
            "no file was changed; check permissions, mounts and limits",
        ) from error
