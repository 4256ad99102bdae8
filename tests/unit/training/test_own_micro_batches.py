"""Data sets that make their micro-batches, or give rows of tensors; initial values of two kinds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from lockstep.data.order import UniformOrder
from lockstep.errors import UsageError
from lockstep.training.loader import KeyedBatches
from lockstep.training.sample_order import make_order
from lockstep.training.session_checks import refuse_two_values


class Drawn:
    """Micro-batches of random numbers."""

    order = UniformOrder(64, 16, 4, seed=7)

    def micro_batch(self, step: int, k: int) -> Tensor:
        return torch.randn(4)


def test_its_draws_follow_from_step_and_number() -> None:
    batches = KeyedBatches(Drawn(), Drawn.order, None)
    first = batches[3, 1]
    torch.rand(5)
    assert torch.equal(batches[3, 1], first)
    assert not torch.equal(batches[3, 2], first)


def test_its_order_must_be_that_of_the_session() -> None:
    assert make_order(Drawn(), None, None, None, 4, 7)[0] is Drawn.order
    for size, micro_batches, seed in ((16, 4, 7), (None, 2, 7), (None, 4, 0)):
        with pytest.raises(UsageError, match=r"of this data set|its order has"):
            make_order(Drawn(), size, None, None, micro_batches, seed)


class Doubled(TensorDataset):
    """A subclass, whose samples are others than its tensors' rows."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


TENSORS = torch.randn(64, 3), torch.randn(5, 64).T, torch.arange(64)


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(*TENSORS),
        Subset(Subset(TensorDataset(*TENSORS), range(63, -1, -1)), [*range(1, 64), 0]),
        Subset(TensorDataset(*TENSORS), range(-64, 0)),
        Subset(TensorDataset(*TENSORS), torch.ones(64).nonzero()),
        Doubled(*TENSORS),
    ],
    ids=["tensors", "subset of a subset", "negative", "of a mask", "subclass"],
)
def test_rows_of_tensors_are_the_collated_samples(dataset: Dataset[tuple[Tensor, ...]]) -> None:
    order = Drawn.order
    for k in range(order.micro_batches):
        rows = KeyedBatches(dataset, order, None)[3, k]
        samples = [dataset[i] for i in order.ids(3, k).tolist()]
        for got, expected in zip(rows, default_collate(samples), strict=True):
            assert torch.equal(got, expected) and got.stride() == expected.stride()
        assert type(rows) is list


def test_initial_values_beside_values_are_refused() -> None:
    with torch.device("meta"):
        refuse_two_values(nn.Linear(2, 1))
    refuse_two_values(None)
    with pytest.raises(UsageError, match="would replace the values of weight, bias"):
        refuse_two_values(nn.Linear(2, 1))
