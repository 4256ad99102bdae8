"""What an agent did and saw, in the run's events.jsonl, for people and for the report. A disk that is away stops nobody."""

from __future__ import annotations

import logging
from pathlib import Path

from lockstep.record import events

log = logging.getLogger("lockstep")


class Journal:
    """The lines of one host. Each kind of warning is shown once: the disk may be away for long."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder, self.host = folder, host
        self.warned: set[str] = set()

    def note(self, event: str, why: str, **facts: int) -> None:
        """A line: what happened, to whom (slot, pid), and why."""
        if not events.note(self.folder, event, host=self.host, **facts, why=why):
            self.warn(f"{self.folder / 'events.jsonl'} cannot be written", "its lines are lost")

    def warn(self, what: str, error: Exception | str) -> None:
        """Show what does not work, and that it goes on without."""
        if what not in self.warned:
            self.warned.add(what)
            log.warning("%s: %s", what, error)
