"""Show on the terminal of an agent what rank 0 prints, when rank 0 is not in slot 0.

Slot 0 writes to the terminal and the others to their logs (agent.py). Rank 0 moves to another slot
when the worker in slot 0 is lost, and stays there. The agent then copies what it prints from its
log.
"""

import os
import re
import select
from pathlib import Path

from lockstep.elastic.generation_log import Generation
from lockstep.files import open_regular
from lockstep.log import erase_line

# log.py; slot 0 logs these lines, too.
LOGGED = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z] rank \d+: ")
CONTINUED = b"  "  # beginning of further lines of a logged message
CHUNK = 1 << 16
TERMINAL = 1


class LeaderOutput:
    """Copies lines of the log of rank 0, if it is in a slot of `host` other than 0."""

    def __init__(self, run: Path, host: str) -> None:
        self.folder, self.host = run / "logs", host
        self.path: Path | None = None  # of the log that is copied
        self._read = 0  # bytes of it
        # Of the logs of this host when its worker in slot 0 exited.
        self._sizes: dict[Path, int] = {}
        self._is_logged = False  # the last line is of a logged message
        self._unwritten = b""
        self._erase = erase_line(is_terminal=os.isatty(TERMINAL)).encode()

    def follow(self, newest: Generation) -> None:
        """Copy from the log of rank 0 of a new generation."""
        path = None
        for leader in newest.members[:1]:
            if leader.host == self.host and leader.slot:
                path = self.folder / f"{self.host}-{leader.slot}.log"
        if path != self.path:
            self.path, self._is_logged = path, False
            self._read = self._sizes.get(path, size_of(path)) if path else 0

    def on_exit(self, slot: int) -> None:
        """Note the exit of a worker, before its error is written to its log."""
        self.copy()
        if self.path == self.folder / f"{self.host}-{slot}.log":
            self.path = None
        if slot == 0:
            self._sizes = {path: size_of(path) for path in self.folder.glob(f"{self.host}-*.log")}

    def copy(self) -> None:
        """Write new lines to the terminal, as far as that does not block."""
        try:
            if self.path and not self._unwritten and (lines := self._new_lines(self.path)):
                self._unwritten = self._erase + lines
            while self._unwritten and select.select([], [TERMINAL], [], 0)[1]:
                written = os.write(TERMINAL, self._unwritten[: select.PIPE_BUF])
                self._unwritten = self._unwritten[written:]
        except OSError:  # the disk does not answer, or the terminal is closed
            self.path, self._unwritten = None, b""

    def _new_lines(self, path: Path) -> bytes:
        with open(path, "rb", opener=open_regular) as file:
            file.seek(self._read)
            content = file.read(CHUNK)
        end = content.rfind(b"\n") + 1 or (len(content) if len(content) == CHUNK else 0)
        self._read += end
        return b"".join(
            line
            for line in content[:end].splitlines(keepends=True)
            if not self._belongs_to_log(line)
        )

    def _belongs_to_log(self, line: bytes) -> bool:
        self._is_logged = bool(LOGGED.match(line)) or (
            self._is_logged and line.startswith(CONTINUED)
        )
        return self._is_logged


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
