"""Give memory and initial values to a model that was built on the meta device.

There a model takes no memory and draws no random numbers. An initial value follows from
(seed, name) or comes from a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def materialize(
    model: Model, device: torch.device, init_param: Callable[[str, torch.Size], Tensor]
) -> Model:
    """Move a model from the meta device to `device` and initialize it, in place.

    init_param  returns the initial value of the parameter or buffer of this name and shape, on the
                CPU; called for one tensor at a time
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # keeps ties, and the parameters of optimizers
    model.to_empty(device=device)
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.copy_(init_param(name, tensor.shape))
    return model


def generator_of(seed: int, name: str) -> torch.Generator:
    """Return the generator, on the CPU, of a parameter's initial value."""
    return torch.Generator().manual_seed(hash_of(f"{seed} {name}"))


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
