"""Session(on_divergence="rollback"): planted bad samples are found, named and skipped, with the same
bits on any number of workers, killed, healed, stopped and resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.fork_loop import LoopResult, run_loop
from support.launching import one_thread, run_lockstep
from support.loops.rollback import BATCH_SIZE, MICRO_BATCHES, STEPS, Points, make_model
from torch.nn.functional import mse_loss
from torch.utils.data import default_collate

from lockstep.checkpoint.commands import digest_line, export, verify
from lockstep.checkpoint.fingerprints import newest_facts
from lockstep.checkpoint.folder import committed_steps
from lockstep.data.order import UniformOrder
from lockstep.record.events import read_events
from lockstep.record.metrics import iter_steps
from lockstep.training.witness import WitnessFile

LOOP = Path(__file__).parents[1] / "support" / "loops" / "rollback.py"
ORDER = UniformOrder(STEPS * BATCH_SIZE, BATCH_SIZE, MICRO_BATCHES)
# By (step from 0, micro-batch). The rehearsal takes the first one; step 2 has two.
NAN = [(0, 0), (2, 1), (2, 4), (9, 5)]
HIGH = [(20, 3)]
PLANTED = [*NAN, *HIGH]
BAD_STEP = [(7, k) for k in range(MICRO_BATCHES)]


def sample_of(step: int, k: int) -> int:
    return int(ORDER.ids(step, k)[1])


def samples(places: list[tuple[int, int]]) -> str:
    return ",".join(str(sample_of(step, k)) for step, k in places)


BAD = {"nan": samples(NAN), "high": samples(HIGH)}
SKIP = ",".join(f"{step + 1}:{k}" for step, k in PLANTED)


def train(folder: Path, workers: int, **flags: Any) -> str:
    result = run_loop(LOOP, folder, workers, **({**BAD, **flags}))
    assert result == LoopResult(0, ""), result.text
    return digest_line(folder)


def rolled_back(folder: Path, event: str = "rolled back") -> list[dict[str, Any]]:
    """Return the micro-batches of these events, each with its step from 0."""
    events = [found for found in read_events(folder) if found["event"] == event]
    return [{"step": e["step"] - 1, **row} for e in events for row in e["micro_batches"]]


def numbers(folder: Path) -> list[tuple[float, ...]]:
    names = ("step", "loss", "norm", "mean")
    return [tuple(line[name] for name in names) for line in iter_steps(folder / "metrics.jsonl")]


def rollback_facts(folder: Path) -> Any:
    _, facts = newest_facts(folder / "checkpoints") or (0, {})
    return facts["rollback"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(folder, 1)
    return folder


def test_the_planted_samples_are_found_and_named(alone: Path) -> None:
    rows = rolled_back(alone)
    assert [(row["step"], row["k"]) for row in rows] == PLANTED
    for row in rows:
        assert row["samples"] == sorted(ORDER.ids(row["step"], row["k"]).tolist())
        assert sample_of(row["step"], row["k"]) in row["samples"]
    assert [row["gradient_finite"] for row in rows] == [False] * len(NAN) + [True]
    assert rows[-1]["loss"] == pytest.approx(1e8 / 4, rel=0.01), "the mean of the micro-batch"
    trained = [line["samples"] for line in iter_steps(alone / "metrics.jsonl")]
    assert trained == [24 - 4 * sum(step == bad for bad, _ in PLANTED) for step in range(STEPS)]


def test_the_weights_are_those_of_a_plain_loop_over_the_others(alone: Path) -> None:
    model, optimizer = make_model()
    data = Points(set(), set())
    losses = []
    for step in range(STEPS):
        left = [k for k in range(MICRO_BATCHES) if (step, k) not in PLANTED]
        optimizer.zero_grad()
        loss = 0.0
        for k in left:
            x, y = default_collate([data[i] for i in ORDER.ids(step, k).tolist()])
            share = mse_loss(model(x), y) / len(left)
            share.backward()
            loss += share.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
        losses.append(loss)
    assert [loss for _, loss, *_ in numbers(alone)] == pytest.approx(losses, rel=1e-4)
    export(alone, None, alone / "weights.safetensors")
    saved = load_file(alone / "weights.safetensors")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("workers", "flags"),
    [
        (2, {}),
        (3, {}),
        (2, {"shard": 2}),
        pytest.param(4, {"shard": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_other_workers_find_the_same_and_have_the_same_bits(
    alone: Path, tmp_path: Path, workers: int, flags: dict[str, int]
) -> None:
    assert train(tmp_path, workers, **flags) == digest_line(alone)
    assert numbers(tmp_path) == numbers(alone)
    assert rollback_facts(tmp_path) == rollback_facts(alone)
    assert str(rolled_back(tmp_path)) == str(rolled_back(alone))


@pytest.mark.parametrize(("workers", "flags"), [(2, {"rehearse": False}), (2, {"shard": 2})])
def test_given_from_the_start_on_healthy_data_they_give_the_same_bits(
    alone: Path, tmp_path: Path, workers: int, flags: dict[str, Any]
) -> None:
    assert train(tmp_path, workers, nan="", high="", skip=SKIP, **flags) == digest_line(alone)
    assert numbers(tmp_path) == numbers(alone)
    assert rolled_back(tmp_path) == []


def test_sums_with_counts_have_the_same_means(alone: Path, tmp_path: Path) -> None:
    digest = train(tmp_path / "1", 1, form="count")
    assert train(tmp_path / "2", 2, shard=2, form="count") == digest
    for ours, means in zip(numbers(tmp_path / "1"), numbers(alone), strict=True):
        assert ours == pytest.approx(means, rel=1e-4)
    rows = rolled_back(tmp_path / "1")
    assert [(row["step"], row["k"]) for row in rows] == PLANTED
    assert rows[-1]["loss"] == pytest.approx(rolled_back(alone)[-1]["loss"])
    tokens = [line["tokens"] for line in iter_steps(tmp_path / "2" / "metrics.jsonl")]
    assert tokens == [line["samples"] for line in iter_steps(alone / "metrics.jsonl")]


def test_without_a_loader_the_micro_batches_are_named(alone: Path, tmp_path: Path) -> None:
    assert train(tmp_path, 2, form="without loader") == digest_line(alone)
    rows = rolled_back(tmp_path)
    assert [(row["step"], row["k"]) for row in rows] == PLANTED
    assert all("samples" not in row for row in rows)


def test_killed_and_stopped_and_resumed_with_other_workers(alone: Path, tmp_path: Path) -> None:
    """The spike after the last resume is one by the losses of the checkpoint."""
    assert run_loop(LOOP, tmp_path, 2, kill_in=11, **BAD).code, "it was killed"
    assert run_loop(LOOP, tmp_path, 3, override=["stop_in=18"], **BAD).code == 75
    assert committed_steps(tmp_path / "checkpoints")[-1] == 19
    assert train(tmp_path, 2, shard=2, override=["stop_in=-1"]) == digest_line(alone)
    assert numbers(tmp_path) == numbers(alone)
    assert rollback_facts(tmp_path) == rollback_facts(alone)


def test_a_stop_before_a_step_without_its_first_micro_batch_compares_the_next_one(
    tmp_path: Path,
) -> None:
    flags = {"nan": "", "high": "", "skip": "20:0", "steps": 20}
    assert run_loop(LOOP, tmp_path, 2, stop_in=18, **flags).code == 75
    assert WitnessFile(tmp_path).read()[19].number == 1
    train(tmp_path, 1, override=["stop_in=-1"], **flags)


def test_workers_that_die_in_the_measurement_and_in_the_retry_are_replaced(
    alone: Path, tmp_path: Path
) -> None:
    flags = {**BAD, "kill": "1:2:2,2:20:3", "num_workers": "1"}
    words = [f"--{name}={text}" for name, text in flags.items()]
    command = ("launch", "--workers", "3", "--out", tmp_path, f"{LOOP}:train", *words)
    result = run_lockstep(*command, env=one_thread())
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.glob("killed *")} == {"killed 1:2:2", "killed 2:20:3"}
    assert digest_line(tmp_path) == digest_line(alone)
    assert numbers(tmp_path) == numbers(alone)
    assert rollback_facts(tmp_path) == rollback_facts(alone)
    names = ", ".join(str(i) for i in sorted(ORDER.ids(20, 3).tolist()))
    retried = f"step 21 was retried without micro-batch 3 (loss 2.499e+07; samples {names})"
    assert retried in result.stderr


@pytest.mark.parametrize(
    ("flags", "what", "newest", "guilty"),
    [
        (
            {"nan": samples(BAD_STEP)},
            "none of the 6 micro-batches of step 8 is finite",
            4,
            BAD_STEP,
        ),
        ({"max_skipped": 3}, "with 3 skipped before, that is more than 3", 8, [(9, 5)]),
    ],
)
def test_too_many_bad_micro_batches_end_the_run_with_whole_checkpoints(
    tmp_path: Path, flags: dict[str, Any], what: str, newest: int, guilty: list[tuple[int, int]]
) -> None:
    result = run_loop(LOOP, tmp_path, 2, **({**BAD, **flags}))
    assert result.code == 4 and what in result.text, result.text
    assert committed_steps(tmp_path / "checkpoints")[-1] == newest
    assert verify(tmp_path)[0]
    rows = rolled_back(tmp_path, "diverged")
    assert [(row["step"], row["k"]) for row in rows] == guilty
    assert all(sample_of(row["step"], row["k"]) in row["samples"] for row in rows)
    assert all(math.isnan(float(row["loss"])) for row in rows)


def test_stop_is_the_default_and_a_resume_may_roll_back_but_not_skip_others(
    tmp_path: Path,
) -> None:
    flags = {"nan": samples(NAN[-1:]), "high": ""}
    result = run_loop(LOOP, tmp_path, 1, rollback=False, **flags)
    assert result.code == 4 and "on_divergence='rollback' skips" in result.text
    result = run_loop(LOOP, tmp_path, 1, skip="24:1", **flags)
    assert result.code == 3 and "skip was none, is 24:1" in result.text, result.text
    train(tmp_path, 1, override=["rollback=True"], **flags)
    assert [(row["step"], row["k"]) for row in rolled_back(tmp_path)] == NAN[-1:]


PIPELINE = """
import torch, lockstep

def train(out: str):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    with lockstep.Session(out, micro_batches=2, pipeline=2, on_divergence="rollback") as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(data, batch_size=8)
        for step in session.steps(1):
            raise AssertionError("it has started")
"""


def test_a_pipeline_and_a_grad_scaler_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    result = run_loop(tmp_path / "pipeline.py", tmp_path / "run", 2)
    assert result.code == 2, result.text
    assert "on_divergence='rollback' is not supported with a pipeline" in result.text
    result = run_loop(LOOP, tmp_path / "scaler", 1, scaler=True)
    assert result.code == 2, result.text
    assert "on_divergence='rollback' is not supported with a GradScaler" in result.text
