"""One logger, `lockstep`: warnings of every rank on its stderr, everything in the rank's own log file.

Rooms write `logging.getLogger("lockstep")`; only the two entry points (the command and a worker) call `set_up`. The log file lies on the
disk of the run, which may not answer for minutes: it is written in a thread, and nobody who logs waits for it.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from logging.handlers import QueueHandler
from pathlib import Path

LET_OUT_S = 1.0


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
        log.addHandler(InBackground(lines))


def let_out() -> None:
    """Return when the log file has what was said so far, or after a second: for who ends this process at once."""
    for handler in logging.getLogger("lockstep").handlers:
        handler.flush()


class InBackground(QueueHandler):
    """Hands each record, as it reads now, to `handler` in a thread."""

    def __init__(self, handler: logging.Handler) -> None:
        self.said: queue.SimpleQueue[logging.LogRecord | threading.Event | None] = queue.SimpleQueue()
        super().__init__(self.said)
        self.handler = handler
        self.thread = threading.Thread(target=self._write, name="log", daemon=True)
        self.thread.start()

    def _write(self) -> None:
        while (one := self.said.get()) is not None:
            if isinstance(one, threading.Event):
                one.set()
            else:
                self.handler.handle(one)

    def flush(self) -> None:
        """Return when the thread has come to here, or after LET_OUT_S."""
        here = threading.Event()
        self.said.put(here)
        here.wait(LET_OUT_S)

    def close(self) -> None:
        """Write what is left. Waits for the disk."""
        self.said.put(None)
        self.thread.join()
        self.handler.close()
        super().close()
