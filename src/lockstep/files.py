"""Atomic writes, checksummed JSON and locks on regular files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.errors import DamagedFileError

CHECKSUM = "sha256"
COPY_BYTES = 1 << 20
MAX_DIGITS = 308  # of the largest float
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # one half of a character above U+FFFF in JSON
# By the first letter of the mode in `ls -l`.
KINDS = {
    "p": "a named pipe",
    "d": "a folder",
    "s": "a socket",
    "c": "a device",
    "b": "a device",
    "l": "a symbolic link",
}


def scheme_of(path: str | os.PathLike[str]) -> str:
    """Return the scheme of an address such as s3://BUCKET/RUN, also as a Path, s3:/BUCKET/RUN;
    else ""."""
    match = re.match(r"([a-z][a-z0-9+.-]+):(/|$)", os.fspath(path), re.IGNORECASE)
    return match[1].lower() if match else ""


def open_regular(path: str | Path, flags: int) -> int:
    """Opener for `open`. DamagedFileError unless it is a regular file: a pipe may block forever."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    except OSError as error:
        # open(2) itself refuses these kinds.
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.ELOOP):
            require_regular_file(os.lstat(path).st_mode, path)
        raise
    try:
        require_regular_file(os.fstat(descriptor).st_mode, path)
    except DamagedFileError:
        os.close(descriptor)
        raise
    return descriptor


def require_regular_file(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.filemode(mode)[0], "something else")
        raise DamagedFileError(
            f"{Path(path).name} is {kind}, not a regular file",
            str(path),
            "move it aside; Lockstep did not create it",
        )


def read_bytes(path: Path) -> bytes:
    with open(path, "rb", opener=open_regular) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a regular file. UnicodeDecodeError (a ValueError) if invalid."""
    return read_bytes(path).decode()


def fsync_folder(folder: Path) -> None:
    """Flush the entries of `folder` to the disk, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Replace the file at `path` atomically. On an OSError the old file stays, without leftovers.
    DamagedFileError, an OSError, for a device, a pipe or a socket: a rename would replace it."""
    if path.exists() and not path.is_dir():  # the rename itself refuses a folder
        require_regular_file(path.stat().st_mode, path)
    with temporary_file(path, content) as temporary:
        os.replace(temporary, path)


def write_if_absent(path: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Create `path` with `content` atomically, unless it exists. No leftovers on an OSError."""
    with temporary_file(path, content, mode) as temporary, suppress(FileExistsError):
        os.link(temporary, path)


def open_unpublished(path: Path) -> BinaryIO:
    """Open a new file beside `path` for `publish`. Two processes that write the same file, such as
    a worker that was given up and its successor, never change each other's bytes."""
    return open(temporary_name(path), "xb")


def publish(file: BinaryIO) -> None:
    """Sync and close a file of `open_unpublished`, and rename it to its path."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    temporary = Path(file.name)
    os.replace(temporary, temporary.with_name(temporary.name[1:].rpartition(".")[0]))


def remove_unpublished(folder: Path) -> None:
    """Remove what killed processes have left of `open_unpublished`."""
    for path in folder.glob(".*.????????"):
        path.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


@contextmanager
def temporary_file(
    path: Path, content: bytes | str | Iterable[bytes | memoryview], mode: int = 0o666
) -> Iterator[Path]:
    """Yield a flushed temporary file with `content` beside `path`; then flush the folder. An
    OSError names `path`."""
    data = content.encode() if isinstance(content, str) else content
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            for chunk in [data] if isinstance(data, bytes) else data:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
        fsync_folder(path.parent)
    except OSError as error:
        if error.filename == str(temporary):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def sha256_file(path: Path) -> str:
    with open(path, "rb", opener=open_regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_integer(digits: str) -> int:
    """Return an integer of JSON. ValueError for one that no float can hold: arithmetic would
    fail."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits")
    return int(digits)


DECODER = json.JSONDecoder(parse_int=parse_integer)


def parse_json(text: str) -> Any:
    """Parse JSON. ValueError if it is truncated, nested too deeply, or has a lone surrogate or an
    integer of more than MAX_DIGITS digits."""
    try:
        value = DECODER.decode(text)
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a JSON string contains a lone surrogate") from None
    return value


def read_json(path: Path) -> Any:
    return parse_json(read_text(path))


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def add_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, CHECKSUM: checksum_of(value)}


def verify_checksum(value: Any) -> dict[str, Any]:
    """Return the JSON object `value` without its checksum. ValueError when that is wrong or
    missing."""
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    fields = {key: item for key, item in value.items() if key != CHECKSUM}
    if value.get(CHECKSUM) != checksum_of(fields):
        raise ValueError("its checksum does not fit: it was changed after it was written")
    return fields


def checksum_of(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a link to the bytes of `source`; a copy where links do not work."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, a file system without links, or a file of another user
        with open(source, "rb") as file:
            write_atomic(target, iter(partial(file.read, COPY_BYTES), b""))


def try_lock(path: Path) -> int | None:
    """Return a descriptor with the exclusive lock on `path`, which the kernel releases at process
    exit; None when another process holds it. Works on local disks and NFS (Linux 2.6.12)."""
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
