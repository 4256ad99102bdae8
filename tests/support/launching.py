"""Start `lockstep` commands from tests, with one compute thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OWN_LOOP = f"{ROOT / 'examples' / 'own_loop.py'}:train"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def unpack(archive: Path, folder: Path) -> None:
    """Extract an archive of this repository. tarfile's filters are missing in Python 3.11.2, which Debian 12 has."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)


def lockstep_command(*words: object) -> list[str]:
    """Return the command line of `lockstep WORDS` with the interpreter of the test."""
    return [sys.executable, "-m", "lockstep", *map(str, words)]


def one_thread(**more: str) -> dict[str, str]:
    """Return this process's environment with one compute thread and unbuffered output."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def run_lockstep(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `lockstep WORDS`, by default without a check of the exit code and for at most 200 s.

    options  of subprocess.run
    """
    defaults = {
        "capture_output": True,
        "text": True,
        "timeout": 200,
        "env": one_thread(),
        "check": False,
    }
    return subprocess.run(lockstep_command(*words), **(defaults | options))  # noqa: PLW1510


def start_lockstep(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Start `lockstep WORDS`, by default with both outputs in one pipe.

    options  of subprocess.Popen
    """
    defaults = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "env": one_thread(),
    }
    return subprocess.Popen(lockstep_command(*words), **(defaults | options))
