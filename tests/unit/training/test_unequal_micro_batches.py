"""session.backward(loss), a mean, with micro-batches of unequal size: refused or named."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import CheckpointError, UsageError
from lockstep.session import Session
from lockstep.training.replica_group import ReplicaGroup


class Rows(Dataset[Tensor]):
    """Row i has i + 1 elements."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Tensor:
        return torch.arange(i + 1.0)


def padded(rows: list[Tensor], value: float = 0.0) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def labeled(rows: list[Tensor]) -> dict[str, Any]:
    """Pad to one length, with labels that torch's losses leave out."""
    labels = padded([torch.arange(12.0), *rows], -100.0)[1:].long()
    return {"inputs": [labels.float()], "labels": labels}


def as_graph(rows: list[Tensor]) -> dict[str, Any]:
    return {"nodes": torch.cat(rows), "targets": torch.ones(len(rows))}


def run(
    folder: Path,
    collate_fn: Callable[[Any], Any],
    *,
    with_count: bool = False,
    steps: int = 2,
    **options: Any,
) -> None:
    model = nn.Linear(1, 1)
    with Session(folder, micro_batches=4) as session:
        prepared, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        loader = session.loader(Rows(), **(options or {"batch_size": 12}), collate_fn=collate_fn)
        for step in session.steps(steps):
            for batch in loader(step):
                values = next(iter(batch.values())) if isinstance(batch, dict) else batch
                losses = prepared(
                    (values[0] if isinstance(values, list) else values).reshape(-1, 1)
                )
                if with_count:
                    session.backward(losses.sum(), count=len(losses))
                else:
                    session.backward(losses.mean())
            optimizer.step()


def test_a_mean_over_samples_that_a_collate_function_left_out_is_refused(tmp_path: Path) -> None:
    def leave_out(rows: list[Tensor]) -> Tensor:
        return torch.stack([row[:1] for row in rows if len(row) > 3] or [torch.zeros(1)])

    with pytest.raises(
        UsageError,
        match=r"have 1 to 3 samples, and their losses are means\n.*\n.*session\.backward\(loss_sum, count=n\)",
    ):
        run(tmp_path / "mean", leave_out)
    run(tmp_path / "count", leave_out, with_count=True)


@pytest.mark.parametrize(
    ("collate_fn", "message"),
    [
        (
            padded,
            r"micro-batches differ: 3 x \d+, then 3 x \d+\. session.backward\(loss\) gives each the same weight",
        ),
        (
            labeled,
            r"micro-batches differ: 3 x 12, 3 x 12 \(\d+ labels of -100\), then 3 x 12, 3 x 12 \(\d+ labels of -100\)\.",
        ),
        (as_graph, r"micro-batches differ: \d+, 3, then \d+, 3\."),
    ],
)
def test_other_unequal_sizes_are_a_warning_once(
    collate_fn: Callable[[Any], Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "mean", collate_fn)
    (warning,) = (
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "differ" in record.msg
    )
    assert re.match(message, warning), warning
    caplog.clear()
    run(tmp_path / "count", collate_fn, with_count=True)
    assert "differ" not in caplog.text


def test_equal_sizes_are_neither_named_nor_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "rows", lambda rows: torch.stack([row[:1] for row in rows]))
    run(tmp_path / "packed", lambda rows: torch.stack([row[:1] for row in rows[:2]]))
    assert "differ" not in caplog.text


def test_a_token_budget_needs_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    budget = {"tokens": 24, "lengths": range(1, 13)}
    with pytest.raises(
        UsageError,
        match=r"under a token budget have different numbers of samples\n.*\n.*session\.backward\(loss_sum",
    ):
        run(tmp_path / "mean", padded, **budget)
    run(tmp_path / "count", padded, with_count=True, **budget)
    with pytest.raises(CheckpointError, match="loader 0"):
        run(
            tmp_path / "count",
            padded,
            with_count=True,
            steps=3,
            **(budget | {"lengths": [*range(1, 12), 11]}),
        )
    assert "differ" not in caplog.text


def refuse_a_mean_on_ranks(runtime: ElasticRuntime) -> tuple[str, float]:
    """Return the error and the weight, which no update has changed. Rank 1 has 2 samples, others 3."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replicas = ReplicaGroup(runtime, model, micro_batches=runtime.world.size)
    try:
        for k in replicas.micro_batches(0):
            samples = 2 if k == 1 else 3
            replicas.backward(replicas(torch.ones(samples, 1)).mean(), samples=[samples])
        optimizer.step()
    except UsageError as error:
        return error.what, model.weight.item()
    return "", model.weight.item()


@pytest.mark.parametrize("size", [2, 3])
def test_a_difference_between_ranks_is_refused_on_all_of_them_before_the_update(size: int) -> None:
    what = "the micro-batches of a step have 2 to 3 samples, and their losses are means"
    assert run_ranks(refuse_a_mean_on_ranks, size) == [(what, 1.0)] * size
