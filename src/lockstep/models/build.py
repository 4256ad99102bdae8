"""From a model on the meta device to one with memory and values.

A model is built on the meta device (no memory, no random numbers), then one tensor after another is given memory where it
shall live and its first value, which depends on (seed, name) or comes from a file. The translator of a run's [model]
section is built here; a Llama in `llama.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from lockstep.config import schema as config
from lockstep.models.kernels import Choice
from lockstep.models.translator import Translator, first_value

log = logging.getLogger("lockstep")
Model = TypeVar("Model", bound=nn.Module)


def choose_attention(device_type: str, length: int) -> tuple[Choice, str]:
    """(choice, reason): how attention is computed on this kind of device for sentences of up to `length` tokens.

    On a CPU torch's flash kernel has a slow backward pass for short sentences: the whole step takes 1.4 to 1.8 times as
    long at 16 tokens (torch 2.13). At long lengths the matrix of scores no longer fits the cache, and flash wins.
    """
    if device_type != "cpu":
        return "sdpa", f"torch's fused attention is fastest on {device_type}"
    if length <= 512:
        return "plain", f"on a CPU torch's fused attention is slower up to {length} tokens"
    return "sdpa", f"the scores of {length} tokens would not fit a CPU's cache"


def shape(model: config.Model, vocabulary: int, attention: Choice) -> Translator:
    """The model on torch's current default device, with whatever values its parameters have there."""
    return Translator(
        vocabulary=vocabulary,
        width=model.width,
        heads=model.heads,
        encoder_layers=model.encoder_layers,
        decoder_layers=model.decoder_layers,
        feed_forward=model.feed_forward,
        dropout=model.dropout,
        attention=attention,
    )


def on_meta(model: config.Model, vocabulary: int, device_type: str, length: int) -> Translator:
    """The translator of a run on the meta device, in training mode.

    length  of the longest usual sentence in tokens, on which attention = "auto" depends
    """
    attention, reason = (model.attention, "") if model.attention != "auto" else choose_attention(device_type, length)
    if reason:
        log.info("attention %s: %s", attention, reason)
    with torch.device("meta"):
        return shape(model, vocabulary, attention)


def build(model: config.Model, *, vocabulary: int, device: torch.device, seed: int, length: int = 128) -> Translator:
    """The translator of a run, in training mode on `device`, with its first values."""
    built = on_meta(model, vocabulary, device.type, length)
    return materialise(built, device, lambda name, size: first_value(name, size, seed))


@torch.no_grad()
def materialise(model: Model, device: torch.device, first_value: Callable[[str, torch.Size], Tensor]) -> Model:
    """The model, which is on the meta device, with memory on `device` and its first values. In place; tied tensors stay tied.

    first_value  of the parameter or buffer of this name and shape, on the CPU; one at a time is asked for, each tied one once
    """
    made: dict[Tensor, Tensor] = {}
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for leaf, tensor in held.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    name = f"{path}.{leaf}" if path else leaf
                    filled = torch.empty_like(tensor, device=device).copy_(first_value(name, tensor.shape))
                    made[tensor] = nn.Parameter(filled, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else filled
                held[leaf] = made[tensor]
    return model
