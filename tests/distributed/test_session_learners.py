"""session.learners: one sha256 on any number of workers and shards, through kills and stops; equal
to a plain loop; and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fork_loop import LoopResult, run_loop
from support.launching import ROOT, run_lockstep
from torch import Tensor
from torch.nn.functional import mse_loss

from lockstep.checkpoint.commands import best_step, digest_line
from lockstep.checkpoint.folder import committed_steps
from lockstep.checkpoint.store import CheckpointStore
from lockstep.data.order import UniformOrder
from lockstep.record import events
from lockstep.record.metrics import iter_steps

LOOP = ROOT / "tests" / "support" / "loops" / "learners.py"
sys.path.insert(0, str(LOOP.parent))
from learners import make_data, make_model  # noqa: E402

H, STEPS = 3, 12


def train(folder: Path, workers: int, **flags: Any) -> None:
    result = run_loop(LOOP, folder, workers, **flags)
    assert result == LoopResult(0, ""), result.text


def lines_of(folder: Path) -> list[tuple[float, ...]]:
    """Return the numbers of each step that do not depend on time."""
    names = ("step", "loss", "samples", "norm", "error", "updates")
    return [
        tuple(line.get(name, -1) for name in names) for line in iter_steps(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(folder, 1)
    return folder


def test_each_inner_step_has_a_line_with_equal_shares(alone: Path) -> None:
    lines = list(iter_steps(alone / "metrics.jsonl"))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["samples"] == 24 for line in lines)
    for first in range(0, STEPS, H):
        together = lines[first : first + H]
        assert len({(line["loss"], line["seconds"]) for line in together}) == 1
        assert ["error" in line for line in together] == [False] * (H - 1) + [True]
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert lines[-1]["updates"] == STEPS, "each learner's steps count once"


def test_the_schedule_of_the_inner_rate_is_that_of_one_learner(alone: Path) -> None:
    rates = [float(line.split()[1]) for line in (alone / "rate-0").read_text().splitlines()]
    expected = [3e-2 * (1 - 0.7 * step / 12) for step in range(H, STEPS + 1, H)]
    assert rates == pytest.approx(expected)


def test_the_best_step_is_an_outer_step_with_a_checkpoint(alone: Path) -> None:
    scores = [line["error"] for line in iter_steps(alone / "metrics.jsonl") if "error" in line]
    best = best_step(alone)
    assert best == H * (scores.index(min(scores)) + 1)
    assert best in committed_steps(alone / "checkpoints")


@pytest.mark.parametrize(
    ("workers", "flags"),
    [
        (2, {}),
        (3, {}),
        (2, {"shard": 2}),
        pytest.param(4, {"shard": 2}, marks=pytest.mark.long),
    ],
)
def test_same_bits_on_other_workers(
    alone: Path, tmp_path: Path, workers: int, flags: dict[str, Any]
) -> None:
    train(tmp_path, workers, **flags)
    assert digest_line(tmp_path) == digest_line(alone)
    assert lines_of(tmp_path) == lines_of(alone)


@pytest.mark.parametrize(
    "flags", [{"own_data": True}, {"wire": "int8", "precision": "bf16"}], ids=["counts", "int8"]
)
def test_same_bits_with_counts_and_with_rounded_differences(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    for workers, shard in ((1, 1), (2, 2), (3, 1)):
        train(tmp_path / f"{workers}", workers, shard=shard, **flags)
    assert len({digest_line(tmp_path / f"{workers}") for workers in (1, 2, 3)}) == 1


@pytest.mark.parametrize("then", [{"workers": 3}, {"workers": 2, "shard": 2}])
def test_killed_within_an_outer_step_and_resumed(
    alone: Path, tmp_path: Path, then: dict[str, Any]
) -> None:
    assert run_loop(LOOP, tmp_path, 2, kill_in=16).code, "it was killed"
    assert committed_steps(tmp_path / "checkpoints")[-1] in range(H, STEPS, H)
    train(tmp_path, **then)
    assert digest_line(tmp_path) == digest_line(alone)
    assert lines_of(tmp_path) == lines_of(alone)


@pytest.mark.parametrize(("workers", "shard"), [(3, 1), pytest.param(4, 2, marks=pytest.mark.long)])
def test_killed_healed_stopped_and_resumed(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, shard: int
) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "disturb").write_text(json.dumps({"kill": 4, "stop": 7}))
    stopped = run_lockstep(
        *("run", "--out", folder, "--workers", workers, "--layout.shard", shard, LOOP),
        *("--num_workers", 1),
    )
    assert stopped.returncode == 75, stopped.stderr
    assert committed_steps(folder / "checkpoints")[-1] == 9, "the outer step with the signal"
    assert (folder / "killed").exists()
    regrouped = [e for e in events.read_events(folder) if e["event"] == "regrouped"]
    assert regrouped and any(event.get("joined") for event in regrouped)
    train(folder, 2)
    assert digest_line(folder) == digest_line(alone)
    assert lines_of(folder) == lines_of(alone)


def reference(steps: int, count: int, micro_batches: int) -> dict[str, Tensor]:
    """Train as Douillard et al., 2023, write it, with the start of AdamW's moments in
    docs/slow-links.md. Without dropout."""
    model, data = make_model(dropout=0.0), make_data()
    parameters = list(model.parameters())
    order = UniformOrder(len(data), batch_size=24, micro_batches=micro_batches, seed=0)
    outer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
    growth = sum(1 - 0.9 ** (t + 1) for t in range(H)) / H
    each = micro_batches // count
    for step in range(0, steps, H):
        start, changes = [p.detach().clone() for p in parameters], []
        for m in range(count):
            inner = torch.optim.AdamW(parameters, 3e-2)
            for s in range(step, step + H):
                inner.zero_grad()
                for k in range(m * each, (m + 1) * each):
                    x, y = data[order.ids(s, k).tolist()]
                    (mse_loss(model(x), y) / each).backward()
                gradients = [p.grad for p in parameters if p.grad is not None]
                if s == step > 0:
                    squares = [g.double().square().sum() for g in gradients]
                    least = (sum(squares) / sum(g.numel() for g in gradients)).float()
                    for p, g in zip(parameters, gradients, strict=True):
                        rows = g.reshape(len(g), -1).square().mean(1).clamp(min=float(least))
                        square = rows.reshape(-1, *[1] * (g.dim() - 1)).expand_as(g).clone()
                        inner.state[p] = {
                            "step": torch.tensor(1e6),
                            "exp_avg": torch.zeros_like(p),
                            "exp_avg_sq": square,
                        }
                for group in inner.param_groups:
                    group["lr"] = 3e-2 * (1 - 0.7 * s / 12) / (growth if step else 1)
                inner.step()
            changes.append([a - p.detach() for a, p in zip(start, parameters, strict=True)])
            for p, a in zip(parameters, start, strict=True):
                p.data.copy_(a)
        for number, p in enumerate(parameters):
            p.grad = sum(change[number] for change in changes) / count
        outer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_equal_to_a_plain_loop(tmp_path: Path, micro_batches: int) -> None:
    train(tmp_path, 2, count=2, micro_batches=micro_batches, clip=0, dropout=0)
    checkpoint = CheckpointStore(tmp_path / "checkpoints").load(STEPS)
    for name, expected in reference(STEPS, 2, micro_batches).items():
        torch.testing.assert_close(
            checkpoint.tensors[f"model.{name}"], expected.detach(), rtol=1e-4, atol=1e-5
        )


def test_a_loss_that_is_not_finite_names_learner_and_step(tmp_path: Path) -> None:
    result = run_loop(LOOP, tmp_path, 2, rate=1e30, clip=0)
    assert result.code == 4 and "loss not finite: learner 0 at step 2, learner 1" in result.text
    assert not list((tmp_path / "checkpoints").glob("step-*"))


REFUSED = {
    "second update": "a second update of AdamW in step 1 of learner",
    "no update": "AdamW made no update in step 1 of learner",
    "late update": "an update of AdamW, an inner optimizer, outside of a learner's step",
    "outer update": "SGD.step(), the outer optimizer's, in step 1 of learner",
    "second loop": "a second micro-batch loop in step 1 of learner",
    "loader(step)": "the micro-batches of step=0",
    "break": "the micro-batch loop of step 1 of learner 0 ended early",
    "average": "session state average changed in the steps of learner",
    "value of a learner": "session state updates differs between the learners",
    "log": "session.log in step 1 of learner",
    "evaluate": "session.evaluate(function, dataset) in step 1 of learner",
    "backward": "session.backward outside of the micro-batches of a learner",
    "buffer": "1.calls",
    "batch norm": "BatchNorm is not supported with session.learners: 1",
    "scheduler left out": "LinearLR sets the learning rate of an inner optimizer",
    "a parameter left out": "no inner optimizer updates 0.weight",
    "scaler": "a GradScaler is not supported with session.learners: scaler",
    "hidden state": "session.per_micro_batch is not supported with session.learners",
    "outer as inner": "an optimizer is both inner and outer",
}


@pytest.mark.parametrize("habit", REFUSED)
def test_what_a_learner_cannot_follow_is_refused_by_name(habit: str, tmp_path: Path) -> None:
    workers = 2 if habit in ("value of a learner", "evaluate", "break") else 1
    result = run_loop(LOOP, tmp_path, workers, habit=habit, timeout_s=60)
    assert result.code == 2 and REFUSED[habit] in result.text, result.text
    lines = tmp_path / "metrics.jsonl"
    assert not lines.exists() or not list(iter_steps(lines)), "before the first outer step"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"steps": 10}, "10 steps are not a multiple of the 3 steps of a learner"),
        ({"count": 4}, "micro_batches=6 is not a multiple of 4 learners"),
        ({"save_every": 4}, "save_every=4 is not a multiple of 3 steps"),
        ({"count": 1, "workers": 2}, "2 workers train 1 learners"),
        ({"count": 6, "shard": 2, "workers": 2}, "2 shards share 1 micro-batches of a learner"),
        ({"habit": "muon", "shard": 2, "workers": 2}, "Muon needs whole tensors"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    flags: dict[str, Any], message: str, tmp_path: Path
) -> None:
    result = run_loop(LOOP, tmp_path, **({"workers": 1} | flags))
    assert result.code == 2 and message in result.text, result.text


def test_a_resume_with_other_learners_is_refused(alone: Path, tmp_path: Path) -> None:
    train(tmp_path, 1, steps=H)
    result = run_loop(LOOP, tmp_path, 1, inner_steps=6, save_every=6)
    assert result.code and "3 of 3 steps" in result.text and "3 of 6 steps" in result.text
