"""Frozen weights and buffers: equal on all replicas and unchanged by forward passes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.digest import DIGEST_FACTOR, Digest, start_digest
from lockstep.runtime.tensor_bytes import as_bytes
from lockstep.runtime.torch_private import (
    modules_of,
    non_persistent_buffers,
    own_buffers,
    version_of,
)
from lockstep.units import join_names

SLICE_BYTES = 32 * 2**20  # hashed per comparison: 3 ms at 10 GB/s
SMALL_BYTES = 2**20


class BufferSnapshot(NamedTuple):
    tensor: Tensor
    version: int  # torch's counter of in-place changes, which batch_norm does not increment
    value: Tensor | None  # a copy, of small buffers in the first step
    persistent: bool
    module: str


class FrozenState:
    """The `frozen` weights of this worker, and the buffers of `module`.

    followed  names of buffers that forward passes change on all workers alike (RunningStatistics)
    local     names of buffers that may differ between workers
    """

    def __init__(
        self,
        module: nn.Module,
        frozen: Sequence[Tensor],
        *,
        followed: Collection[str] = (),
        local: Collection[str] = (),
    ) -> None:
        self.module = module
        self.frozen = list(frozen)
        self.local = set(local)
        self.unwatched = self.local.union(followed)
        self.holders = [
            (path, child) for path, child in module.named_modules() if own_buffers(child)
        ]
        self.first_step = True
        self.slices = group_into_slices([tensor.nbytes for tensor in self._tensors()])

    def buffers(self) -> dict[str, BufferSnapshot]:
        snapshots = {}
        for path, module in self.holders:
            for name, tensor in own_buffers(module).items():
                if tensor is None:
                    continue
                is_kept = self.first_step and tensor.nbytes <= SMALL_BYTES
                snapshots[f"{path}.{name}".lstrip(".")] = BufferSnapshot(
                    tensor,
                    version_of(tensor),
                    tensor.detach().clone() if is_kept else None,
                    name not in non_persistent_buffers(module),
                    type(module).__name__,
                )
        return snapshots

    def refuse_changes(self, before: dict[str, BufferSnapshot], step: int) -> None:
        """UsageError: `step` changed buffers, in place or by replacing them."""
        now = self.buffers()
        watched = [name for name in now if name in before and name not in self.unwatched]
        changed = [name for name in watched if is_changed(before[name], now[name])]
        if changed:
            kinds = ", ".join(sorted({now[name].module for name in changed}))
            raise UsageError(
                f"buffers changed in the forward passes of step {step + 1}: "
                f"{join_names(changed)} ({kinds})",
                "each worker sees different micro-batches, "
                "so the bits would depend on the number of workers; no update was made",
                'declare what they are: buffers={"NAME": "per_micro_batch"} for a value that each '
                'pass overwrites, {"NAME": 0.99} for an average with that decay, {"NAME": 1.0} '
                'for a count; {"NAME": "local"} accepts other bits for other numbers of workers',
            )
        self.first_step = False

    def digest(self, number: int | None = None) -> Digest:
        """Return a digest of slice `number` (modulo their count), or of all if None."""
        tensors, total = self._tensors(), Digest(0)
        count = max(1, len(self.slices))
        for ranges in self.slices if number is None else self.slices[number % count :][:1]:
            parts = [bytes_between(tensors[number], start, stop) for number, start, stop in ranges]
            total = total * DIGEST_FACTOR + start_digest(parts)
        return total

    def mode_digest(self) -> int:
        """Return 64 bits over the modules in eval mode: such a replica computes other gradients."""
        return hash(tuple(module.training for module in modules_of(self.module))) % 2**64

    def _tensors(self) -> list[Tensor]:
        buffers = self.buffers().items()
        compared = [b.tensor for name, b in buffers if b.persistent and name not in self.local]
        return [*self.frozen, *(tensor.detach() for tensor in compared)]


def is_changed(before: BufferSnapshot, now: BufferSnapshot) -> bool:
    if now.tensor is not before.tensor:
        return now.persistent or not is_same_cache(before.tensor, now.tensor)
    return now.version != before.version or (
        before.value is not None and not torch.equal(as_bytes(before.value), as_bytes(now.tensor))
    )


def is_same_cache(before: Tensor, now: Tensor) -> bool:
    """Return whether a cache has only been computed for other sizes: equal where both have
    values."""
    if (before.dtype, before.device, before.dim()) != (now.dtype, now.device, now.dim()):
        return False
    common = tuple(slice(min(sizes)) for sizes in zip(before.shape, now.shape, strict=True))
    return torch.equal(as_bytes(before[common]), as_bytes(now[common]))


def group_into_slices(sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Group bytes into slices of at most SLICE_BYTES: (tensor number, first byte, end)."""
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


def bytes_between(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return bytes of a tensor, as int64 where possible: a device hashes those faster."""
    if stop - start == tensor.nbytes and tensor.is_contiguous() and not tensor.is_cuda:
        return tensor
    raw = as_bytes(tensor)[start:stop]
    return raw if len(raw) % 8 or raw.storage_offset() % 8 else raw.view(torch.int64)
