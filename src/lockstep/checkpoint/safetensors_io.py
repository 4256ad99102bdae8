"""Read and write tensors in the safetensors layout: eight bytes of length, a JSON header, the bytes
of each tensor (https://huggingface.co/docs/safetensors). The library reads these files, and vice
versa (tested).

The library is not used: without torch, `lockstep checkpoint list|verify|digest` start fast; one
pass writes and hashes chunks; a full disk is an OSError with its number; no call holds the
interpreter lock.
"""

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.files import open_regular

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


class TensorSpec(NamedTuple):
    """Name, dtype (safetensors' spelling) and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def split_into_files(specs: Iterable[TensorSpec], file_bytes: int) -> list[list[TensorSpec]]:
    """Divide `specs` by name into files of at most `file_bytes`; larger tensors are alone."""
    files: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in sorted(specs):
        if files[-1] and size + spec.bytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(spec)
        size += spec.bytes
    return files


def file_chunks(
    specs: Sequence[TensorSpec],
    data: Callable[[str], memoryview],
    metadata: Mapping[str, str] | None = None,
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file in chunks. Widest items come first, so tensors are aligned."""
    order = sorted(specs, key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for spec in order:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": [start, start + spec.bytes],
        }
        start += spec.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for spec in order:
        yield data(spec.name)


def parse_file(content: memoryview) -> tuple[dict[str, str], list[tuple[TensorSpec, memoryview]]]:
    """Return metadata and tensors of a verified file: spec and bytes (no copy), in order."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8 : 8 + length]))
    data, metadata = content[8 + length :], header.pop("__metadata__", {})
    offsets = {name: slice(*entry["data_offsets"]) for name, entry in header.items()}
    return metadata, [
        (TensorSpec(name, entry["dtype"], tuple(entry["shape"])), data[offsets[name]])
        for name, entry in header.items()
    ]


def map_file(path: Path) -> memoryview:
    """Map a file into memory: its pages are read from the disk on use."""
    with open(path, "rb", opener=open_regular) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def tensor_fingerprint(spec: TensorSpec, data: memoryview) -> str:
    """Return one line that identifies the tensor: name, dtype, shape, sha256 of the bytes."""
    return json.dumps([spec.name, spec.dtype, list(spec.shape), hashlib.sha256(data).hexdigest()])


def digest_of_fingerprints(fingerprints: Mapping[str, str]) -> str:
    """Return the hex sha256 over the fingerprints, sorted by name: equal states, equal digests."""
    return hashlib.sha256(
        "\n".join(fingerprints[name] for name in sorted(fingerprints)).encode()
    ).hexdigest()
