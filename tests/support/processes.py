"""Processes of this machine, for tests that start, kill and count them."""

from __future__ import annotations

import os
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
SUPPORT = Path(__file__).parent


def state_of(pid: int) -> str:
    """Return the state of a process (R, S, T, Z, ...); "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def processes_in(folder: Path) -> list[int]:
    """Return the pids of all processes whose working directory is `folder`."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and os.readlink(entry / "cwd") == str(folder)
                and is_alive(int(entry.name))
            ):
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def mark_ready(number: int) -> None:
    """In a worker: write its pid to the file ready-NUMBER."""
    Path(f"ready-{number}.tmp").write_text(str(os.getpid()))
    os.rename(f"ready-{number}.tmp", f"ready-{number}")
