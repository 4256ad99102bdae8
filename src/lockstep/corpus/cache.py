"""Prepared data of all runs of a user, by the sha256 of what it depends on.

    CACHE/prepared/KEY/data/...      files of a run folder: hard links, or copies on another disk
    CACHE/prepared/KEY/entry.json    written last: the sha256 of every file

CACHE is $LOCKSTEP_CACHE, or lockstep in the user's cache folder; LOCKSTEP_CACHE=off: none. A run
folder stays complete without it. A cache that cannot be read or written never stops a run, which
prepares its data itself then.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.data.manifest import NOT_SHARED, FileDigests, verify_files
from lockstep.errors import DataError
from lockstep.files import (
    add_checksum,
    checksum_of,
    fsync_folder,
    link_or_copy,
    read_json,
    temporary_name,
    verify_checksum,
    write_json,
)
from lockstep.log import log
from lockstep.runtime.variables import CACHE, user_cache

ENTRY = "entry.json"
# Of entries, complete or not. Other folders there belong to the user.
OWN_NAME = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{32}\..+")
UNUSED_S = 30 * 24 * 3600.0


def entry_of(facts: Callable[[], Any]) -> Path | None:
    """Return the folder for what is prepared from `facts()`, JSON values; None without a cache, or
    when they are None."""
    folder = os.environ.get(CACHE)
    if folder == "off":
        return None
    try:
        cache = Path(folder).absolute() if folder else user_cache()
        values = facts()
    except (RuntimeError, OSError, DataError):  # the user has no home; the source is unreadable
        return None
    if values is None:
        return None
    return cache / "prepared" / checksum_of({"facts": values})[:32]


def take(entry: Path | None, folders: Mapping[str, Path]) -> bool:
    """Link the files of an entry into folders of a run, the last file last. False if there is no
    such entry, or it is damaged: then it is removed.

    folders  by their names in the entry
    """
    if entry is None or not os.path.exists(entry):
        return False
    targets: dict[Path, Path] = {}
    try:
        listed: dict[str, str] = verify_checksum(read_json(entry / ENTRY))["files"]
        with suppress(OSError):  # a cache of another user
            os.utime(entry)
        verify_files({entry / name: digest for name, digest in listed.items()}, entry, NOT_SHARED)
        for name in listed:
            label, file = name.split("/")
            targets[entry / name] = folders[label] / file
    except (OSError, ValueError, KeyError, DataError) as error:
        what = error.what if isinstance(error, DataError) else error
        log.warning("data is prepared again, since an entry of the cache cannot be used: %s", what)
        shutil.rmtree(entry, ignore_errors=True)
        return False
    *others, last = targets
    try:
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        for source in others:
            link_or_copy(source, targets[source])
        for folder in folders.values():
            fsync_folder(folder)
        link_or_copy(last, targets[last])
    except OSError as error:
        log.warning("data is prepared again, since the cached data cannot be linked: %s", error)
        return False
    return True


def keep(
    entry: Path | None, folders: Mapping[str, Path], files: Iterable[Path], digests: FileDigests
) -> None:
    """Add an entry with these files of `folders`, unless another run has added it. Remove entries
    that no run has used for UNUSED_S."""
    if entry is None:
        return
    labels = {folder: label for label, folder in folders.items()}
    names = {path: f"{labels[path.parent]}/{path.name}" for path in files}
    temporary = temporary_name(entry)
    try:
        for path, name in names.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(path, temporary / name)
        hashed = digests.of(names)
        listed = {name: hashed[path] for path, name in names.items()}
        write_json(temporary / ENTRY, add_checksum({"files": listed}))
        remove_unused(entry.parent)
        temporary.rename(entry)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not os.path.exists(entry):  # else another run was faster
            hint = f"{CACHE}=FOLDER names another cache, {CACHE}=off none"
            log.warning("the prepared data is not cached for other runs: %s (%s)", error, hint)


def remove_unused(cache: Path) -> None:
    for entry in cache.iterdir():
        with suppress(OSError):  # another run removes it, too
            is_entry = OWN_NAME.fullmatch(entry.name) is not None
            if is_entry and time.time() - entry.stat().st_mtime > UNUSED_S:
                shutil.rmtree(entry)
