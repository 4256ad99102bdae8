"""A 64-bit digest of tensors that detects any single flipped bit, at the speed of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

DIGEST_FACTOR = 0x9E3779B97F4A7C15  # odd, so that multiplication modulo 2**64 is invertible
WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def words_of(parameter: Tensor) -> np.ndarray[Any, Any] | None:
    """View a CPU parameter as integers, whose sum is 8x as fast as torch's hash; else None."""
    if parameter.is_cuda or not parameter.is_contiguous():
        return None
    integers = INTEGERS.get(parameter.element_size(), torch.uint8)
    raw = parameter.detach().view(-1).view(integers).numpy()
    return raw.view(WORDS[gcd(raw.nbytes, 8)])


def word_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, read as integers, modulo 2**64: int64 () on its
    device.

    It depends neither on the order of the elements nor on zeros beside them, so a whole gradient
    has the same sum as the flat one of an FSDP unit.
    """
    without_negative_zeros = tensor.detach() + 0.0  # a sum of gradients may have either zero
    return without_negative_zeros.view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def total_of(sums: Sequence[Tensor]) -> int:
    """Return the total of results of `word_sum`, which are copied to the host together."""
    return int(torch.stack(list(sums)).sum()) if sums else 0


def digest_of(tensors: Iterable[Tensor]) -> int:
    """Return a 64-bit digest of tensors in order: of each the sum of its words, or torch's hash.

    Hashes are computed on their device, and copied to the host together.
    """
    values: list[int] = []
    hashes: dict[int, Tensor] = {}
    for number, tensor in enumerate(tensors):
        # A flipped bit changes one word by a power of two, so it changes the sum modulo 2**64.
        words = words_of(tensor)
        values.append(0 if words is None else int(np.add.reduce(words, dtype=np.uint64)))
        if words is None and tensor.numel():
            # item() fails above 2**63.
            hashes[number] = torch.hash_tensor(tensor.detach()).view(torch.int64)
    if hashes:
        # Some may be on the host.
        device = max(hashes.values(), key=lambda value: value.is_cuda).device
        together = torch.stack([value.to(device) for value in hashes.values()]).tolist()
        for number, value in zip(hashes, together, strict=True):
            values[number] = value
    total = 0
    for value in values:
        # The factor makes the order of the tensors count.
        total = (total * DIGEST_FACTOR + value) % 2**64
    return total
