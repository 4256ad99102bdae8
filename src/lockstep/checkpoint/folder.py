"""The states of a checkpoint's folder: names, locks and deletion. What is in it is `commit.py`'s business.

    checkpoints/
      step-00001200/                       COMMITTED  facts.json  manifest.json  tensors-00000.safetensors ...
      step-00001300.damaged/               set aside by a reader that found a flaw; never deleted by us
      .step-00001400.3f9c01d2a4b5e6f7/     WRITING    facts.json  ...      being made, or what a dead process left

Each folder has a *seal*: one small file whose name is the folder's state and whose content fixes every other byte
(it holds the sha256 of manifest.json, which holds size and sha256 of every other file).

    WRITING    the writer has a shared lock on it; several writers could share one attempt
    COMMITTED  a reader has a shared lock on it while it reads
    REMOVING   retention decided to delete this folder

A state changes by one rename of the seal, so there is no moment without a state, and a lock taken on the seal stays
valid through it. Whoever wants to delete must get the *exclusive* lock first: a live writer or reader is never
disturbed, and a dead one has let go by dying. A folder without COMMITTED in it is no checkpoint, whatever it holds.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.files import regular

log = logging.getLogger("lockstep")

WRITING, COMMITTED, REMOVING = "WRITING", "COMMITTED", "REMOVING"
STEP = re.compile(r"step-([0-9]{8,})")
HIDDEN = re.compile(r"\.step-[0-9]{8,}\.[0-9a-f]{16}")
OURS = re.compile(r"facts\.json|manifest\.json|tensors-[0-9]{5,}\.safetensors")

Seam = Callable[[str], None]


def no_seam(place: str) -> None:
    """Does nothing: what is called at each place where a test may want to die."""


def folder_name(step: int) -> str:
    """step-00001200"""
    return f"step-{step:08d}"


def hidden_name(step: int) -> str:
    """A new name, which no listing shows, for a folder in the making or on its way out."""
    return f".{folder_name(step)}.{secrets.token_hex(8)}"


def committed_steps(folder: Path) -> list[int]:
    """Steps with a committed checkpoint, ascending. The one place that says what counts as a checkpoint."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = [match for match in map(STEP.fullmatch, names) if match]
    return sorted(int(match[1]) for match in matches if (folder / match[0] / COMMITTED).is_file())


def lock_seal(seal: Path, how: int) -> int | None:
    """A descriptor with lock `how` on the file now called `seal`; None when there is none or others have the lock.

    flock(2) rather than fcntl(2) locks: they belong to the open file, not to the process, so that a thread of this
    process that closes another descriptor of the file does not drop them.
    """
    try:
        descriptor = regular(seal, os.O_RDONLY if how & fcntl.LOCK_SH else os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, how)
        held, named = os.fstat(descriptor), os.stat(seal)
        # The seal may have been renamed while we waited: then this is the lock of another state.
        if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino):
            return descriptor
    except (FileNotFoundError, BlockingIOError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    release(descriptor)
    return None


def release(seal: int) -> None:
    """Let go of the lock. Explicitly: a child forked meanwhile has the descriptor too, and would hold the lock on."""
    try:
        fcntl.flock(seal, fcntl.LOCK_UN)
    finally:
        os.close(seal)


@contextmanager
def pinned(folder: Path, step: int) -> Iterator[Path | None]:
    """The path of the committed checkpoint, which nobody deletes inside this block; None when there is none.

    On a file system without locks (a read-only object-store mount, say) there is no pin; the hashes still hold.
    """
    path = folder / folder_name(step)
    seal: int | None
    try:
        while (seal := lock_seal(path / COMMITTED, fcntl.LOCK_SH)) is None and (path / COMMITTED).exists():
            pass  # deleted and saved anew while we waited for the lock
        found = seal is not None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        seal, found = None, (path / COMMITTED).is_file()
    try:
        yield path if found else None
    finally:
        if seal is not None:
            release(seal)


def remove_folder(path: Path, seal: int, state: str, at: Seam) -> None:
    """Delete an unfinished folder whose seal, named `state`, we hold. Only files of ours, the seal last."""
    try:
        with os.scandir(path) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        ours = [e.name for e in listed if OURS.fullmatch(e.name) and e.is_file(follow_symlinks=False)]
        foreign = [entry.name for entry in listed if entry.name not in (*ours, state)]
        for name in ours:
            (path / name).unlink()
            at("removing")
    finally:
        release(seal)  # before the last unlink: NFS keeps the name of an open file alive, and rmdir would fail
    if foreign:
        log.warning("%s is left over, but holds files that are not ours: %s", path, ", ".join(foreign))
        return
    (path / state).unlink(missing_ok=True)
    path.rmdir()


def retire(folder: Path, step: int, at: Seam = no_seam) -> bool:
    """Delete the checkpoint; False when somebody is reading it. It stops being a checkpoint first, by one rename."""
    path = folder / folder_name(step)
    if path.is_symlink():
        return False  # what a link points to was not made here
    seal = lock_seal(path / COMMITTED, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if seal is None:
        return False
    try:
        os.rename(path / COMMITTED, path / REMOVING)
        at("unmarked")
        hidden = folder / hidden_name(step)
        os.rename(path, hidden)
        at("hidden")
    except BaseException:
        release(seal)
        raise
    remove_folder(hidden, seal, REMOVING, at)
    return True


def sweep(folder: Path) -> None:
    """Delete what dead processes left: folders in the making or on their way out whose seal nobody holds."""
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if path.is_symlink() or not (HIDDEN.fullmatch(name) or STEP.fullmatch(name)):
            continue
        try:
            if not (path / COMMITTED).exists() and discard(path, newborn=bool(HIDDEN.fullmatch(name))):
                log.info("removed %s, which a process that died had left unfinished", path)
        except OSError as error:
            log.warning("%s is left over and could not be removed: %s", path, error.strerror)


def discard(path: Path, *, newborn: bool) -> bool:
    """Delete the folder if its seal proves that it is unfinished and abandoned.

    newborn  the folder may have no seal yet: whoever creates it owns the folder, its maker or we
    """
    for state in (WRITING, REMOVING):
        seal = lock_seal(path / state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if seal is not None:
            remove_folder(path, seal, state, no_seam)
            return True
    if newborn and not any((path / state).exists() for state in (WRITING, REMOVING)):
        try:
            os.close(os.open(path / WRITING, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except (FileExistsError, FileNotFoundError):
            return False
        return discard(path, newborn=False)
    return False


def set_aside(path: Path, word: str) -> Path | None:
    """Rename the folder to NAME.word, or NAME.word-2 and so on; the new path, None when it is gone. Deletes nothing."""
    for count in itertools.count(1):
        aside = path.with_name(f"{path.name}.{word}" + (f"-{count}" if count > 1 else ""))
        if not os.path.lexists(aside):
            try:
                os.rename(path, aside)
            except FileNotFoundError:
                break
            return aside
    return None
