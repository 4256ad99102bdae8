"""The memory that this process may use."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def process_memory_limit() -> tuple[int, str]:
    """Return (bytes, source) of the smallest memory limit of this process."""
    limits = [(machine_memory(), "this machine"), *cgroup_limits()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append((soft, "RLIMIT_AS (ulimit -v)"))
    return min(limits)


def cgroup_limits(
    own: Path = Path("/proc/self/cgroup"), top: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, str]]:
    """Return (bytes, file) of the memory limits of this process's control group and its parents."""
    found = []
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = top / controllers
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            file = folder / name
            if folder.is_relative_to(base) and file.exists():
                text = file.read_text().strip()
                found += [(int(text), str(file))] if text.isdecimal() else []
    return found
