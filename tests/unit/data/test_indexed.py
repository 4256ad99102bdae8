"""A stream written once: its samples come back equal, by number, and damage is found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

from lockstep import DataError, UsageError, index_dataset
from lockstep.training.loader import get_samples, number_of_samples

SAMPLES: list[Any] = [
    {
        "tokens": torch.arange(5),
        "text": "Größe\n",
        "weight": 0.1,
        "rare": None,
        "flags": [True, ()],
    },
    (np.ones((2, 3), dtype=np.float32)[:, ::2], np.float64(0.25), 7, b"\x00\xff", b""),
    torch.empty(0, 4, dtype=torch.bfloat16),
    torch.tensor(3.5, dtype=torch.bfloat16),
    torch.arange(12).reshape(3, 4).T,
    -0.0,
]


class Stream(IterableDataset[Any]):
    """Counts how often it is read; draws random numbers as it is read."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples, self.read = samples, 0

    def __iter__(self) -> Iterator[Any]:
        self.read += 1
        for sample in self.samples:
            torch.rand(1), np.random.rand(), random.random()
            yield sample


def test_samples_come_back_equal_and_the_stream_is_read_once(tmp_path: Path) -> None:
    stream = Stream(SAMPLES)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    index_dataset(stream, tmp_path / "index")
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected, (
        "the workers that wait draw the same"
    )
    dataset = index_dataset(stream, tmp_path / "index")
    assert stream.read == 1 and len(dataset) == len(SAMPLES)
    for number in (5, 0, 3, 1, 4, 2):
        sample, original = dataset[number], SAMPLES[number]
        assert type(sample) is type(original)
        assert repr(sample) == repr(original) and str(getattr(sample, "dtype", "")) == str(
            getattr(original, "dtype", "")
        )
    assert [type(item) for item in dataset[1]] == [np.ndarray, np.float64, int, bytes, bytes]
    assert default_collate([dataset[0]["tokens"]] * 2).tolist() == [[0, 1, 2, 3, 4]] * 2
    with pytest.raises(IndexError):
        _ = dataset[len(SAMPLES)]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "object"),
        ({1: 2}, "dict"),
        (np.array(["text"]), "ndarray"),
        ({"a": [{3}]}, "set"),
    ],
)
def test_a_sample_that_cannot_be_written_is_named_and_leaves_no_index(
    tmp_path: Path, value: Any, name: str
) -> None:
    with pytest.raises(UsageError, match=f"sample 1 has a {name}, which cannot be written"):
        index_dataset([0, value], tmp_path)
    assert len(index_dataset([0, 1, 2], tmp_path)) == 3


def test_an_empty_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the stream has no samples"):
        index_dataset(iter(()), tmp_path)


def test_a_flipped_bit_is_found_in_every_sample(tmp_path: Path) -> None:
    index_dataset(SAMPLES, tmp_path)
    records = bytearray((tmp_path / "samples.bin").read_bytes())
    for position in range(0, len(records), 97):
        records[position] ^= 1
        (tmp_path / "samples.bin").write_bytes(records)
        damaged = []
        for number in range(len(SAMPLES)):
            try:
                index_dataset([], tmp_path)[number]
            except DataError as error:
                assert error.what.startswith(f"sample {number} is damaged: crc32 ")
                damaged.append(number)
        assert len(damaged) == 1
        records[position] ^= 1


def test_rows_of_hugging_face_on_disk_are_samples_and_as_a_stream_can_be_written(
    tmp_path: Path,
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"tokens": [i, i + 1], "text": f"row {i}"} for i in range(7)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    on_disk = datasets.load_from_disk(tmp_path / "rows")
    assert number_of_samples(on_disk, "") == 7 and get_samples(on_disk, [5, 0]) == [
        rows[5],
        rows[0],
    ]
    stream = on_disk.to_iterable_dataset(num_shards=3)
    with pytest.raises(
        UsageError,
        match=r"IterableDataset has no length or no index\n.*lockstep\.index_dataset\(stream, folder\)",
    ):
        number_of_samples(stream, "")
    assert [*index_dataset(stream, tmp_path / "index")] == rows
