"""What a run shows while it runs: a bar on a terminal, plain lines everywhere else, from one process of each node.

A line comes every `log_every` steps, and for the first and the last step of a start; on a terminal the bar stays below
the lines and says how far the run is. Piped into a file or another program there is no bar and no control character,
and every line is flushed, so `tail -f` and a supervisor see it at once. Nobody listening any more (`lockstep train |
head`) ends the output, not the training.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from lockstep.record.step_timer import step_line

log = logging.getLogger("lockstep")


def due(step: int, start: int, total: int, log_every: int) -> bool:
    """Whether the line of `step` is shown: every `log_every`-th, the first after `start`, the last of the run."""
    return step % log_every == 0 or step in (start + 1, total)


class Progress:
    """Lines, and on a terminal a bar, for the steps from `start` to `total`.

    shows     whether this process is the one that shows, asked again at each step: who was lost may have been it
    stream    where to; standard output by default
    terminal  whether `stream` is a terminal; None: it is asked
    """

    def __init__(
        self,
        total: int,
        start: int,
        shows: Callable[[], bool],
        *,
        log_every: int = 20,
        stream: TextIO | None = None,
        terminal: bool | None = None,
    ) -> None:
        self.total, self.start, self.log_every = total, start, log_every
        self.stream = stream or sys.stdout
        self.shows, self.lost = shows, False
        self.bar: Bar | None = None
        if shows() and (self.stream.isatty() if terminal is None else terminal):
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
            console = Console(file=self.stream, force_terminal=True, highlight=False)
            self.bar = Bar(*columns, console=console, refresh_per_second=2, transient=True)
            self.task = self.bar.add_task("step", total=total, completed=start)
            self.bar.start()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show that `step` is done; its values, if a line is due. Names of values as `meter.step_line` has them."""
        if self.lost or not self.shows():
            return
        if self.bar is not None:
            self.bar.update(self.task, completed=step)
        if due(step, self.start, self.total, self.log_every):
            self.say(step_line(step, values))

    def say(self, line: str) -> None:
        """Show one line, above the bar if there is one."""
        if self.lost or not self.shows():
            return
        try:
            if self.bar is not None:
                self.bar.console.print(line, markup=False, soft_wrap=True)
            else:
                self.stream.write(line + "\n")
                self.stream.flush()
        except OSError as error:
            self.lost = True
            if isinstance(error, BrokenPipeError):
                # Or Python's own flush at the end fails again and spoils the exit code (docs.python.org, signal, SIGPIPE).
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            log.warning("nothing is shown from here on (%s); training goes on", error.strerror)

    def close(self) -> None:
        """Take the bar away; the lines stay."""
        if self.bar is not None:
            bar, self.bar = self.bar, None
            try:
                bar.stop()
            except OSError as error:
                log.debug("the terminal is gone: %s", error.strerror)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
