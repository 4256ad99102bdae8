"""Folders of small files on a disk or in an object store, with the same verbs and errors.

    RUN/store.json        address of the run; in the working copy of each host without a shared disk
    PREFIX/membership/    in the store: the folders through which such hosts meet

A store that does not answer raises OSError, as a disk does: the process that needs it waits.
"""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lockstep.errors import DamagedFileError, UsageError
from lockstep.files import open_regular, read_bytes, read_json, write_if_absent
from lockstep.object_store.address import Address, endpoint, parse_address
from lockstep.object_store.bucket import RunBucket

STORE_FILE, MEMBERSHIP = "store.json", "membership"


class Storage(Protocol):
    """A folder of small files. Every method raises OSError when the disk or the store fails.
    A folder that is missing is never created, except one inside it, as in "archive/NAME"."""

    where: str  # of the folder, for messages
    is_shared_disk: bool  # False: each host has a copy of the run folder
    pause_s: float  # at least, between two reads by a process that waits

    def create(self, name: str, content: bytes) -> bytes:
        """Create a durable file unless it exists; return the content of the one that exists."""

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file that need not survive a crash; a reader may see half of it."""

    def read(self, name: str) -> bytes:
        """Return the content of a file. FileNotFoundError."""

    def exists(self, name: str) -> bool: ...

    def names(self) -> Sequence[str]:
        """Return the names of the files and folders, in order, without hidden ones."""

    def remove(self, *names: str) -> None:
        """Remove files, if they exist."""


class DiskStorage:
    """A folder on a disk."""

    is_shared_disk = True
    pause_s = 0.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)

    def create(self, name: str, content: bytes) -> bytes:
        path = self.path / name
        if path.parent != self.path:
            path.parent.mkdir(exist_ok=True)
        write_if_absent(path, content)
        return read_bytes(path)

    def write(self, name: str, content: bytes) -> None:
        with open(self.path / name, "wb", opener=open_regular) as file:
            file.write(content)

    def read(self, name: str) -> bytes:
        return read_bytes(self.path / name)

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def names(self) -> Sequence[str]:
        return sorted(name for name in os.listdir(self.path) if name[0] != ".")

    def remove(self, *names: str) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)


def store_address(run: Path) -> Address | None:
    """Return where the hosts of a run meet; None when they share the run folder."""
    try:
        return parse_address(str(read_json(run / STORE_FILE)["address"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, LookupError, TypeError, UsageError) as error:
        raise DamagedFileError(
            f"{STORE_FILE} is damaged: {error}",
            str(run / STORE_FILE),
            "start this host again with the same command, which writes the file",
        ) from None


def shared_folder(run: Path, name: str) -> Storage:
    """Return the folder NAME of a run that all of its hosts see."""
    address = store_address(run)
    return _open_bucket(address, name, endpoint()) if address else DiskStorage(run / name)


@functools.cache
def _open_bucket(address: Address, name: str, _endpoint: str) -> RunBucket:
    return RunBucket(address, f"{MEMBERSHIP}/{name}", waits=False)
