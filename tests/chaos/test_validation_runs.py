"""Early stopping through kills: a worker dies while it evaluates, its replacement alone knows the history."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.fault_matrix import StartTraining
from support.hosts import flags
from support.launching import run_lockstep

from lockstep.checkpoint.commands import best_step, digest_line
from lockstep.record.metrics import read_metrics

VALUES: dict[str, object] = {
    "task": "pretrain",
    **{
        "model.dim": 128,
        "model.encoder_layers": 3,
        "model.decoder_layers": 3,
        "model.ffn_dim": 512,
    },  # the defaults again
    **{
        "data.kind": "text",
        "data.pairs": 120_000,
        "data.held_out": 1000,
        "data.held_out_share": 0.0,
        "tokenizer.vocab_size": 300,
    },
    **{
        "llama.size": "1M",
        "batch.micro_batches": 4,
        "batch.tokens": 128,
        "batch.seq_len": 32,
        "optim.learning_rate": 5e-4,
    },
    **{
        "optim.warmup_steps": 0,
        "optim.schedule": "constant",
        "evaluate.every_steps": 4,
        "evaluate.patience": 10,
    },
}
STEPS = 120


def results(folder: Path) -> tuple[str, int, list[Any]]:
    lines = [
        (line["step"], line["loss"], line.get("validation_loss"))
        for line in read_metrics(folder / "metrics.jsonl")
    ]
    return digest_line(folder), best_step(folder), lines


@pytest.mark.long  # test_validation.py has the decisions
def test_a_healed_run_stops_early_at_the_step_of_an_undisturbed_one(
    start_training: StartTraining, tmp_path: Path
) -> None:
    draw = random.Random(1)
    for name, count in (("train", 40), ("validation", 30)):
        (tmp_path / f"{name}.txt").write_text(
            " ".join(draw.choices(["the", "cat", "dog", "Häuser", "42", "ran", "over"], k=count))
            + "\n"
        )
    values = VALUES | {f"data.{name}": tmp_path / f"{name}.txt" for name in ("train", "validation")}
    alone = tmp_path / "alone"
    assert (
        run_lockstep("train", "--out", alone, "--workers", 1, *flags(STEPS, **values)).returncode
        == 0
    )
    training = start_training(workers=2, steps=STEPS, words=("--min", "1"), values=values)
    training.wait_for_step(1)
    before = training.newest
    training.inject_fault(1, "kill", at="evaluating", step=10)
    training.wait_until_whole(before)
    joined = training.newest
    assert any(event["joined"] for event in training.events("regrouped")), training.report()
    training.kill(training.member(0))
    training.wait_until_whole(joined)
    assert training.end() == {"here": 0}, training.report()
    assert results(training.run) == results(alone) and results(alone)[2][-1][0] < STEPS
    [stopped] = training.events("stopped early")
    assert stopped["worse"] == stopped["patience"] == 10 and stopped["best_step"] == best_step(
        alone
    )
