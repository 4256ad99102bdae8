"""LoRA (Hu et al. 2021): frozen matrices, each with a trained low-rank adapter beside it.

    y = x W^T + alpha / rank * (x D^T) U^T        W (out, in), D (rank, in), U (out, rank)

U is initialized to zero, so the adapted model starts equal to the base model. Gradients, optimizer
state and (if wanted) checkpoints hold D and U only. Merged, W + alpha / rank * U D is a Llama.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.schema import LoraOptions
from lockstep.models.hub import LazyTensors

TARGETS = {  # names in a run -> modules of a layer in llama.py
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "out": "attention.out",
    "gate": "feed_forward.gate",
    "up": "feed_forward.up",
    "down": "feed_forward.out",
}
DOWN, UP = ".lora_down", ".lora_up"


class LoRALinear(nn.Linear):
    """A linear layer, its weight and bias frozen, with an adapter."""

    def __init__(self, inner: nn.Linear, lora: LoraOptions) -> None:
        super().__init__(inner.in_features, inner.out_features, bias=False, device="meta", dtype=inner.weight.dtype)
        self.weight, self.bias = inner.weight, inner.bias
        self.scale = lora.alpha / lora.rank
        self.lora_down = nn.Parameter(inner.weight.new_empty(lora.rank, inner.in_features))
        self.lora_up = nn.Parameter(inner.weight.new_empty(inner.out_features, lora.rank))

    def forward(self, states: Tensor) -> Tensor:
        narrow = F.linear(states, self.lora_down)  # (..., rank)
        return F.linear(states, self.weight, self.bias) + self.scale * F.linear(narrow, self.lora_up)


def add_adapters(model: nn.Module, lora: LoraOptions) -> nn.Module:
    """Freeze a Llama and add adapters to its targets, in place and not initialized."""
    model.requires_grad_(False)
    suffixes = tuple(f".{TARGETS[name]}" for name in lora.targets)
    for path, module in list(model.named_modules()):
        if path.endswith(suffixes) and isinstance(module, nn.Linear):
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, LoRALinear(module, lora))
    return model


def is_adapter(name: str) -> bool:
    return name.endswith((DOWN, UP))


def init_param(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return an adapter's initial value by (seed, name): up 0, down uniform in fan_in**-0.5."""
    if name.endswith(UP):
        return torch.zeros(shape)
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def merged_weights(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], lora: LoraOptions) -> LazyTensors:
    """Return a model's weights under their names, each merged with its adapter on access.

    adapters  `...lora_down` and `...lora_up` by name; other tensors in it precede those of `base`
    """

    def merge(name: str) -> Tensor:
        weight = adapters[name] if name in adapters else base[name]
        path = name.removesuffix(".weight")
        if path + UP not in adapters:
            return weight
        up, down = (adapters[path + end].float() for end in (UP, DOWN))
        return torch.addmm(weight.float(), up, down, alpha=lora.alpha / lora.rank).to(weight.dtype)

    return LazyTensors((name for name in (*base, *adapters) if not is_adapter(name)), merge)
