"""The copy of a state on the CPU: exact for every layout, in memory that is reused."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint.async_save import copy_to_host
from lockstep.runtime.tensor_bytes import DTYPES


def mixed_state(seed: int) -> dict[str, Tensor]:
    """Tensors of each dtype, empty, 0-dim, transposed, cut from a larger one, and channels_last."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2, (48, 64), generator=generator)
    state = {str(dtype): raw.to(torch.float32).to(dtype) for dtype in DTYPES}
    values = torch.randn(2, 3, 40, 50, generator=generator)
    state |= {
        "empty": torch.empty(0, 3),
        "number": values[0, 0, 0, 0].clone(),
        "transposed": values[0, 0].T,
        "cut": values[:, 1, ::2, 5:9],
    }
    return state | {
        "channels_last": values.contiguous(memory_format=torch.channels_last),
        "odd": raw[:1, :5].to(torch.uint8),
    }


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_equal_the_state_and_the_next_state(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(threads)))
    before, copies = torch.get_num_threads(), dict[str, Tensor]()
    torch.set_num_threads(1)
    try:
        for seed in (1, 2):
            state, last = mixed_state(seed), copies
            copies, events = copy_to_host(state, last)
            assert copies.keys() == state.keys() and events == []
            for name, tensor in state.items():
                assert copies[name].dtype == tensor.dtype and copies[name].is_contiguous(), name
                assert torch.equal(
                    copies[name].view(-1).view(torch.uint8),
                    tensor.contiguous().view(-1).view(torch.uint8),
                ), name
                assert not last or copies[name] is last[name], name
    finally:
        torch.set_num_threads(before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("copy")]


def test_memory_is_reused_for_equal_shapes_only() -> None:
    first, _ = copy_to_host(
        {
            "same": torch.ones(3),
            "longer": torch.ones(3),
            "gone": torch.ones(3),
            "wider": torch.ones(3),
        },
        {},
    )
    second, _ = copy_to_host(
        {
            "same": torch.zeros(3),
            "longer": torch.zeros(4),
            "wider": torch.zeros(3, dtype=torch.float64),
        },
        first,
    )
    assert second["same"] is first["same"] and second.keys() == {"same", "longer", "wider"}
    assert all(not tensor.any() for tensor in second.values())
    assert (second["longer"].shape, second["wider"].dtype) == ((4,), torch.float64)
    assert copy_to_host({}, second) == ({}, [])
