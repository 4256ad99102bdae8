"""Build a model on the meta device, then give it memory and initial values.

On the meta device a model takes no memory and draws no random numbers. An initial value follows
from (seed, name) or comes from a file. `llama.py` builds a Llama.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from lockstep.models.kernels import AttentionKernel
from lockstep.models.translator import Translator, init_param

if TYPE_CHECKING:
    from lockstep.config import schema as config

Model = TypeVar("Model", bound=nn.Module)


def choose_attention(device_type: str, length: int) -> tuple[AttentionKernel, str]:
    """Return (kernel, reason) for sentences of up to `length` tokens on this kind of device.

    With torch's flash kernel a whole step on a CPU takes 1.4 to 1.8 times as long at 16 tokens
    (torch 2.13), because its backward pass is slow for short sentences.
    """
    if device_type != "cpu":
        return "sdpa", f"torch's fused attention is fastest on {device_type}"
    if length <= 512:
        return "plain", f"on a CPU torch's fused attention is slower up to {length} tokens"
    return "sdpa", f"the attention scores of {length} tokens would not fit a CPU's cache"


def translator_on_meta(
    model: config.ModelOptions, vocab_size: int, device_type: str, length: int
) -> Translator:
    """Build a run's translator on the meta device, for sentences of up to `length` tokens."""
    attention = (
        choose_attention(device_type, length)[0] if model.attention == "auto" else model.attention
    )
    with torch.device("meta"):
        return Translator(vocab_size=vocab_size, **(asdict(model) | {"attention": attention}))


def build_translator(
    model: config.ModelOptions,
    *,
    vocab_size: int,
    device: torch.device,
    seed: int,
    length: int = 128,
) -> Translator:
    translator = translator_on_meta(model, vocab_size, device.type, length)
    return materialize(translator, device, lambda name, shape: init_param(name, shape, seed))


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
