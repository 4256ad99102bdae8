"""Host memory for the copy of a state: large blocks, kept between saves.

The first use of memory costs more than the copy, because the system clears each page. Blocks have
the sizes that torch's allocator of pinned memory provides, powers of two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

BLOCK_BYTES = 2**28
PIECE_BYTES = 2**24
ALIGNMENT = 64
MAX_THREADS = 4


class HostBuffers:
    """Memory for one state; it grows with the state. `place` reuses what the last call returned."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._pinned = False

    def place(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return an uninitialized CPU tensor for each tensor; pinned when one of them is on a GPU."""
        if self._pinned != (pinned := any(tensor.is_cuda for tensor in tensors.values())):
            self._blocks, self._pinned = [], pinned
        sizes = {name: -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for name, tensor in tensors.items()}
        rest, start, count = sum(sizes.values()), 0, 0
        buffers = {}
        for name, tensor in tensors.items():
            if not count or start + sizes[name] > len(self._blocks[count - 1]):
                self._provide(count, max(sizes[name], min(rest, BLOCK_BYTES), ALIGNMENT))
                start, count = 0, count + 1
            buffers[name] = self._blocks[count - 1][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            start, rest = start + sizes[name], rest - sizes[name]
        del self._blocks[count:]
        return buffers

    def _provide(self, number: int, needed_bytes: int) -> None:
        """Keep block `number` when it is large enough, else replace it and those after it."""
        if number == len(self._blocks) or len(self._blocks[number]) < needed_bytes:
            del self._blocks[number:]
            self._blocks.append(torch.empty(1 << (needed_bytes - 1).bit_length(), dtype=torch.uint8, pin_memory=self._pinned))

    def touch(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Use the memory for `tensors` once; yield after each piece."""
        for buffer in self.place(tensors).values():
            for piece in split(buffer):
                piece.zero_()
                yield


def split(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return views of a contiguous tensor in pieces."""
    return torch.split(tensor.view(-1), PIECE_BYTES // tensor.itemsize)


def copy_to_host(buffers: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[torch.cuda.Event]:
    """Copy each tensor to its buffer. Return an event per GPU that marks the end of its copies; its
    stream orders them before the next update of the weights.

    Where training has one thread per process, idle cores help: one core does not use the whole
    bandwidth of the memory.
    """
    pieces = list[tuple[Tensor, Tensor]]()
    for name, tensor in tensors.items():
        if tensor.is_cuda:
            buffers[name].copy_(tensor.detach(), non_blocking=True)
        elif tensor.is_contiguous():
            pieces += zip(split(buffers[name]), split(tensor.detach()), strict=True)
        else:
            pieces.append((buffers[name], tensor.detach()))
    threads = min(MAX_THREADS, len(pieces), len(os.sched_getaffinity(0)))
    if threads > 1 and torch.get_num_threads() == 1:
        with ThreadPoolExecutor(threads, "copy") as pool:
            list(pool.map(lambda piece: piece[0].copy_(piece[1]), pieces))
    else:
        for buffer, tensor in pieces:
            buffer.copy_(tensor)
    return [torch.cuda.current_stream(device).record_event() for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}]
