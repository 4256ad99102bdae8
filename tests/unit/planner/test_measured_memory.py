"""Estimated memory against the peaks that bench/plan measured: never below, and at most 6% above."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.plan.run import LAYOUTS, MODELS
from lockstep.config.resolve import parse_flags, resolve
from lockstep.config.schema import RunConfig
from lockstep.layout import Layout
from lockstep.models.translator import translator_on_meta
from lockstep.planner.count_model import run_cost
from lockstep.planner.memory_cost import memory_cost
from lockstep.planner.model_cost import ModelCost
from lockstep.tasks.layout_limits import llama_config

KEPT = sorted((Path(__file__).parents[3] / "bench" / "plan").glob("2026-*/raw.jsonl"))
ROWS = [json.loads(line) for file in KEPT for line in file.read_text().splitlines()]


def model_of(name: str, run: RunConfig) -> ModelCost:
    """Return the model of the benchmark, over the largest micro-batch of its data."""
    vocabulary = run.tokenizer.vocab_size
    if name == "translator":
        build = partial(translator_on_meta, run.model, vocabulary, "cpu", 7)
        return run_cost(run, build, [(73, 7), (73, 7)])
    config = replace(llama_config(run), vocab_size=vocabulary)
    return run_cost(run, config.meta_model, [(2, run.batch.seq_len)])


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['model']}, {row['layout']}, {row['link']}"
)
def test_an_estimate_is_an_upper_bound(row: dict[str, Any]) -> None:
    run = resolve(
        flags=parse_flags([*MODELS[row["model"]].split(), *LAYOUTS[row["layout"]].split()])
    ).run
    axes = run.layout
    layout = Layout(
        2 // (axes.shard * axes.tensor * axes.pipeline), axes.shard, axes.tensor, axes.pipeline
    )
    ratio = memory_cost(model_of(row["model"], run), run, layout, "cpu").total / row["bytes"]
    grows = row["model"] == "translator" and axes.tensor > 1  # from 12 to 40 steps by a tenth
    assert 1.0 <= ratio <= (1.13 if grows else 1.06)
