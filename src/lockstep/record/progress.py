"""Progress display of a training run: a bar on a terminal, plain flushed lines elsewhere.

When the reader exits (`lockstep train | head`) the output ends and the training continues.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from lockstep.log import log
from lockstep.record.step_timer import format_step_line


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows lines, and a bar on a terminal, for the steps from `start` to `total`.

    shows      returns whether this process displays; called at each step, as the leader may change
    log_every  steps between lines; the first and the last step of a start also have one
    stream     output; None: standard output
    """

    def __init__(
        self,
        total: int,
        start: int,
        shows: Callable[[], bool],
        *,
        log_every: int = 20,
        stream: TextIO | None = None,
    ) -> None:
        self.total, self.start, self.log_every = total, start, log_every
        self.stream = stream or sys.stdout
        self.shows, self.closed = shows, False
        self.bar: Bar | None = None
        if shows() and self.stream.isatty():
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            console = Console(file=self.stream, force_terminal=True, highlight=False)
            self.bar = Bar(*columns, console=console, refresh_per_second=2, transient=True)
            self.task = self.bar.add_task("step", total=total, completed=start)
            self.bar.start()

    def step(self, step: int, values: Mapping[str, Any], *, steps: int = 1) -> None:
        """Update the bar; print a line if one is due in these newest `steps`. values: see
        `format_step_line`."""
        if self.closed or not self.shows():
            return
        if self.bar is not None:
            self.bar.update(self.task, completed=step)
        before = step - steps
        if (
            step // self.log_every > before // self.log_every
            or before == self.start
            or step == self.total
        ):
            self.print_line(format_step_line(step, values))

    def print_line(self, line: str) -> None:
        if self.closed or not self.shows():
            return
        try:
            if self.bar is not None:
                self.bar.console.print(line, markup=False, soft_wrap=True)
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
