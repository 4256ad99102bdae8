"""A Session in a pipeline with real workers: one sha256 through kills, a stop and other layouts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.launching import lockstep_command, run_command
from test_own_layout_runs import STEPS, lines_of

from lockstep.checkpoint.commands import digest_line
from lockstep.record import events

SCRIPT = Path(__file__).parents[1] / "support" / "loops" / "own_pipeline.py"


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))


def run(
    folder: Path, workers: int, layout: dict[str, int], *words: str
) -> subprocess.CompletedProcess[str]:
    axes = [word for axis, size in layout.items() for word in (f"--layout.{axis}", str(size))]
    command = lockstep_command(
        "run", "--out", str(folder), "--workers", str(workers), *axes, str(SCRIPT), *words
    )
    return run_command(command)


@pytest.mark.long
def test_pipelines_heal_and_resume_with_the_digest_of_one_worker(tmp_path: Path) -> None:
    pipeline, cases = (
        {"pipeline": 2},
        {"alone": (1, {}, {}), "healed": (4, {"pipeline": 2}, {"kill": 12})},
    )
    cases |= {
        "resumed": (2, pipeline, {"kill": 13, "stop": 22}),
        "cut in four": (4, {"pipeline": 2, "shard": 2}, {}),
    }
    for name, (workers, layout, orders) in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        if orders:
            (folder / "disturb").write_text(json.dumps(orders))
        result = run(folder, workers, layout, *(["--split=2"] if name == "healed" else []))
        assert result.returncode == (75 if "stop" in orders else 0), result.stderr
    regrouped = [
        event for event in events.read_events(tmp_path / "healed") if event["event"] == "regrouped"
    ]
    assert any(event.get("joined") for event in regrouped), "the lost replica was replaced in place"
    result = run(tmp_path / "resumed", 1, {})
    assert result.returncode == 0, result.stderr
    digests = {name: digest_line(tmp_path / name) for name in cases}
    assert len(set(digests.values())) == 1 and digests["alone"].startswith(
        f"step {STEPS} sha256 "
    ), digests
    alone = lines_of(tmp_path / "alone")
    assert len(alone) == STEPS and all(lines_of(tmp_path / name) == alone for name in cases)


@pytest.mark.parametrize(
    ("habit", "message"),
    [
        ("backward", "in a pipeline only the last stage has a loss"),
        pytest.param(
            "call",
            "the model was called with gradients, or in the micro-batch loop",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "twice", "forward_backward() was called twice in micro-batch", marks=pytest.mark.long
        ),
        pytest.param("hidden state", "the first time", marks=pytest.mark.long),
        ("rank", "the inputs and targets are not those of the stage before"),
        ("penalty", "the loss depends on parameters other than through the model's output"),
        ("buffer", "buffers changed in the forward passes of step 1: 1.calls"),
        pytest.param(
            "unused output",
            "no gradient for some of the tensors that it receives",
            marks=pytest.mark.long,
        ),
        pytest.param("unused parameters", "no gradient arrived for 2 of", marks=pytest.mark.long),
        pytest.param(
            "numpy", "drew numbers from NumPy's or Python's generator", marks=pytest.mark.long
        ),
        pytest.param("dict", "a dict cannot be passed to another stage", marks=pytest.mark.long),
        (
            "average",
            "averages of the model, GradScalers and declared buffers are not supported in a pipeline",
        ),
    ],
)
def test_wrong_use_in_a_pipeline_is_refused(habit: str, message: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", 2, {"pipeline": 2}, f"--habit={habit}", "--steps=3", "--split=2")
    assert result.returncode == 2 and message in result.stderr, result.stderr
