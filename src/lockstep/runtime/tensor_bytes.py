"""Tensors as bytes, and the dtype names of the safetensors format."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as uint8 (bytes,) on its device; a copy if not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes in row-major order: a view if it is contiguous and on the CPU."""
    return as_bytes(tensor.cpu()).numpy().data


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(item)
