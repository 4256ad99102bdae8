"""The account of time of an earlier start."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.training.step_record import _empty_account


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_time_account_of_a_long_run_reads_only_the_first_event(tmp_path: Path) -> None:
    """All of it was read: 8 MB here."""
    assert _empty_account(tmp_path) is None
    lines = [
        json.dumps({"time": f"2026-11-23T00:00:00.{number:06}+00:00", "event": "saved"})
        for number in range(100_000)
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(['{"time": "torn', *lines]))
    before = bytes_read()
    account = _empty_account(tmp_path)
    assert bytes_read() - before < 100_000
    assert account == {"wall_clock_s": 1795392000.0, "seconds": {}}
