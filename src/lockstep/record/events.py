"""events.jsonl, the event log of a run, with times by the clock of the host that wrote them.

Agents and workers of all hosts append to it, one write per line. A failed write loses its line.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.log import log
from lockstep.record.metrics import append_json, decode_line, read_lines


def append_event(run: Path, event: str, **facts: Any) -> bool:
    """Append an event; return False when it cannot be written."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        append_json(run / "events.jsonl", {"time": now, "event": event, **facts})
    except OSError as error:
        log.debug("event %s was not written: %s", event, error)
        return False
    return True


def iter_events(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the events in file order; skip torn or damaged lines."""
    for event in map(decode_line, read_lines(run / "events.jsonl")):
        if event is not None and is_event(event):
            yield event


def read_events(run: Path) -> list[dict[str, Any]]:
    return list(iter_events(run))


def is_event(event: dict[str, Any]) -> bool:
    try:
        datetime.fromisoformat(event["time"])
        return isinstance(event["event"], str)
    except (KeyError, ValueError, TypeError):
        return False
