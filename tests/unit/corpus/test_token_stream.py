"""Token streams: written sequentially, read at any position, also with 10**9 tokens."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.corpus.token_stream import TokenStream, TokenStreamWriter
from lockstep.data.order import UniformOrder
from lockstep.errors import DataError
from lockstep.files import write_json

DOCUMENTS = [[1, 5, 6, 2], [1, 2], [1, *range(3, 30), 2], [1, 70_000 % 60_000, 2]]


def written(folder: Path, vocabulary: int = 1 << 16, shard_tokens: int = 7) -> TokenStream:
    writer = TokenStreamWriter(
        folder, "train", vocabulary, has_loss_mask=True, shard_tokens=shard_tokens
    )
    for ids in DOCUMENTS:
        writer.add(ids, [i % 2 == 0 for i in ids])
    assert all(path.exists() for path in writer.close())
    return TokenStream.open(folder, "train")


@pytest.mark.parametrize("vocabulary", [1 << 16, 1 << 17])
def test_every_span_is_read_across_files_as_written(tmp_path: Path, vocabulary: int) -> None:
    stream, flat = written(tmp_path, vocabulary), [i for ids in DOCUMENTS for i in ids]
    owner = [number for number, ids in enumerate(DOCUMENTS) for _ in ids]
    assert (
        len(stream) == len(DOCUMENTS)
        and stream.tokens == len(flat)
        and len(stream.ids) == -(-len(flat) // 7)
    )
    for start in range(len(flat)):
        for end in range(start + 1, len(flat) + 1):
            assert stream.read(start, end).tolist() == flat[start:end]
            assert stream.read_loss_mask(start, end).tolist() == [
                i % 2 == 0 for i in flat[start:end]
            ]
            assert stream.documents_at(start, end).tolist() == owner[start:end]


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "train.00001.ids"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train\.00001\.ids has 13 bytes, not 14"):
        TokenStream.open(tmp_path, "train")


@pytest.fixture(scope="module")
def billion(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    """10**9 tokens in a million documents. The id files are sparse."""
    folder, tokens, shard_tokens, documents = (
        tmp_path_factory.mktemp("billion"),
        10**9,
        1 << 26,
        10**6,
    )
    for number, first in enumerate(range(0, tokens, shard_tokens)):
        with open(folder / f"train.{number:05d}.ids", "wb") as file:
            file.truncate(2 * min(shard_tokens, tokens - first))
    for place, value in ((0, 7), (shard_tokens, 8), (tokens - 1, 9)):
        ids = np.memmap(folder / f"train.{place // shard_tokens:05d}.ids", np.uint16, "r+")
        ids[place % shard_tokens] = value
    np.arange(0, tokens + 1, tokens // documents, dtype=np.int64).tofile(folder / "train.offsets")
    write_json(
        folder / "train.json",
        {
            "documents": documents,
            "tokens": tokens,
            "bits": 16,
            "counted": False,
            "shard_tokens": shard_tokens,
        },
    )
    return TokenStream.open(folder, "train")


def test_seeking_in_a_billion_tokens_is_fast(billion: TokenStream) -> None:
    assert billion.read(0, 2).tolist() == [7, 0] and billion.read(
        (1 << 26) - 1, (1 << 26) + 1
    ).tolist() == [0, 8]
    assert billion.read(10**9 - 1, 10**9).tolist() == [9]
    assert billion.documents_at(999_999, 1_000_001).tolist() == [999, 1000]
    rows, length = (10**9 - 1) // 2048, 2048
    order = UniformOrder(rows, 512, 8, seed=1)
    start_s = time.process_time()
    for step in range(10**6, 10**6 + 50):
        for row in order.ids(step, 7)[:4]:
            start = int(row) * length
            assert (
                len(billion.read(start, start + length))
                == len(billion.documents_at(start, start + length))
                == length
            )
    assert time.process_time() - start_s < 20, (
        "200 rows around step 1,000,000 take half a second; a scan, minutes"
    )


@settings(deadline=None)
@given(samples=st.integers(1, 50), rows=st.integers(1, 4), k=st.integers(1, 3))
def test_each_epoch_has_every_row_once(samples: int, rows: int, k: int) -> None:
    order = UniformOrder(samples, rows * k, k, seed=3)
    steps = -(-2 * samples // (rows * k))
    dealt = np.concatenate([order.ids(step, i) for step in range(steps) for i in range(k)])[
        : 2 * samples
    ]
    assert sorted(dealt[:samples]) == sorted(dealt[samples:]) == list(range(samples))
    assert order.epoch(steps) >= 2.0
