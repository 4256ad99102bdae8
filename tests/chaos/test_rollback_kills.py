"""Workers die while the ranks look for the cause of a divergence, and in the retry without it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from distributed.test_rollback_runs import STEPS, Poisoned, as_list, plant, skipped
from support.launching import one_thread, run_lockstep, start_lockstep
from support.waiting import wait_until

from lockstep.checkpoint.commands import digest_line
from lockstep.checkpoint.fingerprints import newest_facts
from lockstep.elastic.fault_injection import request_fault
from lockstep.record.events import read_events
from lockstep.record.metrics import read_metrics
from lockstep.runtime.worker_env import state_folder


def words(case: Poisoned, folder: Path, workers: int) -> list[str]:
    values = case.flags(steps=str(STEPS), evaluate__at_end="0", checkpoint__every_steps="10")
    return [
        "train",
        "--out",
        str(folder),
        "--workers",
        str(workers),
        *(word for key, text in values.items() for word in (f"--{key}", text)),
    ]


@pytest.mark.long
def test_kills_at_the_measurement_and_at_the_second_vote_change_no_bit(tmp_path: Path) -> None:
    (tmp_path / "case").mkdir()
    case, run = plant(tmp_path / "case"), tmp_path / "run"
    alone = run_lockstep(*words(case, tmp_path / "alone", 1))
    assert alone.returncode == 0, alone.stderr
    expected = skipped(tmp_path / "alone")
    steps = sorted({row["step"] for row in expected if row["step"] > STEPS // 3})
    process = start_lockstep(*words(case, run, 3), env=one_thread(LOCKSTEP_DRILL="1"))
    state = state_folder(run, os.uname().nodename)
    wait_until(
        lambda: (state / "0.board").exists() and (run / "metrics.jsonl").exists(),
        timeout_s=60,
        process=process,
    )
    # A worker votes on a step that diverges, then exchanges what it has measured (after 1), then votes on the retry (after 2).
    faults = [(1, steps[0], 1), (2, steps[2], 2), (0, steps[4], 1), (1, steps[6], 2)]
    for slot, step, after in faults:
        request_fault(state, slot, "kill", at="voting", step=step, after=after)
        wait_until(
            lambda slot=slot: not (state / f"{slot}.fault").exists(), timeout_s=60, process=process
        )  # type: ignore[misc]
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert digest_line(run) == digest_line(tmp_path / "alone"), output
    assert as_list(skipped(run)) == as_list(expected)
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == list(
        range(1, STEPS + 1)
    )
    (_, facts), (_, once) = (
        newest_facts(run / "checkpoints") or (0, {}),
        newest_facts(tmp_path / "alone" / "checkpoints") or (0, {}),
    )
    assert facts["rollback"] == once["rollback"]
    assert sum(event["event"] == "regrouped" for event in read_events(run)) >= 2 * len(faults) - 1
    text = output + "".join(path.read_text() for path in (run / "logs").iterdir())
    injected = {int(step) for step in re.findall(r"injecting kill at voting of step (\d+)", text)}
    assert injected == {step for _, step, _ in faults}
