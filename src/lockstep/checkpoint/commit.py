"""Writes a folder that is a checkpoint, and tells whether a folder is a whole one. The states are in `seal.py`.

A commit in order (fsync(2), rename(2) say why): each file and its fsync; the seal's content and its fsync; fsync of the
folder; rename of the folder to its final name; fsync of the parent; rename of the seal to COMMITTED; fsync of the
folder. Everything that needs room on the disk is there before the first rename.

The seal holds the sha256 of manifest.json, which holds size and sha256 of every other file: a changed bit anywhere,
these two files included, is found.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.checkpoint.folder import (
    COMMITTED,
    REMOVING,
    WRITING,
    Seam,
    discard,
    folder_name,
    hidden_name,
    lock_seal,
    no_seam,
    release,
    remove_folder,
    set_aside,
)
from lockstep.errors import CheckpointError, DamagedFileError
from lockstep.files import fsync_folder, regular
from lockstep.units import show_bytes

log = logging.getLogger("lockstep")

MANIFEST = "manifest.json"
FACTS = "facts.json"  # the one file besides the manifest that is no tensors
FORMAT = 1
CHUNK_BYTES = 4 * 2**20
COMMITTER_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Record:
    """Size and hex sha256 of one file."""

    bytes: int
    sha256: str


def manifest_content(step: int, files: dict[str, Record]) -> bytes:
    value = {"format": FORMAT, "step": step, "files": {name: vars(files[name]) for name in sorted(files)}}
    return json.dumps(value, indent=1).encode() + b"\n"


def seal_content(step: int, manifest: bytes) -> bytes:
    return f"lockstep checkpoint, step {step}, sha256 of {MANIFEST}: {hashlib.sha256(manifest).hexdigest()}\n".encode()


def read_manifest(path: Path, step: int) -> tuple[dict[str, Record], list[str]]:
    """(the files that the sealed manifest of `path` names, what is wrong with manifest and seal).

    CheckpointError when it is whole but of a later format: that is no damage.
    """
    manifest, problem = read_whole(path / MANIFEST)
    seal, seal_problem = read_whole(path / COMMITTED)
    if problem or seal_problem:
        return {}, [text for text in (problem, seal_problem) if text]
    if seal != seal_content(step, manifest):
        return {}, [f"{MANIFEST} and {COMMITTED} do not fit together: one of them was changed"]
    try:
        value = json.loads(manifest)
        if value["format"] != FORMAT:
            raise CheckpointError(
                f"the checkpoint of step {step} has format {value['format']}, this version reads format {FORMAT}",
                str(path),
                "try a newer version of lockstep",
            )
        return records_of(value["files"]), []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return {}, [f"{MANIFEST} is not one that Lockstep writes: {error}"]


def records_of(files: dict[str, Any]) -> dict[str, Record]:
    """Return the files that a manifest or a part lists. ValueError or TypeError for a path outside of the folder or a malformed record."""
    for name in files:
        if "/" in name or "\0" in name or name in ("", ".", "..", MANIFEST, COMMITTED):
            raise ValueError(f"it names {name!r}, which is no file of this folder")
    return {name: Record(**record) for name, record in files.items()}


def read_checked(path: Path, record: Record, *, keep: bool = True) -> tuple[bytearray, str]:
    """(the file's bytes, "") or (nothing, what is wrong with it). Read once: what was hashed is what is returned.

    keep  False: verify only, with one chunk in memory
    """
    try:
        with open(path, "rb", buffering=0, opener=inside) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.bytes:
                return bytearray(), f"{path.name} has {size} bytes, the manifest says {record.bytes}"
            content, sha256, start = bytearray(size if keep else CHUNK_BYTES), hashlib.sha256(), 0
            view = memoryview(content)
            while count := file.readinto(view[start : start + CHUNK_BYTES]):
                sha256.update(view[start : start + count])
                start += count if keep else 0
    except OSError as error:
        return bytearray(), damage(path.name, error)
    if sha256.hexdigest() != record.sha256:
        return bytearray(), f"{path.name} is not what was written: its sha256 differs from the manifest's"
    return content, ""


def inside(path: str, flags: int) -> int:
    """Opener for the files of a checkpoint: regular files only. A link could lead out of the folder."""
    return regular(path, flags | os.O_NOFOLLOW)


def read_whole(path: Path) -> tuple[bytes, str]:
    """(the bytes of a small file, "") or (nothing, what is wrong with it)."""
    try:
        with open(path, "rb", opener=inside) as file:
            return file.read(), ""
    except OSError as error:
        return b"", damage(path.name, error)


def damage(name: str, error: OSError) -> str:
    """What the error says about the file; raises it again when it says nothing about the file, but about us."""
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    if isinstance(error, DamagedFileError):
        return error.what
    if error.errno == errno.EIO:
        return f"{name} cannot be read: {error.strerror}"
    raise error


def strays(path: Path, files: Collection[str]) -> list[str]:
    """Names in the folder that its manifest knows nothing of."""
    return sorted(set(os.listdir(path)) - {*files, MANIFEST, COMMITTED})


def check(path: Path, step: int, only: Collection[str] | None = None) -> list[str]:
    """Everything that is wrong with the committed checkpoint at `path`; every byte is read. Memory: one chunk.

    only  names of the files to look into; None: all
    """
    files, problems = read_manifest(path, step)
    for name, record in sorted(files.items()):
        if only is None or name in only:
            _, problem = read_checked(path / name, record, keep=False)
            problems += [problem] if problem else []
    if files:
        problems += [f"{name} does not belong here: the manifest does not name it" for name in strays(path, files)]
    return problems


class Attempt:
    """One try to make the checkpoint of one step, in a hidden folder; leaves the `with` block committed or gone."""

    def __init__(self, folder: Path, step: int, at: Seam = no_seam) -> None:
        self.folder, self.step, self.at = folder, step, at
        self.files: dict[str, Record] = {}
        self.committed = False
        self.state = WRITING
        while (begun := self._begin()) is None:
            pass  # a sweeper mistook the folder, a moment old, for a dead one
        self.path, self.seal = begun

    def _begin(self) -> tuple[Path, int] | None:
        path = self.folder / hidden_name(self.step)
        path.mkdir()
        try:
            os.close(os.open(path / WRITING, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            seal = lock_seal(path / WRITING, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileExistsError, FileNotFoundError):
            return None
        except OSError:
            (path / WRITING).unlink(missing_ok=True)
            path.rmdir()
            raise
        return None if seal is None else (path, seal)

    def __enter__(self) -> Attempt:
        return self

    def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write one file of the checkpoint."""
        self.files[name] = write_file(self.path / name, chunks, self.at)
        self.at(f"after {name}")

    def commit(self) -> bool:
        """Make it the checkpoint of its step; False when there is one already, which stays as it is."""
        manifest = manifest_content(self.step, self.files)
        self.put(MANIFEST, [manifest])
        with open(self.path / WRITING, "r+b") as seal:
            seal.write(seal_content(self.step, manifest))
            seal.flush()
            os.fsync(seal.fileno())
        fsync_folder(self.path)
        self.at("sealed")
        target = self.folder / folder_name(self.step)
        while not self._take_place(target):
            if (target / COMMITTED).exists():
                return False
            clear_the_way(target)
        self.at("renamed")
        fsync_folder(self.folder)
        self.at("before the marker")
        os.rename(target / WRITING, target / COMMITTED)
        self.state = COMMITTED
        self.at("marked")
        fsync_folder(target)
        self.committed = True
        return True

    def _take_place(self, target: Path) -> bool:
        """Rename the attempt to its final name; False when something is there (rename(2) replaces an empty folder)."""
        try:
            os.rename(self.path, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                return False
            raise
        self.path = target
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.committed:
            release(self.seal)
            return
        try:
            self._unmark()
            remove_folder(self.path, self.seal, self.state, self.at)
        except OSError as problem:
            log.warning("%s could not be removed (%s); the next save will try again", self.path, problem.strerror)

    def _unmark(self) -> None:
        """Take the marker away again when it may not be on the disk: the caller is told that the save failed."""
        if self.state == COMMITTED:
            try:
                os.rename(self.path / COMMITTED, self.path / REMOVING)
            except OSError:
                release(self.seal)
                raise
            self.state = REMOVING


def write_file(path: Path, chunks: Iterable[bytes | memoryview], at: Seam = no_seam) -> Record:
    """Write a new file, hash it on the way, flush it to the disk."""
    sha256, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), CHUNK_BYTES):
                part = view[start : start + CHUNK_BYTES]
                file.write(part)
                sha256.update(part)
            size += len(view)
        at(f"in {path.name}")
        file.flush()
        os.fsync(file.fileno())
    return Record(size, sha256.hexdigest())


