"""The evaluator process beside the workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.agent.evaluator_process import EvaluatorProcess
from lockstep.agent.slots import EventLog


def test_an_evaluator_that_cannot_be_recorded_is_not_started_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sleep"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    (tmp_path / "logs").mkdir()
    (tmp_path / "run.json").touch()
    (tmp_path / "evaluators").touch()  # a file in the place of the folder
    evaluator = EvaluatorProcess({}, EventLog(tmp_path, "here"))
    try:
        evaluator.poll()
        pids = evaluator.pids()
        assert len(pids) == 1 and evaluator.start_at_s is None
        evaluator.poll()
        assert evaluator.pids() == pids and evaluator.is_running
    finally:
        evaluator.close()
