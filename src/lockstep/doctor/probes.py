"""Probe objects in the place where hosts meet: a folder of the run on their disk, or its store.

Each host writes one, looks for those of the others, and all try to create the same name. Every
method but `remove` raises OSError or StoreError when the place cannot be used.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.files import write_atomic
from lockstep.object_store.address import Address, parse_address
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.snapshots import PROBES, refuse_unsafe_store

PROBE_BYTES = 1 << 20
FOLDER = "doctor"


class DiskProbes:
    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER

    def write(self, name: str) -> dict[str, Any]:
        """Write 1 MiB as `name`; return facts: seconds, and bytes that are left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        start_s = time.perf_counter()
        write_atomic(self.folder / name, bytes(PROBE_BYTES))
        return {
            "write_s": time.perf_counter() - start_s,
            "free_bytes": shutil.disk_usage(self.folder).free,
        }

    def names(self) -> Sequence[str]:
        return os.listdir(self.folder)

    def claim(self, name: str, own: str) -> bool:
        """Return whether this host is the one that creates `name`, as it would a generation of a
        run. own: the probe of this host"""
        try:
            os.link(self.folder / own, self.folder / name)
        except OSError:
            return False
        return True

    def remove(self, names: Sequence[str]) -> None:
        """Remove what another host has not removed."""
        for remove in (*((self.folder / name).unlink for name in names), self.folder.rmdir):
            with suppress(OSError):  # another host still has a file there
                remove()


class StoreProbes:
    def __init__(self, address: Address) -> None:
        self.bucket, self.folder = RunBucket(address), f"{PROBES}/{FOLDER}"

    def write(self, name: str) -> dict[str, Any]:
        refuse_unsafe_store(self.bucket)
        start_s = time.perf_counter()
        self.bucket.put(f"{self.folder}/{name}", bytes(PROBE_BYTES))
        return {"write_s": time.perf_counter() - start_s}

    def names(self) -> Sequence[str]:
        return self.bucket.names(self.folder)

    def claim(self, name: str, own: str) -> bool:
        return self.bucket.put_if_absent(f"{self.folder}/{name}", own.encode()) == own.encode()

    def remove(self, names: Sequence[str]) -> None:
        present = set(self.names())
        self.bucket.delete([f"{self.folder}/{name}" for name in names if name in present])


Probes = DiskProbes | StoreProbes


def probes_of(run: str) -> Probes:
    """Return the probes of a run folder or an address in a store. UsageError; StoreError."""
    address = parse_address(run)
    return StoreProbes(address) if address else DiskProbes(Path(run))
