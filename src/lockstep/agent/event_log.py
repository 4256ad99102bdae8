"""The agent's lines in the run's events.jsonl. An unwritable disk stops nothing."""

from __future__ import annotations

import logging
from pathlib import Path

from lockstep.record import events

log = logging.getLogger("lockstep")


class EventLog:
    """The events of one host. Each warning is shown only once: an outage may be long."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder, self.host = folder, host
        self.warned: set[str] = set()

    def add(self, event: str, why: str, **facts: int) -> None:
        """Append an event with its reason and the worker it concerns (slot, pid)."""
        if not events.append_event(self.folder, event, host=self.host, **facts, why=why):
            self.warn(f"cannot write {self.folder / 'events.jsonl'}", "its lines are lost")

    def warn(self, what: str, error: Exception | str) -> None:
        if what not in self.warned:
            self.warned.add(what)
            log.warning("%s: %s", what, error)
