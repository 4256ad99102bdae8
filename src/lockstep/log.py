"""One logger, `lockstep`: warnings of every rank on its stderr, everything in the rank's own log file.

Rooms write `logging.getLogger("lockstep")`; only the two entry points (the command and a worker) call `set_up`.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path


def set_up(*, rank: int = 0, file: Path | None = None, show: int = logging.INFO) -> None:
    """Send records of level `show` and above to stderr (ranks above 0: to nowhere but their file), all of them to `file`."""
    log = logging.getLogger("lockstep")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    if rank == 0:
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setLevel(show)
        terminal.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(terminal)
    if file is not None:
        lines = logging.FileHandler(file, encoding="utf-8")
        lines.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s rank {rank}: %(message)s"))
        log.addHandler(lines)
