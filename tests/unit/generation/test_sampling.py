"""Filters of sampling, and the text of a row as its tokens arrive."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import UsageError
from lockstep.generation.sampling import (
    SamplingParams,
    check_sampling,
    sample_next,
    stop_prefix_length,
)

LOGITS = torch.tensor([0.5, 0.2, 0.3]).log()[None]  # token 0, then 2, then 1


def drawn(draw: float, sampling: SamplingParams) -> int:
    return int(sample_next(LOGITS, torch.tensor([draw], dtype=torch.float64), sampling))


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (SamplingParams(), (0, 0, 0, 0)),
        (SamplingParams(temperature=1.0), (0, 0, 2, 1)),
        (SamplingParams(temperature=1.0, top_k=1), (0, 0, 0, 0)),
        (SamplingParams(temperature=1.0, top_k=2), (0, 0, 2, 2)),
        (SamplingParams(temperature=1.0, top_p=0.5), (0, 0, 0, 0)),
        (SamplingParams(temperature=1.0, top_p=0.6), (0, 0, 2, 2)),
    ],
)
def test_draw_selects_a_token_by_its_cumulative_probability(
    sampling: SamplingParams, tokens: tuple[int, ...]
) -> None:
    assert tuple(drawn(draw, sampling) for draw in (0.0, 0.45, 0.79, 1 - 2**-53)) == tokens


def test_higher_temperature_evens_the_probabilities() -> None:
    assert [
        drawn(0.45, SamplingParams(temperature=temperature)) for temperature in (0.1, 1.0, 100.0)
    ] == [0, 0, 2]


def test_rows_are_drawn_independently() -> None:
    draws = torch.tensor([0.0, 0.79], dtype=torch.float64)
    assert sample_next(LOGITS.expand(2, 3), draws, SamplingParams(temperature=1.0)).tolist() == [
        0,
        2,
    ]


@pytest.mark.parametrize(
    ("text", "length"), [("The en", 2), ("The end", 0), ("The e", 1), ("Th", 0), ("a\n", 1)]
)
def test_end_of_a_text_that_may_start_a_stop_text_is_held_back(text: str, length: int) -> None:
    assert stop_prefix_length(text, ["end", "\n\n"]) == length


@pytest.mark.parametrize(
    ("tokens", "sampling", "option"),
    [
        (0, SamplingParams(), "--tokens 0"),
        (1, SamplingParams(temperature=float("nan")), "--temperature nan"),
        (1, SamplingParams(top_k=-1), "--top-k -1"),
        (1, SamplingParams(top_p=0.0), "--top-p 0.0"),
    ],
)
def test_parameters_out_of_range_are_refused(
    tokens: int, sampling: SamplingParams, option: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_sampling(tokens, sampling)
    assert caught.value.what == option
