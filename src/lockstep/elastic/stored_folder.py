"""Where hosts without a shared disk meet: folders of small objects in the store of the run.

    RUN/store.json                   address of the run; in the working copy of each of its hosts
    PREFIX/membership/generations/   the generation log (generation_log.py)
    PREFIX/membership/waiting/       the waiting room (waiting_room.py)

A store that does not answer raises OSError, as a disk does: the process that needs it waits.
"""

import errno
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import DamagedFileError, StoreError, UsageError
from lockstep.files import read_json
from lockstep.object_store.address import Address, endpoint, parse_address
from lockstep.object_store.bucket import RunBucket

STORE_FILE, MEMBERSHIP = "store.json", "membership"


class StoredFolder:
    """A folder of objects. Every method raises OSError when the store does not answer or
    refuses."""

    def __init__(self, bucket: RunBucket, name: str) -> None:
        self.bucket, self.path = bucket, f"{MEMBERSHIP}/{name}"

    def names(self, after: str = "") -> list[str]:
        """Return the names of the objects, in order; only those behind `after`."""
        with as_disk_error():
            return [
                path.rpartition("/")[2]
                for path in self.bucket.list(
                    self.path, after=f"{self.path}/{after}" if after else ""
                )
            ]

    def read(self, name: str) -> str:
        path = f"{self.path}/{name}"
        with as_disk_error():
            content = self.bucket.get(path)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            where, hint = (
                f"{self.bucket.address}/{path}",
                "restore an earlier version of this object",
            )
            raise DamagedFileError(f"{name} is damaged: {error}", where, hint) from None

    def write(self, name: str, text: str) -> None:
        with as_disk_error():
            self.bucket.put(f"{self.path}/{name}", text.encode())

    def create(self, name: str, text: str) -> str:
        """Store an object unless it exists; return what the store holds."""
        with as_disk_error():
            return self.bucket.put_if_absent(f"{self.path}/{name}", text.encode()).decode()

    def remove(self, *names: str) -> None:
        with as_disk_error():
            self.bucket.delete([f"{self.path}/{name}" for name in names])


@contextmanager
def as_disk_error() -> Iterator[None]:
    """Turn a StoreError inside into an OSError."""
    try:
        yield
    except StoreError as error:
        raise OSError(errno.EIO, error.what, error.where) from error


def store_address(run: Path) -> Address | None:
    """Return where the hosts of a run meet; None when they share the run folder."""
    try:
        return parse_address(str(read_json(run / STORE_FILE)["address"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, LookupError, TypeError, UsageError) as error:
        hint = "start this host again with the same command, which writes the file"
        raise DamagedFileError(
            f"{STORE_FILE} is damaged: {error}", str(run / STORE_FILE), hint
        ) from None


def stored_folder(run: Path, name: str) -> StoredFolder | None:
    """Return the folder in the store that replaces RUN/NAME; None when the hosts share the run
    folder."""
    address = store_address(run)
    return StoredFolder(_bucket(address, endpoint()), name) if address else None


@functools.cache
def _bucket(address: Address, _endpoint: str) -> RunBucket:
    return RunBucket(address, waits=False)
