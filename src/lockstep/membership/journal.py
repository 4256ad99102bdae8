"""What an agent did and saw, in the run's events.jsonl, for people and for the report. A disk that is away stops nobody."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path

from lockstep.files import append_line

log = logging.getLogger("lockstep")


class Journal:
    """The lines of one host. Each kind of warning is shown once: the disk may be away for long."""

    def __init__(self, folder: Path, host: str) -> None:
        self.path, self.host = folder / "events.jsonl", host
        self.warned: set[str] = set()

    def note(self, event: str, why: str, **facts: int) -> None:
        """A line: what happened, to whom (slot, pid), and why."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, "host": self.host, **facts, "why": why}
        try:
            append_line(self.path, json.dumps(line, ensure_ascii=False))
        except OSError as error:
            self.warn(f"{self.path} cannot be written", error)

    def warn(self, what: str, error: Exception) -> None:
        """Show what does not work, and that it goes on without."""
        if what not in self.warned:
            self.warned.add(what)
            log.warning("%s: %s", what, error)
