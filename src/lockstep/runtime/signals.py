"""Wishes to stop, taken as notes: a signal sets a name, and the loop reads it when it has time.

Between two steps all processes agree on the note, save, and leave with a code that a scheduler understands. A handler in Python runs only
between two lines of Python, so a process that waits inside a collective would not see a second Ctrl-C; the byte that Python writes to its
wake-up descriptor in the C handler arrives at once (signal.set_wakeup_fd), and a small thread that reads it ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
EXIT_CODES = {"": 0, "SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}
INTERRUPTED = 130


def exit_code(name: str) -> int:
    """The code with which a run that saved and stopped on the signal `name` leaves: 75 "start me again", 130 for SIGINT; "": 0."""
    return EXIT_CODES[name]


class Stopped(SystemExit):
    """The run has saved and stops, as all its processes have agreed; `code` is the exit code."""

    def __init__(self, name: str) -> None:
        super().__init__(exit_code(name))


class Signals:
    """While entered, the first of SIGTERM, SIGINT, SIGUSR1 sets `received` to its name ("" before); a second SIGINT ends at once with 130.

    For the main thread (signal.signal demands it). On leaving, the handlers of before are back and the thread is gone.
    Processes forked within get the handlers of before, so that they can be ended as usual.
    """

    def __init__(self) -> None:
        self.received = ""
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.thread = threading.Thread(target=end_on_second_interrupt, args=(self.reader,), name="lockstep-signals", daemon=True)
        self.thread.start()
        self.wakeup_before = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        for one in STOPPING:
            self.before[one] = signal.signal(one, self.note)
        os.register_at_fork(after_in_child=self.restore)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()
        os.write(self.writer, b"\0")
        self.thread.join()
        os.close(self.writer)
        os.close(self.reader)

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        self.received = self.received or signal.Signals(number).name

    def restore(self) -> None:
        """Put the handlers of before back; does nothing the second time."""
        if self.before:
            signal.set_wakeup_fd(self.wakeup_before)
        for one, handler in self.before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
        self.before = {}


def end_on_second_interrupt(reader: int) -> None:
    """Read the bytes of arriving signals; 0 ends the thread, the second SIGINT ends the process."""
    interrupts = 0
    while 0 not in (arrived := os.read(reader, 64)):
        interrupts += arrived.count(signal.SIGINT)
        if interrupts > 1:
            os._exit(INTERRUPTED)
