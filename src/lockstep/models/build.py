"""Build a translator on the meta device, or with its initial values.

`llama.py` builds a Llama.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from lockstep.models.kernels import AttentionKernel
from lockstep.models.translator import Translator, init_param
from lockstep.parallel.materialize import materialize

if TYPE_CHECKING:
    from lockstep.config import schema as config


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
