"""A slow worker under an agent: named, relieved, killed and relieved again, with one sha256."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.fork_loop import LoopResult, run_loop
from support.launching import ROOT, run_lockstep, start_lockstep

from lockstep.checkpoint.commands import digest_line
from lockstep.record import events

SCRIPT = ROOT / "tests" / "support" / "loops" / "uneven.py"


@pytest.mark.long
def test_slow_worker_is_relieved_before_and_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    assert run_loop(SCRIPT, tmp_path / "alone", 1, steps=60, pause_s=0.0) == LoopResult(0, "")
    folder = tmp_path / "run"
    process = start_lockstep("run", SCRIPT, "--workers", 2, "--out", folder, "--steps", 60, "--num_workers", 1, "--kill", 20)
    shown: set[str] = set()
    while process.poll() is None:
        status = run_lockstep("status", folder, "--json")
        shown |= {str(json.loads(status.stdout)["shares"])} if status.returncode == 0 else set()
        time.sleep(0.1)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert digest_line(folder) == digest_line(tmp_path / "alone")
    recorded = events.read_events(folder)
    generations = [event["generation"] for event in recorded if event["event"] == "shares" and event["shares"] == [6, 2]]
    assert len(set(generations)) >= 2, recorded
    assert any(event["event"] == "slow" and event["worker"].startswith("worker 1 on host ") for event in recorded)
    assert "[6, 2]" in shown and "s per micro-batch, the median is 0.0" in output, (shown, output)
