"""Configure the logger `lockstep`: rank 0 logs to stderr, every rank to a separate file.

The command, its workers, and a Session without them set it up. Text of files passes `printable`
before a terminal, a log or a report shows it.
A thread writes the log file, so a run disk that does not answer for minutes blocks no log call.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler
from pathlib import Path

FLUSH_TIMEOUT_S = 1.0
ANNOUNCE_S = 1.0
# C0 and C1 except tab and newline, overrides of the direction of text, and lone surrogates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
log = logging.getLogger("lockstep")
announced: set[str] = set()


def printable(text: str) -> str:
    """Replace control characters, which a terminal obeys, and what UTF-8 cannot encode."""
    return UNPRINTABLE.sub("\ufffd", text.replace("\r\n", "\n"))


def erase_line(*, is_terminal: bool) -> str:
    """Return what erases the line of a terminal: a process may have drawn a bar in it."""
    return "\r\x1b[K" if is_terminal and os.environ.get("TERM") != "dumb" else ""


class PrintableFormatter(logging.Formatter):
    before = ""  # each record

    def format(self, record: logging.LogRecord) -> str:
        return self.before + printable(super().format(record))


def set_up_logging(*, rank: int = 0, file: Path | None = None) -> None:
    """Send records from INFO on to stderr (rank 0 only), and all records to `file`."""
    log.setLevel(logging.DEBUG)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    if rank == 0:
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setLevel(logging.INFO)
        formatter = PrintableFormatter("%(message)s")
        formatter.before = erase_line(is_terminal=sys.stderr.isatty())
        terminal.setFormatter(formatter)
        log.addHandler(terminal)
    if file is not None:
        lines = logging.FileHandler(file, encoding="utf-8")
        lines.setFormatter(
            PrintableFormatter(f"%(asctime)s %(levelname).1s rank {rank}: %(message)s")
        )
        log.addHandler(BackgroundHandler(lines))


@contextmanager
def logging_to_terminal(rank: int) -> Iterator[None]:
    """Context manager that logs as a worker of the command does, unless the program has set up
    logging."""
    if log.hasHandlers() or log.level != logging.NOTSET:
        yield
        return
    set_up_logging(rank=rank)
    try:
        yield
    finally:
        log.handlers.clear()
        log.setLevel(logging.NOTSET)
        log.propagate = True


@contextmanager
def announcing(what: str) -> Iterator[None]:
    """Log what the block does, once in a process, if it takes over ANNOUNCE_S."""

    def announce() -> None:
        if what not in announced:
            announced.add(what)
            log.info("%s", what)

    timer = threading.Timer(ANNOUNCE_S, announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def flush_log() -> None:
    """Wait until all records are in the log file, FLUSH_TIMEOUT_S at most: before os._exit."""
    for handler in log.handlers:
        handler.flush()


class BackgroundHandler(QueueHandler):
    """Formats each record at once and passes it to `handler` in a thread."""

    def __init__(self, handler: logging.Handler) -> None:
        self.records: queue.SimpleQueue[logging.LogRecord | threading.Event | None] = (
            queue.SimpleQueue()
        )
        super().__init__(self.records)
        self.handler = handler
        self.thread = threading.Thread(target=self._write, name="log", daemon=True)
        self.thread.start()

    def _write(self) -> None:
        while (record := self.records.get()) is not None:
            if isinstance(record, threading.Event):
                record.set()
            else:
                self.handler.handle(record)

    def flush(self) -> None:
        written = threading.Event()
        self.records.put(written)
        written.wait(FLUSH_TIMEOUT_S)

    def close(self) -> None:
        self.records.put(None)
        self.thread.join()
        self.handler.close()
        super().close()
