"""The folder of a checkpoint: names, states, locks and deletion. `commit.py` writes its content.

    checkpoints/
      step-00001200/              COMMITTED facts.json manifest.json tensors-00000.safetensors ...
      step-00001300.damaged/      set aside by a reader that found damage; Lockstep never deletes it
      .step-00001400.3f9c01d2a4b5e6f7/     WRITING facts.json ...    being written, or unfinished

Each folder has a *marker*, a small file. Its name is the state of the folder. It holds the sha256
of manifest.json, which holds size and sha256 of every other file.

    WRITING    the writer holds a shared lock on it; several writers could share one attempt
    COMMITTED  a reader holds a shared lock on it while it reads
    REMOVING   retention is deleting this folder

One rename of the marker changes the state, and keeps the locks. To delete a folder requires the
*exclusive* lock: a live writer or reader is never disturbed, and a dead process releases its lock.
A folder without COMMITTED is not a checkpoint.
"""

import errno
import fcntl
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.files import open_regular
from lockstep.log import log

WRITING = "WRITING"
COMMITTED = "COMMITTED"
REMOVING = "REMOVING"
STEP_FOLDER = re.compile(r"step-([0-9]{8,})")
HIDDEN_FOLDER = re.compile(r"\.step-[0-9]{8,}\.[0-9a-f]{16}")
OWN_FILE = re.compile(r"facts\.json|manifest\.json|tensors-[0-9]{5,}\.safetensors")

FailPoint = Callable[[str], None]


def no_fail_point(place: str) -> None:
    """Do nothing. Tests pass a function that fails or kills the process at the named place."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def hidden_name(step: int) -> str:
    """Return a new name for a folder that is written or deleted; listings skip it."""
    return f".{folder_name(step)}.{secrets.token_hex(8)}"


def committed_steps(folder: Path) -> list[int]:
    """Return the steps with a committed checkpoint, ascending; nothing else is a checkpoint."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = [match for match in map(STEP_FOLDER.fullmatch, names) if match]
    return sorted(int(match[1]) for match in matches if (folder / match[0] / COMMITTED).is_file())


def lock_marker(marker: Path, how: int) -> int | None:
    """Return a descriptor with lock `how` on `marker`; None when it is missing or locked by others.
    A flock(2) belongs to the open file: closing another descriptor of the file does not release
    it."""
    try:
        descriptor = open_regular(marker, os.O_RDONLY if how & fcntl.LOCK_SH else os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, how)
        locked, named = os.fstat(descriptor), os.stat(marker)
        # A marker renamed while this process waited is the lock of another state.
        if (locked.st_dev, locked.st_ino) == (named.st_dev, named.st_ino):
            return descriptor
    except (FileNotFoundError, BlockingIOError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    unlock_marker(descriptor)
    return None


def unlock_marker(marker: int) -> None:
    """Unlock explicitly: a forked child shares the open file, so closing keeps the lock."""
    try:
        fcntl.flock(marker, fcntl.LOCK_UN)
    finally:
        os.close(marker)


@contextmanager
def pinned(folder: Path, step: int) -> Iterator[Path | None]:
    """Yield the path of the committed checkpoint, or None. It is not deleted inside the block,
    except on a file system without locks (a read-only object-store mount): there hashes detect
    changes."""
    path = folder / folder_name(step)
    marker: int | None
    try:
        while (marker := lock_marker(path / COMMITTED, fcntl.LOCK_SH)) is None and (
            path / COMMITTED
        ).exists():
            pass  # deleted and saved again while this process waited for the lock
        is_committed = marker is not None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        marker, is_committed = None, (path / COMMITTED).is_file()
    try:
        yield path if is_committed else None
    finally:
        if marker is not None:
            unlock_marker(marker)


def remove_folder(path: Path, marker: int, state: str, fail_point: FailPoint) -> None:
    """Delete Lockstep's files of a folder whose marker `state` is locked, the marker last."""
    try:
        with os.scandir(path) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        own = [
            entry.name
            for entry in listed
            if OWN_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]
        foreign = [entry.name for entry in listed if entry.name not in (*own, state)]
        for name in own:
            (path / name).unlink()
            fail_point("removing")
    finally:
        # Before the last unlink: NFS keeps the name of an open file alive, and rmdir would fail.
        unlock_marker(marker)
    if foreign:
        log.warning(
            "%s was not removed, since it holds files that Lockstep did not write: %s",
            path,
            ", ".join(foreign),
        )
        return
    (path / state).unlink(missing_ok=True)
    path.rmdir()


def retire(folder: Path, step: int, fail_point: FailPoint = no_fail_point) -> bool:
    """Delete the checkpoint, after a rename that unmarks it; False when it is being read."""
    path = folder / folder_name(step)
    if path.is_symlink():
        return False  # Lockstep did not write what a link points to
    marker = lock_marker(path / COMMITTED, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if marker is None:
        return False
    try:
        os.rename(path / COMMITTED, path / REMOVING)
        fail_point("unmarked")
        hidden = folder / hidden_name(step)
        os.rename(path, hidden)
        fail_point("hidden")
    except BaseException:
        unlock_marker(marker)
        raise
    remove_folder(hidden, marker, REMOVING, fail_point)
    return True


def sweep(folder: Path) -> None:
    """Delete folders left by dead processes: unfinished, with a marker that is not locked."""
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if path.is_symlink() or not (HIDDEN_FOLDER.fullmatch(name) or STEP_FOLDER.fullmatch(name)):
            continue
        try:
            if not (path / COMMITTED).exists() and discard(
                path, may_lack_marker=bool(HIDDEN_FOLDER.fullmatch(name))
            ):
                log.info("removed %s, left unfinished by a process that died", path)
        except OSError as error:
            log.warning(
                "%s was left by a dead process and could not be removed: %s", path, error.strerror
            )


def is_unfinished(path: Path) -> bool:
    return any((path / state).exists() for state in (WRITING, REMOVING))


def discard(path: Path, *, may_lack_marker: bool = False) -> bool:
    """Delete the folder if its marker proves that it is unfinished and abandoned. With
    `may_lack_marker`, the process that creates a missing marker owns the folder."""
    for state in (WRITING, REMOVING):
        marker = lock_marker(path / state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if marker is not None:
            remove_folder(path, marker, state, no_fail_point)
            return True
    if may_lack_marker and not is_unfinished(path):
        try:
            (path / WRITING).touch(0o644, exist_ok=False)
        except (FileExistsError, FileNotFoundError):
            return False
        return discard(path)
    return False


def set_aside(path: Path, word: str) -> Path | None:
    """Rename to NAME.word, NAME.word-2 and so on; return the new path, None when gone."""
    numbers = itertools.count(2)
    aside = path.with_name(f"{path.name}.{word}")
    while os.path.lexists(aside):
        aside = path.with_name(f"{path.name}.{word}-{next(numbers)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return None
    return aside
