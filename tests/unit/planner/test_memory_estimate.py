"""Estimates of a worker's state, and the layout that an out-of-memory error proposes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.schema import MemoryOptions, OptimOptions
from lockstep.errors import OutOfMemoryError
from lockstep.layout import Layout, LayoutLimits
from lockstep.models.llama_config import LLAMA_CONFIGS
from lockstep.planner import memory_estimate
from lockstep.planner.memory_estimate import (
    StateSize,
    explain_out_of_memory,
    smallest_fitting_layout,
)
from lockstep.units import format_bytes, parse_bytes

LIMITS = LayoutLimits(micro_batches=8, tensor=(4, 2, 384), stages=4)
CPU = torch.device("cpu")


def size_of(kind: str = "adamw", **memory: Any) -> StateSize:
    optim: Any = replace(OptimOptions(), kind=kind)
    model = LLAMA_CONFIGS["1M"].meta_model()
    return StateSize.of(model, optim, MemoryOptions(**memory), CPU)


def adamw(parameters: int, unit: int) -> StateSize:
    return StateSize(parameters, unit, 4 * parameters, 4 * parameters, 8 * parameters)


@pytest.fixture
def size() -> StateSize:
    return size_of()


def hint_after_running_out(
    size: StateSize, layout: Layout, monkeypatch: pytest.MonkeyPatch, limit: int
) -> str:
    monkeypatch.setattr(memory_estimate, "memory_limit", lambda device: (limit, "a test"))
    monkeypatch.setattr(memory_estimate, "used_bytes", lambda device: 0)
    with (
        pytest.raises(OutOfMemoryError) as caught,
        explain_out_of_memory(size, layout, LIMITS, CPU),
    ):
        raise MemoryError
    assert "from a test" in caught.value.where
    return caught.value.hint


def test_size_of_a_model_counts_its_parameters_and_its_largest_unit(size: StateSize) -> None:
    assert size.parameters == LLAMA_CONFIGS["1M"].num_parameters
    assert size.unit == 2048 * 128 + 128  # the root: embedding and norm


def test_the_state_is_that_of_the_optimizer_and_of_the_options_of_memory() -> None:
    parameters = LLAMA_CONFIGS["1M"].num_parameters
    sgd, narrow = size_of("sgd"), size_of(weights="bf16", optimizer_state="bf16")
    assert (sgd.weights, sgd.gradients, sgd.optimizer) == (4 * parameters,) * 3
    assert (narrow.weights, narrow.gradients) == (2 * parameters,) * 2
    assert narrow.optimizer == (2 + 2 + 4) * parameters  # with master weights


def test_bytes_fall_with_the_workers_of_a_replica() -> None:
    size = adamw(1000, 100)
    assert size.bytes(Layout()) == 28_000
    assert size.bytes(Layout(8)) == 28_000
    assert size.bytes(Layout(1, 2)) == 14_000 + 6 * 4 * 100
    assert size.bytes(Layout(1, 1, 2)) == 14_000 + 6 * 4 * 100 // 2


def test_smallest_fitting_layout_prefers_shards_and_respects_the_limits() -> None:
    size = adamw(1000, 0)
    assert smallest_fitting_layout(size, 84_000, LIMITS) == Layout()
    assert smallest_fitting_layout(size, 42_000, LIMITS) == Layout(1, 2)
    assert smallest_fitting_layout(size, 42_000, LayoutLimits(1, (2,))) == Layout(1, 1, 2)
    assert smallest_fitting_layout(size, 42_000, LayoutLimits(1)) is None


def test_proposed_layout_is_larger_than_the_one_that_ran_out(
    size: StateSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    plenty = 10**12  # the estimate does not see activations, so any layout seems to fit
    assert hint_after_running_out(size, Layout(), monkeypatch, plenty).startswith(
        "try --layout.shard 2:"
    )
    assert hint_after_running_out(size, Layout(2, 2), monkeypatch, plenty).startswith(
        "try --layout.shard 4:"
    )
    assert hint_after_running_out(size, Layout(1, 8, 2), monkeypatch, plenty).startswith(
        "give it more memory"
    )


def test_the_error_names_a_file_with_what_uses_the_memory(size: StateSize, tmp_path: Path) -> None:
    path = tmp_path / "oom" / "rank-3.txt"
    with (
        pytest.raises(OutOfMemoryError) as caught,
        explain_out_of_memory(size, Layout(1, 2), LIMITS, CPU, lambda: path),
    ):
        torch.empty(1 << 62, dtype=torch.uint8)
    assert f"; memory in use: {path}" in caught.value.where
    first, second, *rows = path.read_text().splitlines()
    assert "can't allocate memory" in first and second == f"1.0 M parameters, {Layout(1, 2)}"
    sizes = {name: size for size, name in (row.strip().split("  ", 1) for row in rows)}
    assert (
        sizes["estimated: weights"]
        == sizes["estimated: gradients"]
        == format_bytes(2 * LLAMA_CONFIGS["1M"].num_parameters)
    )
    assert sizes["estimated: optimizer"] == format_bytes(4 * LLAMA_CONFIGS["1M"].num_parameters)
    assert parse_bytes(sizes["resident"].replace(" ", "")) <= 1.1 * parse_bytes(
        sizes["peak resident"].replace(" ", "")
    )  # the kernel counts late


def test_a_file_that_cannot_be_written_does_not_hide_the_error(
    size: StateSize, tmp_path: Path
) -> None:
    (tmp_path / "oom").write_text("a file")
    with (
        pytest.raises(OutOfMemoryError) as caught,
        explain_out_of_memory(size, Layout(), LIMITS, CPU, lambda: tmp_path / "oom" / "rank-0.txt"),
    ):
        raise MemoryError
    assert "memory in use" not in caught.value.where


def test_other_errors_pass_unchanged(size: StateSize) -> None:
    with (
        pytest.raises(ValueError, match="unrelated"),
        explain_out_of_memory(size, Layout(), LIMITS, CPU),
    ):
        raise ValueError("unrelated")
