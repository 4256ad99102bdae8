"""Stop signals: the first sets a name that the training loop reads between two steps.

The ranks agree on that name, save, and exit. A Python handler only runs between two bytecodes: a
process blocked in a collective would miss a second Ctrl-C. So a thread reads the byte that Python's
C handler writes to the wake-up descriptor (signal.set_wakeup_fd), and ends the process.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Of a run that saved on this signal.
STOP_EXIT_CODES = {"": 0, "SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 130}
EXIT_INTERRUPTED = 130


class Stopped(SystemExit):
    """Raised on all ranks after the run has saved and stops; `code` is the exit code."""

    def __init__(self, name: str) -> None:
        super().__init__(STOP_EXIT_CODES[name])
        self.name = name  # of the signal


class HostDrained(SystemExit):
    """This worker has left the run because its host is drained; the run continues without it."""

    def __init__(self) -> None:
        super().__init__(0)


class SignalPipe:
    """Context manager: `numbers` do not end the process, but are written to a pipe.
    Main thread only. Handlers are restored at the end."""

    numbers: tuple[signal.Signals, ...] = STOP_SIGNALS

    def __enter__(self) -> Self:
        self.before: dict[signal.Signals, Any] = {}
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.wakeup_before = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        for number in self.numbers:
            self.before[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        os.close(self.reader)
        os.close(self.writer)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, between two bytecodes."""

    def restore(self) -> None:
        if self.before:
            signal.set_wakeup_fd(self.wakeup_before)
        restore_handlers(self.before)
        self.before = {}


class StopSignals(SignalPipe):
    """Context manager: the first SIGTERM, SIGINT or SIGUSR1 sets `received` to its name.
    A second SIGINT ends the process with 130. Handlers are restored in forked children, too."""

    def __init__(self) -> None:
        self.received = ""

    def __enter__(self) -> Self:
        super().__enter__()
        self.thread = threading.Thread(
            target=exit_on_second_sigint, args=(self.reader,), name="lockstep-signals", daemon=True
        )
        self.thread.start()
        os.register_at_fork(after_in_child=self.restore)
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        os.write(self.writer, b"\0")
        self.thread.join()
        super().__exit__()

    def note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name


def exit_on_second_sigint(reader: int) -> None:
    """Read signal numbers: 0 ends the thread, the second SIGINT ends the process."""
    interrupts = 0
    while 0 not in (arrived := os.read(reader, 64)):
        interrupts += arrived.count(signal.SIGINT)
        if interrupts > 1:
            os._exit(EXIT_INTERRUPTED)


class SignalInbox(SignalPipe):
    """Context manager that queues stop signals and SIGCHLD; `wait` returns them."""

    numbers = (*STOP_SIGNALS, signal.SIGCHLD)

    def wait(self, timeout_s: float, also: Sequence[int]) -> list[int]:
        """Return queued signals after a signal, a readable descriptor in `also`, or `timeout_s`."""
        ready, _, _ = select.select([self.reader, *also], [], [], timeout_s)
        return list(os.read(self.reader, 4096)) if self.reader in ready else []


def restore_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Set the signal handlers that `signal.signal` returned; None: one that C code had set."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
