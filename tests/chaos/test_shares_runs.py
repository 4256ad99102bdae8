"""A slow replica under an agent: named, relieved, killed and relieved again, with one sha256."""

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
@pytest.mark.parametrize(
    ("workers", "shard", "slow"), [(2, 1, "worker 1 on host "), (4, 2, "worker 2 on host ")]
)
def test_slow_replica_is_relieved_before_and_after_a_kill(
    workers: int, shard: int, slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    assert run_loop(SCRIPT, tmp_path / "alone", 1, steps=60, pause_s=0.0) == LoopResult(0, "")
    folder = tmp_path / "run"
    options = [
        "--workers",
        workers,
        *(["--layout.shard", shard] if shard > 1 else []),
        "--out",
        folder,
    ]
    process = start_lockstep(
        "run", SCRIPT, *options, "--steps", 60, "--num_workers", 1, "--kill", 20
    )
    shown: set[str] = set()
    while process.poll() is None:
        status = run_lockstep("status", folder, "--json")
        shown |= {str(json.loads(status.stdout)["shares"])} if status.returncode == 0 else set()
        time.sleep(0.1)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert digest_line(folder) == digest_line(tmp_path / "alone")
    recorded = events.read_events(folder)
    generations = [
        event["generation"]
        for event in recorded
        if event["event"] == "shares" and sorted(event["shares"]) == [2, 6]
    ]
    assert len(set(generations)) >= 2, recorded
    assert any(event["event"] == "slow" and event["worker"].startswith(slow) for event in recorded)
    assert shown & {"[6, 2]", "[2, 6]"}, shown
    assert "shares" not in output and "times the median" not in output, (
        "slow for less than a minute"
    )
