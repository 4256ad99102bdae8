"""events.jsonl, the event log of a run, with times by the clock of the host that wrote them.

Agents and workers of all hosts append to it, one write per line. A failed write loses its line.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.files import read_bytes
from lockstep.record.metrics import append_json, decode_line

log = logging.getLogger("lockstep")


def append_event(run: Path, event: str, **facts: Any) -> bool:
    """Append an event; return False when it cannot be written."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        append_json(run / "events.jsonl", {"time": now, "event": event, **facts})
    except OSError as error:
        log.debug("event %s was not written: %s", event, error)
        return False
    return True


def read_events(run: Path) -> list[dict[str, Any]]:
    """Return all events in file order; skip torn or damaged lines."""
    path = run / "events.jsonl"
    lines = read_bytes(path).splitlines() if path.exists() else []
    return [event for event in map(decode_line, lines) if event is not None and is_event(event)]


def is_event(event: dict[str, Any]) -> bool:
    try:
        datetime.fromisoformat(event["time"])
        return isinstance(event["event"], str)
    except (KeyError, ValueError, TypeError):
        return False
