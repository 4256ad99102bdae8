"""events.jsonl, the diary of a run: what happened, when by the clock of the host that wrote it, and what it cost.

Agents and workers of all hosts append to it, a line in one write. A disk that does not take a line costs the line and nothing else.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.files import append_line, read_bytes
from lockstep.record.metrics import decode, encode, last_newline

log = logging.getLogger("lockstep")


def note(run: Path, event: str, **facts: Any) -> bool:
    """Append one event; False when the disk did not take it."""
    path, now = run / "events.jsonl", datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        torn = path.exists() and last_newline(path) < path.stat().st_size  # somebody was killed inside a line
        append_line(path, "\n" * torn + encode({"time": now, "event": event, **facts}).decode().rstrip("\n"))
    except OSError as error:
        log.debug("%s was not noted: %s", event, error)
        return False
    return True


def read(run: Path) -> list[dict[str, Any]]:
    """All events, in the order in which they were written; lines that are torn or damaged are left out."""
    path = run / "events.jsonl"
    lines = read_bytes(path).splitlines() if path.exists() else []
    return [event for event in map(decode, lines) if event is not None and is_event(event)]


def is_event(event: dict[str, Any]) -> bool:
    """Whether a line has what `note` writes into each."""
    try:
        datetime.fromisoformat(event["time"])
        return isinstance(event["event"], str)
    except (KeyError, ValueError, TypeError):
        return False
