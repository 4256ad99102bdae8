"""examples/own_loop.py, in which slot 2 flips a bit of its state before it sends it to a joiner.

The file `flipped` in the working directory has a part of the names of the tensors that are flipped.
The flip happens once: the worker deletes the file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from lockstep.elastic.world import transfer_roles
from lockstep.training import replica_group

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import own_loop
from own_loop import train  # noqa: F401

FLIPPED = Path("flipped")
make_model, transfer_state = own_loop.make_model, replica_group.transfer_state


def make_model_with_buffers() -> torch.nn.Module:
    model = make_model()
    for number in range(3):
        model.register_buffer(f"seen-{number}", torch.zeros(2))
    return model


def flip_and_transfer(runtime: Any, get_state: Any, *rest: Any) -> Any:
    _, _, joiners = transfer_roles(runtime.member_progress)
    if joiners and runtime.membership.worker_env.slot == 2 and FLIPPED.exists():
        for name, tensor in get_state().items():
            if FLIPPED.read_text() in name:
                tensor.view(torch.int32).view(-1)[0] ^= 1
        FLIPPED.unlink()
    return transfer_state(runtime, get_state, *rest)


own_loop.make_model = make_model_with_buffers
replica_group.transfer_state = flip_and_transfer
