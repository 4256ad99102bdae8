"""Arithmetic of the benchmarks: results of a race, and batches for other libraries."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.step.batches import LikeLengths, Translations, pad
from bench.step.contestants import Answer, as_flags
from bench.step.contests import Claim, races
from bench.step.paired import CELLS, rows_of_cells
from bench.step.run import judge
from lockstep.config.resolve import parse_flags, resolve
from lockstep.corpus.encoded_pairs import EncodedPairs
from lockstep.corpus.token_stream import TokenStreamWriter
from lockstep.corpus.tokenizer import BEGIN, END, PAD

RACE = {race.name: race for race in races(full=False, precision="fp32")}


@pytest.fixture
def pairs(tmp_path: Path) -> EncodedPairs:
    """Return 500 pairs of 2 to 40 tokens, of unlike lengths; every token of pair i is 4 + i."""
    draw = np.random.default_rng(0)
    for side in ("source", "target"):
        writer = TokenStreamWriter(tmp_path, f"train.{side}", 1000)
        for i, n in enumerate(draw.integers(1, 40, 500).tolist()):
            writer.add([4 + i] * n)
        writer.close()
    return EncodedPairs.open(tmp_path, "train")


def test_rate_excludes_the_warm_up_and_step_times_are_compared_per_step() -> None:
    others, bare = RACE["others-default"], RACE["bare-default-1"]
    slow = Answer([9.0] * 3 + [2.0, 4.0], [0] * 3 + [30, 30], [0] * 5)
    fast = Answer([9.0] * 3 + [1.0, 2.0], [0] * 3 + [30, 30], [0] * 5)
    result = judge(others, others.claims[0], {"lockstep": [fast, slow], "accelerate": [slow, slow]})
    assert (
        result.ratios == [2.0, 1.0]
        and result.ratio == 1.5
        and (result.ours, result.theirs) == (15.0, 10.0)
    )
    result = judge(bare, bare.claims[0], {"lockstep": [slow], "bare DDP": [fast]})
    assert result.ratios == [2.0]


def test_rate_below_its_bound_and_step_time_above_its_bound_fail() -> None:
    rate, time = Claim("a", "b", "pairs a second", 100), Claim("a", "b", "step time", 1.03)
    assert rate.met(100) and not rate.met(99.9) and time.met(1.03) and not time.met(1.031)


def test_lockstep_starts_with_the_values_of_the_race() -> None:
    for race in RACE.values():
        resolved = resolve(race.file, race.flags)
        assert resolve(None, parse_flags(as_flags(resolved))).run == resolved.run


def test_other_libraries_get_each_pair_once_in_equally_many_batches(pairs: EncodedPairs) -> None:
    ranks = [
        list(LikeLengths(pairs, tokens=200, multiple=4, seed=1, rank=rank, size=2))
        for rank in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1]) and len(ranks[0]) % 2 == 0
    seen = [i for batches in ranks for batch in batches for i in batch]
    assert len(seen) == len(set(seen)) and len(seen) > 450
    longer = pairs.lengths.max(axis=1)
    assert all(len(batch) * longer[batch].max() <= 200 for batches in ranks for batch in batches)


def test_rows_for_other_libraries_equal_the_corpus(pairs: EncodedPairs) -> None:
    rows = Translations(pairs)
    source, target, labels = pad([rows[7], rows[8]])
    n, t = pairs.lengths[7].tolist()
    assert source[0].tolist()[:n] == [11] * (n - 1) + [END] and set(source[0].tolist()[n:]) <= {PAD}
    assert target[0].tolist()[:t] == [BEGIN] + [11] * (t - 1) and labels[0].tolist()[:t] == [11] * (
        t - 1
    ) + [END]
    assert source.shape[1] == pairs.lengths[[7, 8], 0].max() and target.shape == labels.shape


def test_paired_rounds_give_the_median_of_the_ratios_of_each_round() -> None:
    seconds = {
        "bare DDP": [1.0, 2.0, 4.0, 1.0],
        "Session": [1.5, 2.0, 8.0, 1.0],
    }
    sent = {"formula_bytes": 8.0, "bytes": {"bare DDP": 8.0, "Session": 12.0}}
    answer = {"cell": "c", "opponent": "bare DDP", "seconds": seconds, **sent}
    row = list(rows_of_cells([answer]))[-1]
    assert row == "| c | bare DDP | 1.500 | 1.250 | 1.000 to 1.875 | 4 | 1.000 | 1.500 |"
    assert len(CELLS) == 8
