"""Validation in the training loop: the loss of `lockstep evaluate`, one decision on all workers, the best checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from lockstep.checkpoint.commands import best_step, digest_line
from lockstep.checkpoint.folder import committed_steps
from lockstep.checkpoint.store import CheckpointStore
from lockstep.cli.main import main
from lockstep.config.resolve import resolve
from lockstep.config.saved_run import open_run
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError, ConfigError
from lockstep.recipes.script import lock_run_folder, train
from lockstep.record.events import read_events
from lockstep.record.metrics import read_metrics
from lockstep.tasks.evaluate import evaluate

VALUES = {
    "task": "pretrain",
    "data.kind": "text",
    "data.held_out_share": "0.0",
    "tokenizer.vocab_size": "300",
    "llama.size": "1M",
    "batch.micro_batches": "2",
    "batch.tokens": "64",
    "batch.seq_len": "32",
    "compute.precision": "fp32",
    "optim.warmup_steps": "0",
    "optim.schedule": "constant",
    "optim.learning_rate": "1e-2",
    "checkpoint.every_steps": "0",
    "checkpoint.keep": "1",
    "evaluate.at_end": "0",
    "evaluate.every_steps": "2",
    "evaluate.patience": "3",
}
SHARDS = {"layout.shard": "2"}
NAMES = ("step", "loss", "norm", "validation_loss", "validation_perplexity")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A text to learn by heart, and another one of the same words for validation."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(1)
    words = ["the", "cat", "dog", "saw", "Häuser", "42", "ran", "over"]
    for name, count in (("train", 40), ("validation", 30)):
        (folder / f"{name}.txt").write_text(" ".join(draw.choices(words, k=count)) + "\n")
    return {f"data.{name}": str(folder / f"{name}.txt") for name in ("train", "validation")}


def trained(
    runtime: ElasticRuntime, folder: str, flags: dict[str, str], steps: int
) -> tuple[str, list[Any]]:
    """Train in `folder` up to `steps`; return the digest of the state and the metrics."""
    torch.set_num_threads(1)
    path = Path(folder)
    resolved = open_run(path, None, {**flags, "steps": str(steps)}, {})
    if runtime.world.leader:
        with lock_run_folder(path, resolved):
            pass
    assert train(resolved, path, runtime) == ""
    lines = (
        [tuple(line.get(name) for name in NAMES) for line in read_metrics(path / "metrics.jsonl")]
        if runtime.world.leader
        else []
    )
    return (digest_line(path) if runtime.world.leader else ""), lines


def weights(folder: Path) -> dict[str, bytes]:
    """Return the newest state of a run without the scores of its validation."""
    tensors = CheckpointStore(folder / "checkpoints").load(4).tensors
    return {
        name: tensor.numpy().tobytes()
        for name, tensor in tensors.items()
        if not name.startswith("state.")
    }


def scored(runtime: ElasticRuntime, folder: str, step: int) -> str:
    return evaluate(Path(folder), runtime, step=step)


@pytest.fixture(scope="module")
def alone(texts: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The run of one worker: its folder, digest and metrics."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    [result] = run_ranks(trained, 1, str(folder), VALUES | texts, 40)
    return folder, result


def test_a_run_stops_early_and_keeps_its_best_checkpoint(
    alone: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (digest, lines) = alone
    losses = {step: loss for step, _, _, loss, _ in lines if loss is not None}
    best = min(losses, key=lambda step: losses[step])
    last = best + 3 * 2  # three evaluations later
    assert (
        sorted(losses) == list(range(2, last + 1, 2))
        and lines[-1][0] == last < 40
        and digest.startswith(f"step {last} ")
    )
    assert all(
        perplexity == pytest.approx(torch.tensor(loss).exp().item())
        for _, _, _, loss, perplexity in lines
        if loss is not None
    )
    assert committed_steps(folder / "checkpoints") == [best, last] and best_step(folder) == best, (
        "checkpoint.keep is 1"
    )
    [event] = [event for event in read_events(folder) if event["event"] == "stopped early"]
    assert event["step"] == last
    assert event["why"] == f"no validation loss better than {losses[best]} in 3"
    run_ranks(scored, 1, str(folder), best)
    [record] = read_metrics(folder / "evaluations.jsonl")
    assert (
        record["loss"] == pytest.approx(losses[best], rel=1e-6) and record["split"] == "validation"
    )
    assert main(
        ["checkpoint", "digest", str(folder), "best"]
    ) == 0 and capsys.readouterr().out.startswith(f"step {best} ")
    assert (
        main(["checkpoint", "export", str(folder), "best", "--out", str(folder.parent / "hub")])
        == 0
    )
    assert f"step {best}: " in capsys.readouterr().out
    assert main(["generate", str(folder), "the", "--step", "best", "--tokens", "2"]) == 0


@pytest.mark.parametrize(("workers", "flags"), [(2, {}), (2, SHARDS)], ids=["replicas", "shards"])
def test_workers_and_shards_stop_at_the_same_step(
    workers: int,
    flags: dict[str, str],
    alone: tuple[Path, Any],
    texts: dict[str, str],
    tmp_path: Path,
) -> None:
    assert (
        run_ranks(trained, workers, str(tmp_path / "run"), VALUES | texts | flags, 40)[0]
        == alone[1]
    )
    assert best_step(tmp_path / "run") == best_step(alone[0])


def test_a_resumed_run_stops_where_an_uninterrupted_one_does(
    alone: tuple[Path, Any], texts: dict[str, str], tmp_path: Path
) -> None:
    folder, last = tmp_path / "run", alone[1][1][-1][0]
    run_ranks(trained, 1, str(folder), VALUES | texts, last - 3)
    assert committed_steps(folder / "checkpoints")[-1] == last - 3
    assert run_ranks(trained, 2, str(folder), VALUES | texts, 40)[0] == alone[1]
    assert run_ranks(trained, 1, str(folder), VALUES | texts, 40)[0] == alone[1], (
        "a run that has stopped early stays so"
    )
    assert (
        run_ranks(trained, 1, str(folder), VALUES | texts | {"evaluate.patience": "5"}, 40)[0][1][
            -1
        ][0]
        > last
    )


def test_averaged_weights_are_validated(texts: dict[str, str], tmp_path: Path) -> None:
    flags = {"optim.ema_decay": "0.9", "evaluate.patience": "0"}
    [(_, lines)] = run_ranks(trained, 1, str(tmp_path / "run"), VALUES | texts | flags, 4)
    run_ranks(scored, 1, str(tmp_path / "run"), 4)
    assert read_metrics(tmp_path / "run/evaluations.jsonl")[0]["loss"] == pytest.approx(
        lines[-1][3], rel=1e-6
    )
    [(_, plain)] = run_ranks(
        trained,
        1,
        str(tmp_path / "other"),
        VALUES | texts | flags | {"evaluate.every_steps": "0"},
        4,
    )
    assert weights(tmp_path / "other") == weights(tmp_path / "run")
    assert [line[:3] for line in plain] == [line[:3] for line in lines], (
        "validation changes no bit of the training"
    )


def test_a_run_without_a_validation_split_is_refused(texts: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match="UsageError: the run has no validation split to evaluate"
    ):
        run_ranks(
            trained, 1, str(tmp_path / "run"), VALUES | {"data.train": texts["data.train"]}, 4
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"evaluate.every_steps": "5"}, "does not support task=translate"),
        (
            {**VALUES, "data.train": "a.txt", "layout.pipeline": "2"},
            "does not support layout.pipeline=2",
        ),
        ({"evaluate.patience": "5"}, "needs evaluate.every_steps, which is 0"),
    ],
)
def test_validation_that_a_run_cannot_do_is_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(None, flags)


def test_a_run_without_evaluations_has_no_best_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no best checkpoint is known"):
        best_step(tmp_path)
    (tmp_path / "best.json").write_text('{"by": "loss", "step": 7}')
    assert best_step(tmp_path) == 7
