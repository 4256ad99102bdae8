"""Warnings of another layout at a resume."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from torch import nn

from lockstep.config.schema import LayoutOptions, ModelOptions, RunConfig
from lockstep.recipes.run import warn_of_other_layout

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
