"""What a recipe prepares: warnings of another layout, shares of steps."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from torch import nn

from lockstep.config.schema import LayoutOptions, ModelOptions, RunConfig
from lockstep.training.setup import metrics_of_steps, warn_of_other_layout

TRANSLATOR, LLAMA = nn.Module(), nn.Module()
LLAMA.output = nn.Linear(2, 2)  # a translator and a tied Llama have none


@pytest.mark.parametrize(
    ("task", "dropout", "model", "warned"),
    [
        ("translate", 0.1, TRANSLATOR, ["tensor", "pipeline", "pipeline_chunks"]),
        ("translate", 0.0, TRANSLATOR, ["tensor", "pipeline"]),
        ("pretrain", 0.1, TRANSLATOR, ["tensor", "pipeline"]),
        ("pretrain", 0.1, LLAMA, ["tensor"]),
    ],
)
def test_only_a_layout_with_other_bits_is_a_warning(
    task: str, dropout: float, model: nn.Module, warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    layout = LayoutOptions(shard=2, tensor=2, pipeline=2, pipeline_chunks=2)
    run = replace(RunConfig(), task=task, model=ModelOptions(dropout=dropout), layout=layout)
    saved = {"shard": 1, "tensor": 1, "pipeline": 1, "pipeline_chunks": 1}
    with caplog.at_level(logging.WARNING):
        warn_of_other_layout({"run": {"values": {"layout": saved}}}, run, model)
        warn_of_other_layout({}, run, model)
    assert [message.split()[0] for message in caplog.messages] == [
        f"layout.{axis}" for axis in warned
    ]


def test_steps_that_are_committed_together_share_tokens_and_seconds() -> None:
    values = {
        "loss": 2.0,
        "tokens": 30,
        "seconds": 6.0,
        "data_seconds": 3.0,
        "tokens_per_second": 5.0,
        "validation_loss": 1.5,
    }
    assert list(metrics_of_steps(range(7, 8), values)) == [(7, values)]
    shares = {
        "loss": 2.0,
        "tokens": 10.0,
        "seconds": 2.0,
        "data_seconds": 1.0,
        "tokens_per_second": 5.0,
    }
    assert list(metrics_of_steps(range(4, 7), values)) == [
        (4, shares),
        (5, shares),
        (6, shares | {"validation_loss": 1.5}),
    ]
