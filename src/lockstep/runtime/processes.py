"""Processes of this machine: clock, process groups, ties to a parent, log files."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from lockstep.errors import UsageError
from lockstep.files import open_regular

# <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
LIBC = ctypes.CDLL(None)  # loaded here: a forked child must not load libraries


def now_s() -> float:
    """Return CLOCK_MONOTONIC in seconds; all processes of a machine share it."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def prctl(option: int, value: int | bytes) -> None:
    rest = [ctypes.c_ulong(0)] * 3
    LIBC.prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(value), *rest)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when `parent` exits. If it has exited already, exit now."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process group of a worker that is not reaped yet."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def open_worker_log(run_folder: Path, slot: int, host: str) -> IO[bytes]:
    """Open logs/HOST-SLOT.log, the output of a worker, to append to it. UsageError if that
    fails."""
    path = run_folder / "logs" / f"{host}-{slot}.log"
    try:
        return open(path, "a+b", opener=open_regular)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}",
            "the run folder",
            "use a folder with write permission, on a disk with free space",
        ) from None


def last_lines(output: IO[bytes], offset: int, lines: int = 12) -> str:
    end = output.seek(0, os.SEEK_END)
    output.seek(max(offset, end - 4096))
    return "\n".join(output.read().decode(errors="replace").splitlines()[-lines:])
