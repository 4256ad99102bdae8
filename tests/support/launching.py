"""Start commands from tests, with one compute thread each; `lockstep` itself from a template."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.forking import ForkedPopen

ROOT = Path(__file__).parents[2]
OWN_LOOP = f"{ROOT / 'examples' / 'own_loop.py'}:train"
# The prepared data of all commands. conftest.py imports this file before pytest-xdist starts its
# processes, which share the folder: each would prepare the same data again.
CACHE = "CACHE_OF_TESTS"
if CACHE not in os.environ:
    cache = TemporaryDirectory(prefix="lockstep-cache-", ignore_cleanup_errors=True)
    os.environ[CACHE] = cache.name
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def unpack(archive: Path, folder: Path) -> None:
    """Extract an archive of this repository. tarfile's filters are missing in Python 3.11.2, which Debian 12 has."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)


def lockstep_command(*words: object) -> list[str]:
    """Return the command line of `lockstep WORDS` with the interpreter of the test."""
    return [sys.executable, "-m", "lockstep", *map(str, words)]


def one_thread(**more: str) -> dict[str, str]:
    """Return this process's environment with one compute thread, unbuffered output, and prepared
    data that all tests share: a run links it, so nothing in RUN/data is changed in place."""
    shared = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "LOCKSTEP_CACHE": os.environ[CACHE]}
    return {**os.environ, **shared, **more}


def run_command(
    command: Sequence[object],
    *,
    input: str | None = None,
    timeout: float = 200.0,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a command as subprocess.run does, by default with both outputs captured as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        pipes["stdin"] = subprocess.PIPE
    defaults = {**pipes, "text": True, "env": one_thread()}
    with ForkedPopen([*map(str, command)], **(defaults | options)) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def start_command(command: Sequence[object], **options: Any) -> subprocess.Popen[str]:
    """Start a command as subprocess.Popen does, by default with both outputs in one pipe of text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    defaults = {**pipes, "text": True, "env": one_thread()}
    return ForkedPopen([*map(str, command)], **(defaults | options))


def run_lockstep(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `lockstep WORDS` as `run_command`."""
    return run_command(lockstep_command(*words), **options)


def start_lockstep(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Start `lockstep WORDS` as `start_command`."""
    return start_command(lockstep_command(*words), **options)
