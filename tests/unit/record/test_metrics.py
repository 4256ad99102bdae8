"""metrics.jsonl has every step once, despite kills of its writers and full disks."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import save

from lockstep.checkpoint import commands
from lockstep.errors import DataError, LockstepError
from lockstep.record.metrics import MAX_STATES, MetricsFile, read_metrics, state_after
from lockstep.record.tracker import Tracker, metrics_damage

SUPPORT = Path(__file__).parents[2] / "support"


def values(step: int) -> dict[str, Any]:
    return {"loss": 1 / step, "tokens": 100 + step, "seconds": 0.25}


def log_steps(path: Path, from_step: int, to_step: int) -> None:
    metrics = MetricsFile(path, from_step)
    for step in range(from_step + 1, to_step + 1):
        metrics.log(step, values(step))
    metrics.close()


@pytest.fixture
def undisturbed(tmp_path: Path) -> bytes:
    log_steps(tmp_path / "undisturbed.jsonl", 0, 30)
    return (tmp_path / "undisturbed.jsonl").read_bytes()


def test_line_is_a_json_object_with_the_step_first(undisturbed: bytes) -> None:
    assert json.loads(undisturbed.splitlines()[6]) == {
        "step": 7,
        "loss": 1 / 7,
        "tokens": 107,
        "seconds": 0.25,
    }
    assert undisturbed.startswith(b'{"step": 1, ')


@settings(max_examples=60, deadline=None)
@given(torn_at=st.integers(0, 10_000), checkpoint=st.integers(0, 30), last=st.integers(0, 30))
def test_run_torn_at_any_byte_and_resumed_has_the_same_file(
    torn_at: int, checkpoint: int, last: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    log_steps(path, 0, 30)
    content = path.read_bytes()
    kept_bytes = state_after(path, checkpoint).bytes
    os.truncate(path, min(len(content), kept_bytes + torn_at % (len(content) - kept_bytes + 1)))
    log_steps(path, checkpoint, max(checkpoint, last))
    log_steps(path, max(checkpoint, last), 30)
    assert path.read_bytes() == content


def test_process_killed_while_writing_loses_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    checkpoint = 0
    for _ in range(4):
        command = [sys.executable, str(SUPPORT / "write_metrics.py"), str(path), str(checkpoint)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            printed = [int(process.stdout.readline()) for _ in range(3)]
            process.send_signal(signal.SIGKILL)
        checkpoint = printed[-1] - 20
    MetricsFile(path, checkpoint).close()
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [
        (step, 1 / step) for step in range(1, checkpoint + 1)
    ]
    assert checkpoint > 300


def test_steps_after_the_checkpoint_are_truncated_at_once(
    tmp_path: Path, undisturbed: bytes
) -> None:
    path = tmp_path / "undisturbed.jsonl"
    MetricsFile(path, 20).close()
    assert [line["step"] for line in read_metrics(path)] == list(range(1, 21))
    assert undisturbed.startswith(path.read_bytes())


@pytest.mark.parametrize(
    ("lines", "from_step", "problem"),
    [
        ([1, 2, 4, 5], 5, "line 3 is step 4, after step 2"),
        ([1, 2, 2, 3], 3, "line 3 is step 2, after step 2"),
        ([1, 2, 3], 5, "the last line is step 3"),
    ],
)
def test_missing_or_repeated_step_is_an_error_with_the_line(
    lines: list[int], from_step: int, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1}}\n' for step in lines))
    before = path.read_bytes()
    with pytest.raises(DataError, match=problem) as caught:
        MetricsFile(path, from_step)
    assert str(path) in caught.value.where
    assert "move metrics.jsonl aside" in caught.value.hint
    assert path.read_bytes() == before, "an invalid file is not changed"


def test_damaged_line_before_the_checkpoint_is_found(tmp_path: Path, undisturbed: bytes) -> None:
    path = tmp_path / "undisturbed.jsonl"
    path.write_bytes(undisturbed.replace(b'{"step": 9,', b'{"st\x00p": 9,'))
    with pytest.raises(DataError, match="line 9 is torn"):
        MetricsFile(path, 20)
    MetricsFile(path, 8).close()
    assert len(read_metrics(path)) == 8, "damage after the checkpoint does not matter"


def test_new_file_starts_at_the_resumed_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 400, 410)
    log_steps(path, 405, 410)
    assert [line["step"] for line in read_metrics(path)] == list(range(401, 411))
    MetricsFile(path, 300).close()
    assert read_metrics(path) == []


def test_repeated_or_skipped_step_is_rejected(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 3)
    metrics.log(4, {})
    for step in (4, 6):
        with pytest.raises(LockstepError, match=f"step {step} was logged after step 4"):
            metrics.log(step, {})
    metrics.close()


def test_non_finite_numbers_round_trip_as_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    metrics.log(
        1,
        {"loss": math.nan, "norm": math.inf, "low": -math.inf, "deep": [math.nan], "name": "città"},
    )
    metrics.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    raw = json.loads(path.read_text(), parse_constant=refuse)
    assert raw == {
        "step": 1,
        "loss": "NaN",
        "norm": "Infinity",
        "low": "-Infinity",
        "deep": ["NaN"],
        "name": "città",
    }
    line = read_metrics(path)[0]
    assert math.isnan(line["loss"]) and line["norm"] == math.inf and line["low"] == -math.inf


@given(loss=st.floats(allow_nan=False))
@settings(max_examples=50, deadline=None)
def test_floats_round_trip_with_the_same_bits(
    loss: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    metrics.log(1, {"loss": loss})
    metrics.close()
    assert (
        math.copysign(1, read_metrics(path)[0]["loss"]) == math.copysign(1, loss)
        and read_metrics(path)[0]["loss"] == loss
    )


def test_full_disk_neither_stops_the_run_nor_leaves_a_gap(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SUPPORT / "metrics_on_full_disk.py"),
        str(tmp_path / "metrics.jsonl"),
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert f"WHILE FULL {list(range(1, 11))} True" in output, (
        "a partial line is truncated, readers never see it"
    )
    assert output[-1] == "AT LAST True"
    assert sum("cannot be written" in line for line in output) == 2, (
        "each outage is logged once, not once per step"
    )
    assert sum("can be written again" in line for line in output) == 2


def test_unwritable_folder_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="metrics cannot be written"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl", 0)


def test_long_file_is_opened_in_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        file.writelines(
            f'{{"step": {step}, "loss": 0.123456789, "tokens": 2048, "seconds": 0.1}}\n'
            for step in range(1, 100_001)
        )
    tracemalloc.start()
    metrics = MetricsFile(path, 99_990)
    assert next(metrics.after(99_989))["step"] == 99_990
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    metrics.close()
    assert peak_bytes < 1_000_000 < path.stat().st_size


def record(run: Path, from_step: int, to_step: int, sync_every: int = 10) -> None:
    """Record steps as a run does that saves every `sync_every` steps."""
    with Tracker(run, leader=True, from_step=from_step) as tracker:
        for step in range(from_step + 1, to_step + 1):
            tracker.step(step, values(step))
            if step % sync_every == 0:
                tracker.sync()


def flip(content: bytes, line: int) -> bytes:
    """Flip a bit of the loss, so that the line remains JSON."""
    lines = content.splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"tokens": 1', b'"tokens": 3')
    return b"".join(lines)


DAMAGE = {
    "a flipped bit": (
        lambda content: flip(content, 14),
        "a line of steps 11 to 20 was changed after it was written",
    ),
    "an emptied file": (lambda content: b"", "steps 1 to 30 are missing"),
    "another run's file": (
        lambda content: content.replace(b"0.25", b"0.26"),
        "a line of steps 1 to 10 was changed after it was written",
    ),
    "a lost line": (
        lambda content: b"".join(
            content.splitlines(keepends=True)[:4] + content.splitlines(keepends=True)[5:]
        ),
        "step 5 is missing",
    ),
    "an earlier copy": (
        lambda content: b"".join(content.splitlines(keepends=True)[:17]),
        "steps 18 to 30 are missing",
    ),
    "a file of later steps": (
        lambda content: content[content.index(b'{"step": 25') :],
        "steps 1 to 24 are missing",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_changed_file_is_noticed_at_resume_and_in_the_report(tmp_path: Path, name: str) -> None:
    damage, problem = DAMAGE[name]
    record(tmp_path, 0, 30)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    assert metrics_damage(tmp_path, 30) == []
    path.write_bytes(damage(content))
    assert metrics_damage(tmp_path, 30) == [problem]
    save(tmp_path / "checkpoints", 30)
    assert commands.verify(tmp_path) == (False, ["step 30 is whole", f"metrics.jsonl: {problem}"])
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"at which (it|the run) resumes") as caught:
        Tracker(tmp_path, leader=True, from_step=30)
    assert "move metrics.jsonl aside: the new file starts at step 31" in caught.value.hint
    assert path.read_bytes() == before, "an invalid file is not changed"
    path.rename(tmp_path / "aside.jsonl")
    record(tmp_path, 30, 40)
    Tracker(tmp_path, leader=True, from_step=40).close()
    assert metrics_damage(tmp_path, 40) == []


def test_a_run_that_resumes_from_any_checkpoint_has_the_states_of_its_file(tmp_path: Path) -> None:
    record(tmp_path, 0, 30)
    for from_step, to_step in ((20, 25), (20, 33), (10, 12), (10, 10), (0, 5), (0, 0), (0, 30)):
        record(tmp_path, from_step, to_step)
        assert metrics_damage(tmp_path, to_step) == []
    (tmp_path / "tracker.json").unlink()  # of an earlier version
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(flip(path.read_bytes(), 25))
    assert metrics_damage(tmp_path, 30) == []
    record(tmp_path, 30, 40)
    path.write_bytes(flip(path.read_bytes(), 35))
    assert metrics_damage(tmp_path, 40) == [
        "a line of steps 31 to 40 was changed after it was written"
    ]


def test_a_long_run_keeps_few_states(tmp_path: Path) -> None:
    steps = 4 * MAX_STATES
    record(tmp_path, 0, steps, sync_every=1)
    states = json.loads((tmp_path / "tracker.json").read_text())["metrics"]
    assert (
        MAX_STATES // 2 < len(states) <= MAX_STATES and states[0][0] == 1 and states[-1][0] == steps
    )
    assert metrics_damage(tmp_path, steps) == []
