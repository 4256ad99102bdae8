"""What is measured of a loop on request: a profile of some steps, and model FLOPs utilization."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.launching import one_thread, run_lockstep

from lockstep.checkpoint.commands import digest_line
from lockstep.record.metrics import iter_steps

WIDTH, SAMPLES = 32, 24
LOOP = """
import argparse, torch, lockstep
from torch import nn

def train(out: str, steps: int = 4, mfu: float = 0.0, counts: bool = False, shard: int = 1,
          compile: bool = False, checkpointed: bool = False):
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(96, 32), torch.zeros(96, 32))
    options = {"micro_batches": 4, "shard": shard, "progress": 0.0}
    with lockstep.Session(out, mfu=mfu if mfu > 1 else mfu == 1, **options) as session:
        model, optimizer = session.prepare(
            model, optimizer, compile=compile,
            activation_checkpoint="full" if checkpointed else "none",
        )
        loader = session.loader(data, batch_size=24)
        for step in session.steps(steps):
            for x, y in loader(step):
                loss = nn.functional.mse_loss(model(x), y, reduction="sum" if counts else "mean")
                session.backward(loss, count=2 * len(x) if counts else None)
            optimizer.step()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--options", default="")
    given = parser.parse_args()
    train(given.out, **eval(f"dict({given.options})"))
"""
# 6 operations for each weight and sample, and 4 in the first layer, whose input has no gradient.
OPERATIONS = WIDTH * WIDTH * (4 + 6 + 6)


def run(
    folder: Path, options: str = "", *words: str, workers: int = 2
) -> subprocess.CompletedProcess[str]:
    script, out = folder / "loop.py", folder / "run"
    script.write_text(LOOP)
    command = ["run", "--workers", workers, "--out", out, *words, script, "--out", out]
    return run_lockstep(*command, "--options", options, env=one_thread())


def metrics(folder: Path) -> list[dict[str, Any]]:
    return list(iter_steps(folder / "run" / "metrics.jsonl"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert "mfu" not in done.stdout and "mfu" not in metrics(folder)[-1], "not asked for"
    assert not (folder / "run" / "profile").exists()
    return folder


def counted_operations(folder: Path, log: str) -> float:
    """Return the operations of a sample or token that mfu contains, with the peak in the log."""
    measured = re.search(r"matrix products reach ([\d.]+) TFLOP/s", log)
    assert measured, log
    line = metrics(folder)[-1]
    rate = line.get("tokens_per_second") or line["samples_per_second"]
    return line["mfu"] * line["workers"] * float(measured[1]) * 1e12 / rate


@pytest.mark.parametrize("options", ["counts=False", "shard=2, checkpointed=True"])
def test_operations_are_counted_once_in_replicas_and_in_shards_that_recompute(
    plain: Path, tmp_path: Path, options: str
) -> None:
    done = run(tmp_path, f"mfu=1, {options}")
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 4/4  loss .+  mfu \d+%", done.stdout), done.stdout
    assert counted_operations(tmp_path, done.stderr) == pytest.approx(OPERATIONS, rel=0.01)
    assert digest_line(tmp_path / "run") == digest_line(plain / "run"), "the same bits"


def test_compiled_blocks_are_refused_and_a_given_number_is_used(tmp_path: Path) -> None:
    refused = run(tmp_path, "mfu=1, compile=True", workers=1)
    assert refused.returncode == 2 and "are not counted: compiled 0, compiled 1" in refused.stderr
    assert "Session(mfu=6 * parameters)" in refused.stderr
    done = run(tmp_path, "mfu=5e6, counts=True", workers=1)
    assert done.returncode == 0, done.stderr
    assert counted_operations(tmp_path, done.stderr) == pytest.approx(5e6, rel=0.01)


def names_in_trace(folder: Path, rank: int) -> list[str]:
    with gzip.open(folder / "run" / "profile" / f"rank-{rank}.trace.json.gz", "rt") as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_profile_writes_a_trace_of_these_steps_on_each_rank(plain: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "", "--profile", "steps=2..3")
    assert done.returncode == 0, done.stderr
    line = r"steps 2\.\.3: compute .+ exposed communication .+ idle .+ peak memory .+rank-0.trace"
    assert re.search(line, done.stderr), done.stderr
    for rank in range(2):
        names = names_in_trace(tmp_path, rank)
        assert names.count("aten::linear") == 3 * 2 * 2, (
            "three layers, two micro-batches, two steps"
        )
        assert any(name.startswith("gloo:") for name in names)
    assert digest_line(tmp_path / "run") == digest_line(plain / "run")


@pytest.mark.long
def test_profile_of_a_script_without_a_session_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('trained')\n")
    words = ["--out", tmp_path / "run", "--profile", "steps=2", tmp_path / "plain.py"]
    done = run_lockstep("run", "--workers", 1, *words, env=one_thread())
    assert done.returncode == 0 and "trained" in done.stdout
    assert "--profile steps=2: no Session has trained these steps" in done.stderr


@pytest.mark.long
def test_profile_of_a_function(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    words = ["--workers", 1, "--out", tmp_path / "run", "--profile", "steps=4"]
    done = run_lockstep("train", *words, f"{tmp_path / 'loop.py'}:train", env=one_thread())
    assert done.returncode == 0, done.stderr
    assert names_in_trace(tmp_path, 0).count("aten::linear") == 3 * 4


def test_steps_of_a_profile_that_cannot_be_read_are_refused_before_training(tmp_path: Path) -> None:
    done = run(tmp_path, "", "--profile", "10..12", workers=1)
    assert done.returncode == 2 and "--profile 10..12" in done.stderr
    assert not metrics(tmp_path)


SCORED = """
import sys, torch, lockstep

out = sys.argv[-1]
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.zeros(8, 1))
best, stopping = lockstep.Best(mode="max"), lockstep.EarlyStopping(patience=2, mode="max")
with lockstep.Session(out, micro_batches=2) as session:
    model, optimizer = session.prepare(model, optimizer)
    session.state(best=best, stopping=stopping)
    loader = session.loader(data, batch_size=8)
    for step in session.steps(20):
        for x, y in loader(step):
            session.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        score = min(step, 3) / 4
        best.update(step, score)
        stopping.update(score)
        session.log(step, accuracy=0.9, lr=0.1, val_accuracy=score, val_loss=1.0 - score)
        session.print("sample of step", step, "<b>")
"""


def test_report_and_watch_of_a_loop_with_scores_and_samples(tmp_path: Path) -> None:
    script, out = tmp_path / "scored.py", tmp_path / "run"
    script.write_text(SCORED)
    done = run_lockstep("run", "--workers", 2, script, "--out", out, env=one_thread())
    assert done.returncode == 0, done.stderr
    page = (out / "report.html").read_text()
    assert '<dt>best</dt><dd class="a">0.75 (step 4)</dd>' in page
    assert "stopped early" in page and "no score better than 0.75 in 2" in page
    assert "step 6  sample of step 5 &lt;b&gt;" in page
    charts = [re.findall('"name":"([^"]+)"', chart) for chart in re.findall("{.*?}</script", page)]
    assert charts.count(["training", "validation"]) == 2, "loss and accuracy"
    watched = run_lockstep("watch", out).stdout
    assert "best score: 0.75, step 4" in watched and "stopped early" in watched
    assert "val_accuracy" in watched and "samples/s" in watched
