"""From the run's [model] section to a model on a device.

The model is built on the meta device (no memory, no random numbers), then given memory where it shall live, then its
first values, which depend on (seed, parameter name) alone.
"""

from __future__ import annotations

import logging

import torch

from lockstep import config
from lockstep.models.kernels import Choice
from lockstep.models.translator import Translator, initialise

log = logging.getLogger("lockstep")


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


def build(model: config.Model, *, vocabulary: int, device: torch.device, seed: int, length: int = 128) -> Translator:
    """The model of a run, in training mode on `device`, with its first values.

    length  of the longest usual sentence in tokens, on which attention = "auto" depends
    """
    attention, reason = (model.attention, "") if model.attention != "auto" else choose_attention(device.type, length)
    if reason:
        log.info("attention %s: %s", attention, reason)
    with torch.device("meta"):
        built = shape(model, vocabulary, attention)
    built.to_empty(device=device)
    initialise(built, seed)
    return built
