"""A 64-bit digest of tensors that detects any single flipped bit, at the speed of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.elastic.consensus import as_int64

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


@dataclass(frozen=True)
class Digest:
    """A digest of which a device may still have a part: the sum of both, modulo 2**64."""

    host: int
    device: Tensor | None = None  # int64 ()

    def __add__(self, other: Digest) -> Digest:
        parts = [part for part in (self.device, other.device) if part is not None]
        device = torch.stack([part.to(parts[0].device) for part in parts]).sum() if parts else None
        return Digest(self.host + other.host, device)

    def __mul__(self, factor: int) -> Digest:
        device = None if self.device is None else self.device * as_int64(factor)
        return Digest(self.host * factor, device)

    def read(self) -> int:
        """Return its 64 bits. It waits for the device."""
        return (self.host + (0 if self.device is None else int(self.device))) % 2**64


NOTHING = Digest(0)


def digest_of(tensors: Iterable[Tensor]) -> int:
    """Return a 64-bit digest of tensors in order: of each the sum of its words, or torch's hash."""
    return start_digest(tensors).read()


def start_digest(tensors: Iterable[Tensor]) -> Digest:
    """Return `digest_of` these tensors, whose hashes stay on their device."""
    words: list[int] = []
    hashes: list[Tensor | None] = []
    for tensor in tensors:
        # A flipped bit changes one word by a power of two, so it changes the sum modulo 2**64.
        own = words_of(tensor)
        words.append(0 if own is None else int(np.add.reduce(own, dtype=np.uint64)))
        is_hashed = own is None and tensor.numel()
        hashes.append(torch.hash_tensor(tensor.detach()).view(torch.int64) if is_hashed else None)
    host = int(in_order(torch.tensor(words, dtype=torch.uint64).view(torch.int64)))
    found = [value for value in hashes if value is not None]
    if not found:
        return Digest(host)
    first = max(found, key=lambda value: value.is_cuda)  # some may be on the host
    none = torch.zeros_like(first)
    on_device = [none if value is None else value.to(first.device) for value in hashes]
    return Digest(host, in_order(torch.stack(on_device)))


def in_order(values: Tensor) -> Tensor:
    """Return a sum of int64 (n,) modulo 2**64 in which the order counts, on their device: each has
    an odd factor, so a change of one changes the sum."""
    factors = torch.arange(1, len(values) + 1, device=values.device) * as_int64(DIGEST_FACTOR)
    return (values * (factors ^ factors >> 29 | 1)).sum()
