"""Encoded buffers: errors, their mean, their independence of how a buffer is cut, and NaN."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from lockstep.data.order import splitmix64
from lockstep.network.wire_format import Section, between, encoded_bytes
from lockstep.parallel.wire_sum import decode, encode

SECTIONS = (Section("bf16", 1, 37), Section("int8", 35, 105), Section("int8", 256, 2048))


def values(count: int = 2190) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1))


def test_bf16_is_rounded_to_nearest_even() -> None:
    flat = values()
    assert torch.equal(
        decode(encode(flat, (Section("bf16", 1, 2190),), 7), (Section("bf16", 1, 2190),)),
        flat.to(torch.bfloat16).float(),
    )


def test_int8_errs_by_less_than_a_127th_of_the_largest_element_of_the_block() -> None:
    blocks = values(2048).view(8, 256) * 2.0 ** torch.arange(-20, 20, 5)[:, None]
    decoded = decode(encode(blocks.view(-1), SECTIONS[2:], 7), SECTIONS[2:]).view(8, 256)
    errors, largest = (decoded - blocks).abs(), blocks.abs().amax(1, keepdim=True)
    assert (errors < largest / 127 * (1 + 1e-6)).all() and (errors > largest / 1270).any(1).all()


def test_int8_has_no_bias_and_independent_errors() -> None:
    """Equal elements too: gradients of bf16 products have few different values."""
    flat = torch.cat([values(256), torch.full((255,), 0.3), torch.ones(1)])
    sections, rounds = (Section("int8", 256, 512),), 1000
    errors = torch.stack(
        [decode(encode(flat, sections, splitmix64(key)), sections) - flat for key in range(rounds)]
    ).double()
    errors = errors[:, errors.std(0) > 1e-3]  # the largest of a block is exact
    assert errors.shape[1] > 500
    scores = errors.mean(0) / errors.std(0) * math.sqrt(rounds)
    assert 0.9 < scores.std() < 1.1 and scores.abs().max() < 5
    correlations = torch.corrcoef(errors.T).fill_diagonal_(0) * math.sqrt(rounds)
    assert 0.9 < correlations.std() < 1.1 and correlations.abs().max() < 6.5


def test_encoded_bytes_do_not_depend_on_how_a_buffer_is_cut() -> None:
    flat, cuts = values(), [0, 11, 37, 72, 142, 142 + 256, 2190]
    whole = encode(flat, SECTIONS, 7)
    parts = [between(SECTIONS, slice(*pair)) for pair in pairwise(cuts)]
    pieces = [
        encode(piece, part, 7)
        for piece, part in zip(flat.tensor_split(cuts[1:-1]), parts, strict=True)
    ]
    assert torch.equal(torch.cat(pieces), whole) and len(whole) == encoded_bytes(SECTIONS)
    for part, piece in zip(parts, whole.split([len(piece) for piece in pieces]), strict=True):
        decode(piece, part)  # a view at any byte
    assert not torch.equal(encode(flat, SECTIONS, 8), whole)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_so_within_their_block(wrong: float) -> None:
    flat = values()
    flat[[3, 40, 500]] = wrong
    finite = decode(encode(flat, SECTIONS, 7), SECTIONS).isfinite()
    assert not finite[[3, *range(37, 72), *range(398, 654)]].any()
    assert int((~finite).sum()) == 1 + 35 + 256


@pytest.mark.parametrize("value", [0.0, 1e-42, 3e38])
def test_blocks_of_extreme_values_neither_overflow_nor_divide_by_zero(value: float) -> None:
    flat = torch.full((256,), value)
    decoded = decode(encode(flat, (Section("int8", 256, 256),), 7), (Section("int8", 256, 256),))
    assert decoded.isfinite().all() and torch.allclose(decoded, flat, rtol=1e-6)
