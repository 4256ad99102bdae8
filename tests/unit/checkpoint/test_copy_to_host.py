"""The host memory of a copied state: exact copies of every layout, few blocks, reused."""

from __future__ import annotations

import operator
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint import host_buffers
from lockstep.checkpoint.host_buffers import HostBuffers, copy_to_host
from lockstep.runtime.tensor_bytes import DTYPES


def mixed_state(seed: int) -> dict[str, Tensor]:
    """Tensors of each dtype, empty, 0-dim, transposed, cut from a larger one, and channels_last."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2, (48, 64), generator=generator)
    state = {str(dtype): raw.to(torch.float32).to(dtype) for dtype in DTYPES}
    values = torch.randn(2, 3, 40, 50, generator=generator)
    state |= {"empty": torch.empty(0, 3), "number": values[0, 0, 0, 0].clone(), "transposed": values[0, 0].T, "cut": values[:, 1, ::2, 5:9]}
    return state | {"channels_last": values.contiguous(memory_format=torch.channels_last), "odd": raw[:1, :5].to(torch.uint8)}


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_equal_the_state_and_the_next_state(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffers, "PIECE_BYTES", 1024)
    monkeypatch.setattr(host_buffers, "BLOCK_BYTES", 8192)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(threads)))
    before, buffers = torch.get_num_threads(), HostBuffers()
    torch.set_num_threads(1)
    try:
        for seed in (1, 2):
            state = mixed_state(seed)
            copies = buffers.place(state)
            copy_to_host(copies, state)
            for name, tensor in state.items():
                assert copies[name].dtype == tensor.dtype and copies[name].is_contiguous(), name
                assert torch.equal(copies[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), name
    finally:
        torch.set_num_threads(before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("copy")]


def test_blocks_are_few_powers_of_two_and_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffers, "BLOCK_BYTES", 2**16)
    buffers = HostBuffers()
    state = {f"{number}": torch.ones(100 + number) for number in range(300)} | {"large": torch.ones(20_000), "last": torch.ones(1)}
    addresses = [tensor.data_ptr() for tensor in buffers.place(state).values()]
    blocks, state_bytes = list(buffers._blocks), sum(tensor.nbytes for tensor in state.values())
    sizes = [len(block) for block in blocks]
    assert state_bytes <= sum(sizes) <= 1.3 * state_bytes and len(sizes) <= 8 and all(size & (size - 1) == 0 for size in sizes)
    assert [tensor.data_ptr() for tensor in buffers.place(state).values()] == addresses
    buffers.place({**state, "one more": torch.ones(3)})
    assert all(map(operator.is_, buffers._blocks, blocks)) and len(buffers._blocks) == len(blocks)
    buffers.place({**state, "much more": torch.ones(100_000)})
    assert all(map(operator.is_, buffers._blocks, blocks)) and len(buffers._blocks) == len(blocks) + 1
    buffers.place({"x": torch.ones(3)})
    assert len(buffers._blocks) == 1  # the memory of the other tensors is free
    assert list(buffers.place({})) == []


def test_memory_that_is_not_used_does_not_exist() -> None:
    buffers = HostBuffers()
    before = resident_bytes()
    copies = buffers.place({"large": torch.empty(100_000_000)})  # 400 MB, in a block of 512 MB
    assert resident_bytes() - before < 50_000_000
    copies["large"][:1000].fill_(1)
    assert resident_bytes() - before < 50_000_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