def clear_the_way(target: Path) -> None:
    """Make room for a commit at `target`, where something lies that is no checkpoint; what may be one is kept.

    Another committer's folder between its rename and its marker: wait for it. One that died there: delete it.
    A folder without a seal: its marker may have been lost, so it is set aside.
    """
    deadline = time.monotonic() + COMMITTER_PATIENCE_S
    while not target.is_symlink() and any((target / state).exists() for state in (WRITING, REMOVING)):
        if discard(target, newborn=False):
            log.info("removed %s, which a process that died had left unfinished", target)
            return
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"another process has been about to commit {target.name} for {COMMITTER_PATIENCE_S:.0f} s",
                str(target),
                "look for a second run in the same folder",
            )
        time.sleep(0.01)
    if os.path.lexists(target) and not (target / COMMITTED).exists():
        aside = set_aside(target, "unmarked")
        if aside:
            log.warning("%s has no marker and is no checkpoint; set aside as %s", target, aside.name)


HINTS = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints (save.keep); the older checkpoints are whole",
    errno.EDQUOT: "your quota is used up: free some space, or keep fewer checkpoints (save.keep)",
    errno.EROFS: "the file system is mounted read-only: choose another folder with --out, or mount it for writing",
    errno.EACCES: "this user may not write there: choose another folder with --out, or change its permissions",
    errno.EMFILE: "this process may open no more files: raise the limit (ulimit -n)",
    errno.ENOENT: "the folder is gone: is its disk mounted? Nothing is made in its place: mount it again",
    errno.EIO: "the disk reports an error (see dmesg); choose another folder with --out",
    errno.ENOLCK: "this file system has no file locks (on Lustre, mount it with -o flock)",
}
HINTS |= {errno.EPERM: HINTS[errno.EACCES], errno.EOPNOTSUPP: HINTS[errno.ENOLCK], errno.ENOSYS: HINTS[errno.ENOLCK]}


