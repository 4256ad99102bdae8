"""Losses belong to the samples that have them, or to none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lockstep.data.order import UniformOrder
from lockstep.history.observer import keeps_order
from lockstep.history.replay import Replayed
from lockstep.history.sample_losses import SampleLosses
from lockstep.history.why import explain
from lockstep.training.loader import KeyedBatches

Samples = list[dict[str, Any]]


def losses_of_rows(loss: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    logits = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(24).view(4, 6) % 5
    with SampleLosses(4) as losses:
        loss(logits, targets)
    return losses.by_row()


def test_losses_that_a_mask_selects_belong_to_no_row() -> None:
    each = losses_of_rows(lambda x, y: cross_entropy(x.flatten(0, 1), y.flatten()))
    assert len(each) == 4
    mask = torch.arange(24).view(4, 6) < 8  # eight losses, all of the first two rows
    assert losses_of_rows(lambda x, y: cross_entropy(x[mask], y[mask])) == []

    def of_numbers(x: Tensor, y: Tensor) -> Tensor:
        rows, columns = mask.nonzero(as_tuple=True)
        return cross_entropy(x[rows, columns], y[rows, columns])

    assert losses_of_rows(of_numbers) == []


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"ids": torch.full((1 + i % 5,), i), "weight": torch.tensor(math.nan)}


def pad(samples: Samples) -> dict[str, Any]:
    ids = [sample.pop("ids") for sample in samples]
    weights = torch.stack([sample.pop("weight") for sample in samples])
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"ids": padded, "weights": weights, "count": torch.tensor(len(samples))}


def pad_by_length(samples: Samples) -> dict[str, Any]:
    return pad(sorted(samples, key=lambda sample: -len(sample["ids"])))


def test_rows_are_samples_only_if_the_collate_function_keeps_their_order() -> None:
    order = UniformOrder(12, batch_size=12, micro_batches=2, seed=0)
    ids = order.ids(0, 0).tolist()
    assert keeps_order(KeyedBatches(Texts(), order, pad), ids)
    assert not keeps_order(KeyedBatches(Texts(), order, pad_by_length), ids)


def seen(k: int, norm: float, *losses: Any) -> dict[str, Any]:
    worst = [
        {"loss": loss, "samples": [10 * k + i], "content": []} for i, loss in enumerate(losses)
    ]
    line = {"micro_batch": k, "loss": 1.0, "norm": norm, "kind": "samples", "samples": [k]}
    return {**line, "median": 1.0 if losses else None, "worst": worst}


@pytest.mark.parametrize("bad", [0, 1])
def test_a_loss_and_a_norm_that_are_no_numbers_are_the_highest(bad: int) -> None:
    lines = [seen(k, math.nan, 2.0, "NaN") if k == bad else seen(k, 3.0, 9.0, 8.0) for k in (0, 1)]
    line = {"step": 1, "loss": math.nan, "losses": []}
    text = list(explain(1, Replayed(0, [line], [line], lines, ""), [line], str))
    assert text[1].startswith(f"largest gradient: micro-batch {bad}, norm nan")
    assert text[5] == f"  samples {10 * bad + 1}, in micro-batch {bad}: nan"


def test_samples_are_ranked_only_if_each_micro_batch_has_losses_by_sample() -> None:
    line = {"step": 1, "loss": 1.0, "losses": []}
    lines = [seen(0, 1.0, 9.0), seen(1, 2.0)]
    text = list(explain(1, Replayed(0, [line], [line], lines, ""), [line], str))
    assert text[-1] == "the losses of its samples are not known: 1"
