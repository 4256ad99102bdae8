"""Probe objects in the place where hosts meet: a folder of the run on their disk, or its store.

Each host writes one, looks for those of the others, and all try to create the same name.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint.commit import try_disk
from lockstep.errors import StoreError
from lockstep.files import try_lock, write_atomic
from lockstep.object_store.address import parse_address
from lockstep.object_store.bucket import RunBucket
from lockstep.object_store.storage import DiskStorage, Storage
from lockstep.remote.snapshots import PROBES, refuse_unsafe_store

PROBE_BYTES = 1 << 20
FOLDER = "doctor"


def probes_of(run: str) -> Storage:
    """Return the place of the probes of a run folder or an address in a store. UsageError;
    StoreError."""
    address = parse_address(run)
    return RunBucket(address, f"{PROBES}/{FOLDER}") if address else DiskStorage(Path(run) / FOLDER)


def write_probe(run: str, name: str) -> dict[str, Any]:
    """Write 1 MiB as `name`; return facts: seconds, and bytes that are left on a disk. OSError: no
    checkpoint can be saved there. On a disk without hard links it can: `claim_name` tries them."""
    probes = probes_of(run)
    content = bytes(PROBE_BYTES)
    write: Callable[[], object]
    if isinstance(probes, RunBucket):
        refuse_unsafe_store(RunBucket(probes.address))
        write = partial(probes.create, name, content)
    else:
        folder = Path(probes.where)
        folder.mkdir(parents=True, exist_ok=True)
        try_disk(folder)
        write = partial(write_atomic, folder / name, content)
    start_s = time.perf_counter()
    write()
    facts = {"write_s": time.perf_counter() - start_s}
    if probes.is_shared_disk:
        facts["free_bytes"] = shutil.disk_usage(probes.where).free
    return facts


def claim_name(probes: Storage, name: str, own: str) -> bool:
    """Return whether this host is the one that creates `name`, as it would a generation of a run.
    own: the probe of this host. StoreError"""
    try:
        return probes.create(name, own.encode()) == own.encode()
    except StoreError:
        raise
    except OSError:  # a disk without hard links
        return False


def lock_name(probes: Storage, name: str) -> int | None:
    """Return a descriptor with the lock on `name`; None when another host holds it, or where there
    are no locks, as in a store."""
    with suppress(OSError):
        return try_lock(Path(probes.where) / name)
    return None


def remove_probes(probes: Storage, names: Sequence[str]) -> None:
    """Remove what another host has not removed."""
    with suppress(OSError):  # another host still has a file there
        probes.remove(*names)
        if probes.is_shared_disk:
            os.rmdir(probes.where)
