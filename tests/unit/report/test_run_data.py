"""The files of a run folder: generations, failures, damaged lines, and a run that resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.written_run import append_note, metrics_of, write_run_folder

from lockstep.errors import UsageError
from lockstep.record.metrics import MetricsFile
from lockstep.report.run_data import RunData, note_of, read_facts, require_run


def test_generations_failures_and_members(tmp_path: Path) -> None:
    data = RunData(write_run_folder(tmp_path)).update()
    assert [
        (formed.number, formed.step, len(formed.workers), formed.failed)
        for formed in data.history.generations
    ] == [
        (1, 0, 3, False),
        (2, 30, 2, True),
        (3, 38, 3, False),  # a join is no failure
    ]
    assert data.history.failures == 1 and [note.text for note in data.history.notes] == [
        "a/0: killed by SIGKILL; restarting now"
    ]
    spans = {(s.worker, s.generation): s.end_s - s.start_s for s in data.all_stretches()}
    assert (
        spans["a/0", 1] == 10.0
        and spans["b/0", 1] == 10.5
        and ("a/0", 2) not in spans
        and spans["b/0", 3] == 8.0
    )
    assert (
        data.history.seconds["training"] == 14.7
        and data.steps.newest == 60
        and data.steps.last["loss"] == metrics_of(60)["loss"]
    )


EVENTS: dict[str, tuple[dict[str, Any], str]] = {
    "override": ({"values": {"optim.floor": 0.1, "x": 2}}, "optim.floor = 0.1; x = 2"),
    "resumed with differences": ({"differences": ["torch 2 for 1", "cpu"]}, "torch 2 for 1; cpu"),
    "culprit found": ({"wrong": ["a/0", "b/1"], "why": "repeated"}, "a/0, b/1: repeated"),
    "worker ended": ({"host": "a", "slot": 1, "why": "killed"}, "a/1: killed"),
    "rolled back": (
        {"micro_batches": [{"k": 2, "loss": "NaN"}]},
        "without micro-batch 2, loss NaN",
    ),
    "diverged": ({"micro_batches": [{"k": 2, "loss": "NaN"}]}, "micro-batch 2, loss NaN"),
    "spike": ({"micro_batches": []}, ""),
}


@pytest.mark.parametrize(("event", "facts", "words"), [(k, *v) for k, v in EVENTS.items()])
def test_events_are_in_words(event: str, facts: dict[str, Any], words: str) -> None:
    assert note_of({"event": event, "step": 3, "generation": 1, "pid": 7, **facts}) == words


def test_an_update_reads_only_new_bytes(tmp_path: Path) -> None:
    write_run_folder(tmp_path)
    data = RunData(tmp_path).update()
    before = data.steps.follower.bytes_read
    assert before == (tmp_path / "metrics.jsonl").stat().st_size
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 60)
    metrics.log(61, metrics_of(61))
    metrics.close()
    append_note(tmp_path, "killed by SIGKILL; restarting now")
    data.update()
    assert (
        data.steps.newest == 61
        and data.steps.follower.bytes_read - before < 500
        and len(data.history.notes) == 2
    )


@pytest.mark.parametrize("step", [20, 59])
def test_a_resumed_run_replaces_its_steps(tmp_path: Path, step: int) -> None:
    write_run_folder(tmp_path)
    data = RunData(tmp_path).update()
    metrics = MetricsFile(tmp_path / "metrics.jsonl", step)
    for number in range(step + 1, 90):
        metrics.log(number, metrics_of(number) | {"loss": 100.0 + number})
    metrics.close()
    data.update()
    assert (data.steps.newest, data.steps.count, data.steps.damaged) == (89, 89, 0)
    assert (
        data.steps.curves["loss"].highest == (89, 189.0)
        and len(data.steps.curves["loss"].points()) == 89
    )


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    write_run_folder(tmp_path)
    for name in ("metrics.jsonl", "events.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(
                b'\x00\xff{"step"\n[]\n{"step": 12, "loss": 1.0}\n{"time": "2026-11-01T12:00:00+00:00", "event": "began"}\n'
            )
    data = RunData(tmp_path).update()
    assert (data.steps.newest, data.steps.damaged, data.history.damaged) == (60, 4, 4)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    write_run_folder(tmp_path)
    (tmp_path / "run.json").write_text('{"values": 1}')
    (tmp_path / "samples.json").write_text("{")
    (tmp_path / "evaluations.jsonl").unlink()
    (tmp_path / "evaluations.jsonl").mkdir()
    facts = read_facts(tmp_path)
    assert [problem.partition(" cannot be read")[0] for problem in facts.problems] == [
        "run.json",
        "evaluations.jsonl",
        "samples.json",
    ]
    assert facts.samples == {} and facts.evaluations == [] and facts.end == ""


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has none of metrics"):
        require_run(tmp_path)
    with pytest.raises(UsageError, match="there is no such folder"):
        require_run(tmp_path / "absent")