def free_bytes(folder: Path) -> int:
    """What this user may still write on the folder's disk."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def cannot_write(error: OSError, what: str, folder: Path, needed_bytes: int) -> CheckpointError:
    """The three-part error for a failed write: the system's reason; bytes needed and free, and where; what to try."""
    room = f"{show_bytes(needed_bytes)} needed in {folder}"
    with suppress(OSError):
        names = "" if os.statvfs(folder).f_favail else ", but no room for another file name (inodes)"
        room = f"{show_bytes(needed_bytes)} needed, {show_bytes(free_bytes(folder))} free in {folder}{names}"
    place = f"{room}\n{error.filename}" if error.filename and Path(error.filename) != folder else room
    reason = error.strerror or str(error)
    hint = HINTS.get(error.errno or 0, "try again, or choose another folder with --out")
    return CheckpointError(f"{what}: {reason}", place, hint)


@contextmanager
def writing(what: str, folder: Path, needed_bytes: int) -> Iterator[None]:
    """A block in which an OSError becomes the three-part error of `cannot_write`, with the room there is at that moment."""
    try:
        yield
    except OSError as error:
        raise cannot_write(error, what, folder, needed_bytes) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A block in which an OSError about us (no permission, say), not about the file, becomes a three-part error."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or path)
        hint = "no file was changed; check permissions, mounts and limits"
        raise CheckpointError(f"a checkpoint cannot be read: {error.strerror or error}", where, hint) from error
