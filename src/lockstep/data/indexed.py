"""A stream of samples, written once, whose samples are found by their number.

    samples.bin  one record after the other: a line of JSON, then the arrays as safetensors
    index.bin    for each record its end in samples.bin and its crc32, as int64; written last

Nothing is pickled. Each record is verified when it is read.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch.utils.data import Dataset

from lockstep.data.manifest import locked
from lockstep.errors import DataError, UsageError
from lockstep.files import write_atomic
from lockstep.log import log


class IndexedDataset(Dataset[Any]):
    """The samples in a folder that `index_dataset` has written."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._index = np.memmap(self.folder / "index.bin", dtype="<i8", mode="r").reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        first, (end, checksum) = (
            int(self._index[number - 1][0]) if number else 0,
            self._index[number].tolist(),
        )
        with open(self.folder / "samples.bin", "rb") as file:
            file.seek(first)
            record = file.read(max(0, end - first))
        if zlib.crc32(record) != checksum:
            found = f"crc32 {zlib.crc32(record):08x} instead of {checksum:08x}"
            raise DataError(
                f"sample {number} is damaged: {found}",
                str(self.folder / "samples.bin"),
                f"remove {self.folder} to write the samples again",
            )
        structure, _, tensors = record.partition(b"\n")
        return decode(json.loads(structure), safetensors.torch.load(tensors) if tensors else {})


def index_dataset(samples: Iterable[Any], folder: str | os.PathLike[str]) -> IndexedDataset:
    """Write the samples of a stream into `folder` once; return them as a data set with an index.

    samples  an IterableDataset or another iterable that ends: of tensors, NumPy arrays, numbers,
             text and bytes, in dicts, lists and tuples. It is not read when `folder` has an index
    folder   on a file system that all workers see; another stream needs another folder

    Call it on every worker: one writes, the others wait. An interrupted call starts from the first
    sample again. Samples are written as the stream gives them: augment them after reading.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if not (folder / "index.bin").exists():
            with unchanged_generators():
                write_samples(samples, folder)
    return IndexedDataset(folder)


def write_samples(samples: Iterable[Any], folder: Path) -> None:
    index, end = array("q"), 0
    with open(folder / "samples.bin", "wb") as file:
        for number, sample in enumerate(samples):
            tensors: dict[str, torch.Tensor] = {}
            structure = json.dumps(encode(sample, tensors, number)).encode()
            record = structure + b"\n" + (safetensors.torch.save(tensors) if tensors else b"")
            end += file.write(record)
            index.extend((end, zlib.crc32(record)))
        file.flush()
        os.fsync(file.fileno())
    if not index:
        raise UsageError(
            "the stream has no samples",
            f"index_dataset(samples, {str(folder)!r})",
            "pass an iterable with samples",
        )
    write_atomic(folder / "index.bin", np.asarray(index, dtype="<i8").tobytes())
    log.info("wrote %s samples (%s bytes) to %s", f"{len(index) // 2:,}", f"{end:,}", folder)


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the generators of torch, NumPy and Python: only one worker reads the stream, and the
    others must draw the same numbers afterwards."""
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def encode(value: Any, tensors: dict[str, torch.Tensor], number: int) -> Any:
    """Return a value of sample `number` as JSON, which refers to the arrays put into `tensors`."""
    name = str(len(tensors))
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        tensors[name] = torch.from_numpy(np.array(value, order="C"))
        return {"array": name}
    if isinstance(value, bytes):
        tensors[name] = torch.from_numpy(np.array(bytearray(value), dtype=np.uint8))
        return {"bytes": name}
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {"dict": {key: encode(item, tensors, number) for key, item in value.items()}}
    if type(value) in (list, tuple):
        items = [encode(item, tensors, number) for item in value]
        return items if type(value) is list else {"tuple": items}
    raise UsageError(
        f"sample {number} has a {type(value).__name__}, which cannot be written",
        "index_dataset(samples, folder)",
        "let the stream give tensors, NumPy arrays, numbers, text and bytes, in dicts with text as "
        "keys, lists and tuples",
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {key: decode(item, tensors) for key, item in content.items()}
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in content)
    if kind == "bytes":
        return tensors[content].numpy().tobytes()
    return tensors[content] if kind == "tensor" else tensors[content].numpy()[()]
