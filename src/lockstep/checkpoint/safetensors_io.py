"""Tensors in files, in the safetensors layout: eight bytes of length, a JSON header, the bytes of each tensor.

Without torch, so that `lockstep checkpoint list|verify|digest` answer at once, and as chunks of bytes, so that one pass
writes and hashes and a full disk is an OSError with its number. The safetensors library reads these files and its files
are read here (tested both ways); its own `load` holds the interpreter's lock for the whole file (0.6 s for 0.4 GB,
measured with 0.8.0), in which no training step begins.

Layout: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.files import regular

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class Spec(NamedTuple):
    """A tensor without its bytes; dtype in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def split(specs: Iterable[Spec], file_bytes: int) -> list[list[Spec]]:
    """`specs` in the order of their names, cut into files of at most `file_bytes`; a larger tensor has its own file."""
    files: list[list[Spec]] = [[]]
    size = 0
    for spec in sorted(specs):
        if files[-1] and size + spec.bytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.bytes
    return files


def chunks(
    specs: Sequence[Spec], data: Callable[[str], memoryview], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of one file, piece by piece. Widest items first, so that each tensor is aligned to its items."""
    order = sorted(specs, key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for spec in order:
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [start, start + spec.bytes]}
        start += spec.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for spec in order:
        yield data(spec.name)


def tensors_in(content: memoryview) -> Iterator[tuple[Spec, memoryview]]:
    """Each tensor of a file with its bytes (no copy), in the file's order. The content was verified by its hash."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8 : 8 + length]))
    data = content[8 + length :]
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield Spec(name, entry["dtype"], tuple(entry["shape"])), data[start:end]


def metadata_in(content: memoryview) -> dict[str, str]:
    """The words in a file's header."""
    length = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(bytes(content[8 : 8 + length])).get("__metadata__", {})
    return found


def mapped(path: Path) -> memoryview:
    """The content of a file: read from the disk when used, never all in memory."""
    with open(path, "rb", opener=regular) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def fingerprint(spec: Spec, data: memoryview) -> str:
    """One line that fixes the tensor: name, dtype, shape, sha256 of the bytes."""
    return json.dumps([spec.name, spec.dtype, list(spec.shape), hashlib.sha256(data).hexdigest()])


def digest(fingerprints: Mapping[str, str]) -> str:
    """Hex sha256 over the fingerprints in the order of their names: equal for equal states, however they are stored.

    A hash of hashes, so that each writer of a sharded state can hash what it has, and so that two states that differ
    can be asked where.
    """
    return hashlib.sha256("\n".join(fingerprints[name] for name in sorted(fingerprints)).encode()).hexdigest()
