"""Files that are whole or absent: written beside their place, flushed to the disk, renamed over it.

A rename within one folder is atomic; it outlives a power cut only when the folder itself is flushed too (fsync(2), rename(2)).
"""

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
from pathlib import Path
from typing import Any

from lockstep.errors import DamagedFileError

CHECKSUM = "sha256"
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character beyond U+FFFF: two of them together are one
# By the letter that `ls -l` shows.
KINDS = {"p": "a named pipe", "d": "a folder", "s": "a socket", "c": "a device", "b": "a device", "l": "a symbolic link"}


def regular(path: str | Path, flags: int) -> int:
    """Opener for `open`: return a descriptor of the regular file at `path`, at once.

    DamagedFileError when something else lies there: a pipe or a device may never answer a read.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.ELOOP):  # what open(2) itself refuses to open
            refuse_other_kinds(os.lstat(path).st_mode, path)
        raise
    try:
        refuse_other_kinds(os.fstat(descriptor).st_mode, path)
    except DamagedFileError:
        os.close(descriptor)
        raise
    return descriptor


def refuse_other_kinds(mode: int, path: str | Path) -> None:
    """DamagedFileError unless `mode` is that of a regular file."""
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.filemode(mode)[0], "something else")
        raise DamagedFileError(f"{Path(path).name} is {kind}, not a regular file", str(path), "move it aside; Lockstep did not make it")


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def read_text(path: Path) -> str:
    """Return the content of a regular file of UTF-8 text. UnicodeDecodeError, a ValueError, when it is none."""
    return read_bytes(path).decode()


def fsync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, so that a rename within it outlives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Put `content` at `path` whole, or leave what was there. OSError as the system gives it; no leftover either way."""
    with written_beside(path, content) as beside:
        os.replace(beside, path)


def write_first(path: Path, content: str, mode: int = 0o666) -> None:
    """Put `content` at `path` whole, unless `path` exists. OSError; no leftover either way."""
    with written_beside(path, content, mode) as beside, suppress(FileExistsError):
        os.link(beside, path)


@contextmanager
def written_beside(path: Path, content: bytes | str | Iterable[bytes | memoryview], mode: int = 0o666) -> Iterator[Path]:
    """A file with `content` beside `path`, flushed to the disk, removed after the block. Then the names in the folder are flushed, too."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            for chunk in [data] if isinstance(data, bytes) else data:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        yield beside
        fsync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def sha256_file(path: Path) -> str:
    """Hex sha256 of the file's bytes, read once."""
    with open(path, "rb", opener=regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text: str) -> Any:
    """Parse JSON. ValueError when the text is truncated, nested too deeply, or has a lone surrogate."""
    try:
        value = json.loads(text)
        if HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a string has a lone surrogate in it, which is half of a character") from None
    return value


def read_json(path: Path) -> Any:
    """The value in the JSON file at `path`. OSError when it is absent, ValueError as in `parse_json`."""
    return parse_json(read_text(path))


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON at `path`, atomically."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object `value` with a checksum added."""
    return {**value, CHECKSUM: checksum_of(value)}


def checked(value: Any) -> dict[str, Any]:
    """Return the JSON object `value` without its checksum. ValueError when it is no object or the checksum does not fit.

    An object without a checksum is accepted: a flipped bit in the key "sha256" leaves an unknown key, which readers refuse.
    """
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    fields = {key: item for key, item in value.items() if key != CHECKSUM}
    if CHECKSUM in value and value[CHECKSUM] != checksum_of(fields):
        raise ValueError("its checksum does not fit: it was changed after it was written")
    return fields


def checksum_of(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def append_line(path: Path, text: str) -> None:
    """Append one line in one write, so that lines of several processes do not mix (O_APPEND)."""
    descriptor = regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, text.encode() + b"\n")
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the exclusive lock on `path`, or None when another process holds it.

    The kernel lets go of it with the process, however that ends. Works on local disks and on NFS (Linux 2.6.12 and later).
    """
    descriptor = regular(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
