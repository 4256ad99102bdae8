"""Frozen weights and buffers: equal on all replicas, not changed by a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.replica import DIGEST_FACTOR, digest_of
from lockstep.runtime.tensor_bytes import as_bytes
from lockstep.units import shown

SLICE_BYTES = 32 * 2**20  # hashed per comparison: 3 ms at 10 GB/s
SMALL_BYTES = 2**20


class Buffer(NamedTuple):
    """Snapshot of a buffer.

    version  torch's counter of changes in place, which the statistics of batch_norm do not advance
    value    a copy, for small buffers in the first step
    """

    tensor: Tensor
    version: int
    value: Tensor | None
    persistent: bool
    module: str


class Untrained:
    """The frozen weights and buffers of `module`.

    frozen         the frozen weights, as far as this worker holds them
    local_buffers  buffers may change in a forward pass, and are then each worker's own
    """

    def __init__(self, module: nn.Module, frozen: Sequence[Tensor], *, local_buffers: bool = False) -> None:
        self.frozen, self.local_buffers = list(frozen), local_buffers
        self.holders = [(path, one) for path, one in module.named_modules() if one._buffers]
        self.first_step = True
        self.slices = slices_of([tensor.nbytes for tensor in self._tensors()])

    def buffers(self) -> dict[str, Buffer]:
        """The buffers by name, as they are now."""
        found = {}
        for path, module in self.holders:
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    persistent = name not in module._non_persistent_buffers_set
                    value = tensor.detach().clone() if self.first_step and tensor.nbytes <= SMALL_BYTES else None
                    found[f"{path}.{name}".lstrip(".")] = Buffer(tensor, tensor._version, value, persistent, type(module).__name__)
        return found

    def refuse_changes(self, before: dict[str, Buffer], step: int) -> None:
        """UsageError when the micro-batches of `step` have changed buffers.

        A buffer that is not persistent may be replaced (a cache of positions), but not changed in place.
        """
        now = {} if self.local_buffers else self.buffers()
        changed = [name for name, one in now.items() if name in before and is_changed(before[name], one)]
        if changed:
            kinds = ", ".join(sorted({now[name].module for name in changed}))
            raise UsageError(
                f"buffers changed in the forward passes of step {step + 1}: {shown(changed)} ({kinds})",
                "each worker sees other micro-batches, so the bits would depend on the number of workers; the update was not made",
                "use GroupNorm or LayerNorm, call eval() on these modules, or accept other bits: Team(..., local_buffers=True)",
            )
        self.first_step = False

    def digest(self, number: int | None = None) -> int:
        """64 bits over slice `number` (modulo their count) of these tensors; None: over all of them. 0 when there are none."""
        tensors, total = self._tensors(), 0
        count = max(1, len(self.slices))
        for pieces in self.slices if number is None else self.slices[number % count :][:1]:
            words = digest_of(words_between(tensors[number], start, stop) for number, start, stop in pieces)
            total = (total * DIGEST_FACTOR + words) % 2**64
        return total

    def _tensors(self) -> list[Tensor]:
        kept = [] if self.local_buffers else [one.tensor.detach() for one in self.buffers().values() if one.persistent]
        return [*self.frozen, *kept]


def is_changed(before: Buffer, now: Buffer) -> bool:
    """Whether a buffer changed between two snapshots."""
    if now.tensor is not before.tensor:
        return now.persistent
    return now.version != before.version or (before.value is not None and not torch.equal(as_bytes(before.value), as_bytes(now.tensor)))


def slices_of(sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Pieces (number of the tensor, first byte, end) of tensors of these sizes in bytes, put together to slices of SLICE_BYTES at most."""
    slices: list[list[tuple[int, int, int]]] = []
    room = 0
    for number, size in enumerate(sizes):
        for start in range(0, size, SLICE_BYTES):
            stop = min(size, start + SLICE_BYTES)
            if stop - start > room:
                slices.append([])
                room = SLICE_BYTES
            slices[-1].append((number, start, stop))
            room -= stop - start
    return slices


def words_between(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Some bytes of a tensor, as int64 where torch can view them so: a device hashes those faster."""
    raw = as_bytes(tensor)[start:stop]
    return raw if len(raw) % 8 or raw.storage_offset() % 8 else raw.view(torch.int64)
