"""events.jsonl, the diary of a run: what happened, when by the clock of the host that wrote it, and what it cost.

Agents and workers of all hosts append to it, a line in one write. A disk that does not take a line costs the line and nothing else.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.files import append_line

log = logging.getLogger("lockstep")


def note(run: Path, event: str, **facts: Any) -> bool:
    """Append one event; False when the disk did not take it."""
    line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts}
    try:
        append_line(run / "events.jsonl", json.dumps(line, ensure_ascii=False))
    except OSError as error:
        log.debug("%s was not noted: %s", event, error)
        return False
    return True
