"""The definition of the digest; it waits for the device once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.parallel.digest import DIGEST_FACTOR, digest_of, start_digest


class CountReads(TorchDispatchMode):
    """Counts values that the host reads one by one: on a device, each waits for all work before it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def digest_one_by_one(tensors: list[torch.Tensor]) -> int:
    """Return the digest as defined: of sums of words, and of hashes of other tensors, each times an
    odd factor of its place."""
    total = 0
    for place, tensor in enumerate(tensors, 1):
        if tensor.is_contiguous():
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            width = next(width for width in (8, 4, 2, 1) if len(raw) % width == 0)
            value = sum(np.frombuffer(raw, f"<u{width}").tolist())
        else:
            value = int(torch.hash_tensor(tensor).view(torch.int64))
        factor = (place * DIGEST_FACTOR + 2**63) % 2**64 - 2**63
        total += value * (factor ^ factor >> 29 | 1)
    return total % 2**64


def mixed_tensors() -> list[torch.Tensor]:
    """Return tensors of odd sizes, an empty one and transposed ones."""
    generator = torch.Generator().manual_seed(3)
    words = [
        torch.randint(-(2**62), 2**62, (size,), generator=generator)
        for size in (1, 7, 1000, 0, 4097)
    ]
    halves = [torch.randn(size, generator=generator).to(torch.bfloat16) for size in (1, 3, 1001)]
    columns = [torch.randn(size, 5, generator=generator).T for size in (2, 3, 300)]
    return [words[0], columns[0], *words[1:], columns[1], *halves, columns[2]]


def test_a_digest_adds_sums_and_hashes_by_place() -> None:
    tensors = mixed_tensors()
    assert digest_of(tensors) == digest_of(iter(tensors)) == digest_one_by_one(tensors)


def test_a_change_or_a_swap_changes_the_digest() -> None:
    tensors = mixed_tensors()
    whole = digest_of(tensors)
    for i, tensor in enumerate(tensors):
        if tensor.numel():
            bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
            bits[(0,) * bits.dim()] ^= 1
            assert digest_of(tensors) != whole
            bits[(0,) * bits.dim()] ^= 1
        for j in range(i):
            swapped = [*tensors]
            swapped[i], swapped[j] = tensors[j], tensors[i]
            assert digest_of(swapped) != whole
    assert digest_of(tensors) == whole


def test_parts_on_a_device_are_added_there() -> None:
    """Tensors that are not contiguous take the path of those on an accelerator."""
    tensors = mixed_tensors()
    with CountReads() as counted:
        started = start_digest(tensors[:4]) * 2**63 + start_digest(tensors[4:]) * DIGEST_FACTOR
    assert started.device is not None and counted.reads <= 2, "a sum of words on the host is one"
    parts = [digest_of(tensors[:4]) * 2**63, digest_of(tensors[4:]) * DIGEST_FACTOR]
    assert started.read() == sum(parts) % 2**64


def test_hashes_are_read_from_the_device_together() -> None:
    """Tensors that are not contiguous take the path of those on an accelerator."""
    tensors = [tensor for tensor in mixed_tensors() if not tensor.is_contiguous()] * 20
    with CountReads() as counted:
        value = digest_of(tensors)
    assert value == digest_one_by_one(tensors) and len(tensors) == 60
    assert counted.reads <= 2, "one read per tensor"
