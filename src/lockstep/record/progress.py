"""Progress display of a training run: a bar on a terminal, plain flushed lines elsewhere.

When the reader exits (`lockstep train | head`) the output ends and the training continues.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lockstep.errors import UsageError
from lockstep.files import write_atomic
from lockstep.log import log
from lockstep.record.step_timer import format_fields, step_fields

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

PRINTED = "printed.txt"  # in the run folder
KEPT_LINES = 100


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows lines, and a bar on a terminal, for the steps from `start` to `total`.

    shows    returns whether this process displays; called at each step, as the leader may change
    every_s  seconds between lines; the first and the last step of a start also have one; inf: no
             lines and no bar
    stream   output; None: standard output
    """

    def __init__(
        self,
        total: int,
        start: int,
        shows: Callable[[], bool],
        *,
        every_s: float = 10.0,
        stream: TextIO | None = None,
    ) -> None:
        self.total = total
        self.start = start
        self.every_s = every_s
        self.last_line_s = -math.inf
        self.widths: dict[str, int] = {}  # of the columns
        self.stream = stream or sys.stdout
        self.shows, self.closed = shows, False
        self.bar: Bar | None = None
        self.task: Any = None
        if shows() and self.stream.isatty() and every_s != math.inf:
            self.bar, self.task = make_bar(self.stream, total, start)
            self.bar.start()
            # A killed process would leave it hidden.
            self.bar.console.show_cursor(True)

    def step(
        self,
        step: int,
        values: Mapping[str, Any],
        *,
        steps: int = 1,
        logged: Mapping[str, float] | None = None,
        is_last: bool = False,
    ) -> None:
        """Update the bar; print a line if one is due in these newest `steps`, or for the last one
        of this start. values, logged: see `step_fields`."""
        if self.closed or not self.shows():
            return
        if self.bar is not None:
            self.bar.update(self.task, completed=step)
        if self._is_due(step, step - steps, is_last):
            self.last_line_s = time.monotonic()
            fields = step_fields(step, values, logged or {}, self.total)
            columns = self.bar.console.width if self.bar else math.inf
            self.print_line(format_fields(fields, self.widths, columns))

    def _is_due(self, step: int, before: int, is_last: bool) -> bool:
        if self.every_s == math.inf:
            return False
        if before == self.start or step == self.total or is_last:
            return True
        return time.monotonic() - self.last_line_s >= self.every_s

    def set_total(self, total: int) -> None:
        """Set another last step: of a loop that continues."""
        self.total = total
        if self.bar is not None:
            self.bar.update(self.task, total=total)

    def print_line(self, line: str, *, always: bool = False) -> None:
        """Print a line where the progress is shown. always: in any case, on this process."""
        if self.closed or not (always or self.shows()):
            return
        try:
            if self.bar is not None:
                self.bar.console.print(line, markup=False, emoji=False, soft_wrap=True)
            else:
                self.stream.write(line + "\n")
                self.stream.flush()
        except OSError as error:
            self.closed = True
            if isinstance(error, BrokenPipeError):
                # Otherwise Python's flush at exit changes the exit code (Python docs, SIGPIPE).
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            log.warning(
                "standard output was closed (%s); training continues without progress output",
                error.strerror,
            )

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            bar, self.bar = self.bar, None
            try:
                bar.stop()
            except OSError as error:
                log.debug("the terminal was closed: %s", error.strerror)


class PrintedLines:
    """The newest lines that the loop has printed in this start, for its report."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)

    def add(self, step: int, line: str) -> None:
        """Keep a line of this step, as metrics.jsonl numbers it."""
        self.lines.append(f"step {step:,}  {line}\n")

    def write(self, folder: Path) -> None:
        if not self.lines:
            return
        try:
            write_atomic(folder / PRINTED, "".join(self.lines))
        except OSError as error:
            log.debug("%s was not written: %s", PRINTED, error)


def make_bar(stream: TextIO, total: int, start: int) -> tuple[Bar, Any]:
    """Return a bar on a terminal and its task."""
    from rich.console import Console  # only where there is a terminal
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    console = Console(file=stream, force_terminal=True, highlight=False)
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), Remaining())
    # Output to a file stays out of the terminal.
    to_terminal = sys.stderr.isatty()
    bar = Progress(
        *columns,
        console=console,
        refresh_per_second=2,
        transient=True,
        redirect_stderr=to_terminal,
    )
    return bar, bar.add_task("step", total=total, completed=start)


def progress_interval_s(progress: float | bool) -> float:
    """Return the seconds between two lines of Session(progress=...); inf: none."""
    if isinstance(progress, bool):
        return 10.0 if progress else math.inf
    if not progress >= 0:
        raise UsageError(
            f"progress={progress!r}",
            "Session(progress=...)",
            "give the seconds between two lines, or False for none",
        )
    return progress
