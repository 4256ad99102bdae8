"""Orders of a Session's loader: mixtures and token budgets, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset

from lockstep import BucketOrder, Mixture, UsageError
from lockstep.training.sample_order import make_order, whole_weights


class Numbers:
    """A data set of the numbers from `first` on."""

    def __init__(self, first: int, size: int) -> None:
        self.first, self.size = first, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> int:
        return self.first + number


LENGTHS = np.random.default_rng(0).integers(1, 900, 500)


def refused(message: str) -> Any:
    return pytest.raises(UsageError, match=message)


def test_a_mixture_has_the_samples_of_all_its_data_sets() -> None:
    mixture = Mixture([Numbers(0, 3), Numbers(100, 2)], [0.75, 0.25])
    assert isinstance(mixture, ConcatDataset) and [mixture[i] for i in range(len(mixture))] == [
        0,
        1,
        2,
        100,
        101,
    ]
    assert mixture.stages == ((0, (3, 1)),)
    assert Mixture([Numbers(0, 3), Numbers(9, 2)], {100: [0, 1], 0: [2, 4]}).stages == (
        (0, (1, 2)),
        (100, (0, 1)),
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1], "these are not the weights of 2 data sets"),
        ([0, 0], "these are not the weights of 2 data sets"),
        ([1, -1], "these are not the weights of 2 data sets"),
        ([1, float("nan")], "these are not the weights of 2 data sets"),
        (
            [0.123457, 0.876543],
            r"exact only over windows of 1,000,000 samples\n.*0\.123457.*\n.*round the weights",
        ),
        ({5: [1, 1]}, "the stages do not start with step 0"),
        ({}, "the stages do not start with step 0"),
    ],
)
def test_weights_that_are_not_exact_are_refused(weights: Any, message: str) -> None:
    with refused(message):
        Mixture([Numbers(0, 3), Numbers(9, 2)], weights)


def test_data_sets_of_a_mixture_have_samples() -> None:
    with refused("data set 1\n|has no length"):
        Mixture([Numbers(0, 3), iter([1])], [1, 1])
    with refused(r"data sets of \(3, 0\) samples"):
        Mixture([Numbers(0, 3), Numbers(0, 0)], [1, 1])
    assert whole_weights([0.7, 0.2, 0.1], 3) == (7, 2, 1)


def test_micro_batches_under_a_token_budget_hold_similar_lengths_and_each_sample_once() -> None:
    order, fact = make_order(Numbers(0, 500), None, 2000, LENGTHS, 4, 0)
    assert isinstance(order, BucketOrder) and fact.startswith("500 samples, tokens 2000, lengths ")
    batches = [order.ids(*divmod(number, 4)) for number in range(order.micro_batches_per_epoch)]
    assert sorted(np.concatenate(batches)) == list(range(500))
    padded = [len(ids) * int(LENGTHS[ids].max()) for ids in batches]
    assert max(padded) <= 2000 and sum(padded) < 1.2 * LENGTHS.sum()
    assert make_order(Numbers(0, 500), None, 2000, LENGTHS[::-1], 4, 0)[1] != fact


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((None, None, None), "a loader needs batch_size, or tokens and lengths"),
        ((None, 64, None), "a loader needs batch_size, or tokens and lengths"),
        ((8, 64, [3] * 20), "batch_size cannot be combined with tokens and lengths"),
        ((None, 64, [3] * 19), r"lengths of shape \(19,\) and type int64 for 20 samples"),
        ((None, 64, [3.0] * 20), r"lengths of shape \(20,\) and type float64"),
        (
            (None, 64, [3] * 18 + [65, 70]),
            "sample 18 has 65 tokens, and 2 of 20 samples are not within 1 and 64",
        ),
        ((None, 64, [0] + [3] * 19), "sample 0 has 0 tokens"),
    ],
)
def test_wrong_sizes_of_a_loader_are_refused(options: tuple[Any, Any, Any], message: str) -> None:
    with refused(message):
        make_order(Numbers(0, 20), *options, 4, 0)


def test_a_token_budget_for_a_mixture_is_refused() -> None:
    with refused("tokens and lengths are not supported with a Mixture"):
        make_order(Mixture([Numbers(0, 20)], [1]), None, 64, [3] * 20, 4, 0)
