"""Machine faults for chaos tests: a file system that hangs or is unmounted, a process out of memory."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.waiting import wait_until


@contextmanager
def mounted_disk(image: Path, folder: Path, size_bytes: int = 256 << 20) -> Iterator[Path]:
    """Make `folder` an ext4 file system in the file `image`; skip the test if it cannot be mounted."""
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    folder.mkdir()
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def empty_folder_over(folder: Path, *, writable: bool = False) -> Iterator[None]:
    """Cover `folder` with an empty one, as when a share is unmounted.

    writable  the empty folder can be written, like a mount point
    """
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "rw" if writable else "ro", "none", str(folder)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """Freeze a file system: writes block, and SIGKILL does not end a process in a write."""
    subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)


@contextmanager
def out_of_memory(pid: int) -> Iterator[None]:
    """Limit the memory of a process so that the kernel kills it; skip the test without cgroups."""
    group = Path("/sys/fs/cgroup/memory") / f"lockstep-{pid}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be created here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text("1M")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), f"the exit of process {pid}")
        group.rmdir()
