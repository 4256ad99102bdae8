"""Token ids from memory-mapped arrays: correct ids at correct positions."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.corpus.encoded_pairs import EncodedPairs
from lockstep.corpus.token_stream import ONE_FILE, TokenStreamWriter
from lockstep.corpus.tokenizer import BEGIN, END, PAD
from lockstep.errors import DataError

Rows = list[list[int]]


def written(folder: Path, source: Rows, target: Rows, vocabulary: int = 1000) -> EncodedPairs:
    for side, rows in (("source", source), ("target", target)):
        write_side(folder, side, rows, vocabulary)
    return EncodedPairs.open(folder, "train")


def write_side(folder: Path, side: str, rows: Rows, vocabulary: int) -> None:
    writer = TokenStreamWriter(folder, f"train.{side}", vocabulary, shard_tokens=ONE_FILE)
    for row in rows:
        writer.add(row)
    writer.close()


def by_hand(rows: Rows, begin: bool, end: bool, height: int, width: int) -> Rows:
    full = [[BEGIN] * begin + row + [END] * end for row in rows]
    return [row + [PAD] * (width - len(row)) for row in full] + [[PAD] * width] * (
        height - len(rows)
    )


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(4, 999), max_size=9), st.lists(st.integers(4, 999), max_size=9)
        ),
        min_size=1,
        max_size=12,
    ),
    st.data(),
)
@settings(deadline=None, max_examples=150)
def test_gather_equals_a_loop_over_rows(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: list[tuple[list[int], list[int]]],
    data: st.DataObject,
) -> None:
    source, target = [a for a, _ in pairs], [b for _, b in pairs]
    encoded = written(tmp_path_factory.mktemp("e"), source, target)
    ids = data.draw(st.lists(st.integers(0, len(pairs) - 1), max_size=8))
    rows, width, height = (
        len(ids) + data.draw(st.integers(0, 3)),
        data.draw(st.integers(10, 13)),
        data.draw(st.integers(10, 13)),
    )
    arrays = encoded.gather(np.array(ids, dtype=np.int64), rows, width, height)
    expected_arrays = (
        by_hand([source[i] for i in ids], False, True, rows, width),
        by_hand([target[i] for i in ids], True, False, rows, height),
        by_hand([target[i] for i in ids], False, True, rows, height),
    )
    for array, expected, shape in zip(
        arrays, expected_arrays, ((rows, width), (rows, height), (rows, height)), strict=True
    ):
        assert array.dtype == np.int64
        assert array.shape == shape
        assert array.tolist() == expected


def test_lengths_include_end(tmp_path: Path) -> None:
    encoded = written(tmp_path, [[5, 6], [], [7]], [[5], [6, 7, 8], [9]])
    assert len(encoded) == 3
    assert encoded.lengths.dtype == np.int32
    assert encoded.lengths.tolist() == [[3, 2], [1, 4], [2, 2]]


def test_a_pair_as_long_as_its_shape_fits_and_a_longer_one_is_refused(tmp_path: Path) -> None:
    encoded = written(tmp_path, [[5, 6, 7]], [[8]])
    assert encoded.gather(np.array([0]), 1, 4, 2)[0].tolist() == [[5, 6, 7, END]]
    with pytest.raises(ValueError, match="source of pair 0 has 4 tokens, the shape holds 3"):
        encoded.gather(np.array([0]), 1, 3, 2)
    with pytest.raises(ValueError, match="target of pair 0 has 2 tokens"):
        encoded.gather(np.array([0]), 1, 4, 1)
    with pytest.raises(ValueError, match="2 pairs do not fit into 1 rows"):
        encoded.gather(np.array([0, 0]), 1, 4, 2)


@pytest.mark.parametrize(("vocabulary", "kind"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_take_two_bytes_where_the_vocabulary_allows(
    tmp_path: Path, vocabulary: int, kind: type
) -> None:
    largest = vocabulary - 1
    encoded = written(tmp_path, [[largest]], [[largest]], vocabulary)
    assert (tmp_path / "train.source.00000.ids").stat().st_size == np.dtype(kind).itemsize
    assert encoded.gather(np.array([0]), 1, 2, 2)[2].tolist() == [[largest, END]]


def test_an_empty_split(tmp_path: Path) -> None:
    encoded = written(tmp_path, [], [])
    assert len(encoded) == 0
    assert encoded.gather(np.zeros(0, dtype=np.int64), 2, 3, 3)[2].tolist() == [[PAD] * 3] * 2


def test_missing_truncated_or_mixed_arrays_are_data_errors(tmp_path: Path) -> None:
    written(tmp_path, [[5, 6]], [[7]])
    ids = tmp_path / "train.target.00000.ids"
    ids.write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match=r"train\.target cannot be read: .*ids has 6 bytes, not 2"):
        EncodedPairs.open(tmp_path, "train")
    ids.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        EncodedPairs.open(tmp_path, "train")
    write_side(tmp_path, "target", [[7], [8]], 1000)
    with pytest.raises(DataError, match="are inconsistent"):
        EncodedPairs.open(tmp_path, "train")


def test_gathering_is_much_faster_than_a_step(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [draw.integers(4, 999, size=n).tolist() for n in draw.integers(4, 30, size=20_000)]
    encoded = written(tmp_path, rows, rows)
    ids = draw.integers(0, len(rows), size=64)
    start_s = time.process_time()
    for _ in range(100):
        encoded.gather(ids, 64, 32, 32)
    assert (time.process_time() - start_s) / 100 < 0.005  # 64 pairs take about 0.3 ms
