"""`lockstep status` shows the shares of the newest generation, from the run's events."""

from __future__ import annotations

from pathlib import Path

from lockstep.elastic.control import format_status, newest_shares
from lockstep.record.events import append_event


def test_status_shows_the_newest_shares_of_its_generation(tmp_path: Path) -> None:
    assert newest_shares(tmp_path, 1) == []
    for generation, shares in ((1, [5, 3]), (1, [6, 2]), (2, [7, 1])):
        append_event(tmp_path, "shares", generation=generation, shares=shares)
    assert newest_shares(tmp_path, 1) == [6, 2] and newest_shares(tmp_path, 3) == []
    status = {
        "run": "runs/a",
        "generation": 1,
        "began_at_step": 4,
        "reason": "start",
        "members": [],
        "waiting": [],
        "evaluators": [],
    }
    first_line = [
        format_status({**status, "ended": None, "shares": shares}).splitlines()[0]
        for shares in ([6, 2], [4, 4], [])
    ]
    assert first_line == [
        "generation 1, after step 4: start; shares 6+2",
        *["generation 1, after step 4: start"] * 2,
    ]
