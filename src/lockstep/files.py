"""Files that are whole or absent: written beside their place, flushed to the disk, renamed over it.

A rename within one folder is atomic; it outlives a power cut only when the folder itself is flushed too (fsync(2), rename(2)).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def fsync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, so that a rename within it outlives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Flush the bytes of a file that is already written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Put `content` at `path` whole, or leave what was there. OSError as the system gives it; no leftover either way."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def sha256_file(path: Path) -> str:
    """Hex sha256 of the file's bytes, read once."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """The value in the JSON file at `path`. OSError or json.JSONDecodeError when it is absent or torn."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON at `path`, atomically."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def append_line(path: Path, text: str) -> None:
    """Append one line in one write, so that lines of several processes do not mix (O_APPEND)."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, text.encode() + b"\n")
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """A descriptor that holds the exclusive lock on `path`, or None when another process holds it.

    The kernel lets go of it with the process, however that ends. Works on local disks and on NFS (Linux 2.6.12 and later).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
