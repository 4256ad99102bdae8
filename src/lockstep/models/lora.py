"""Low-rank adapters (Hu et al. 2021, "LoRA"): the matrices of a trained model stay, and each gets a small sum beside it that learns.

    y = x W^T + alpha / rank * (x D^T) U^T        W (out, in) frozen, D = lora_down (rank, in), U = lora_up (out, rank)

U begins as zeros, so that the adapted model begins as the model that it adapts. Only D and U are trained, so gradients, optimizer and (if
wished) checkpoints have a hundredth of the model's size. Merged, W + alpha / rank * U D is a model like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TARGETS = {  # the names in a run -> the modules of a layer in llama.py
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "out": "attention.out",
    "gate": "feed_forward.gate",
    "up": "feed_forward.up",
    "down": "feed_forward.out",
}
DOWN, UP = ".lora_down", ".lora_up"


@dataclass(frozen=True)
class Lora:
    """Which matrices are adapted, and how: `targets` are keys of TARGETS."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapted(nn.Linear):
    """A linear map without bias whose weight is frozen, and its adapter."""

    def __init__(self, inner: nn.Linear, lora: Lora) -> None:
        super().__init__(inner.in_features, inner.out_features, bias=False, device="meta", dtype=inner.weight.dtype)
        self.weight = inner.weight
        self.scale = lora.scale
        self.lora_down = nn.Parameter(inner.weight.new_empty(lora.rank, inner.in_features))
        self.lora_up = nn.Parameter(inner.weight.new_empty(inner.out_features, lora.rank))

    def forward(self, states: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        narrow = F.linear(states, self.lora_down)  # (..., rank)
        return F.linear(states, self.weight) + self.scale * F.linear(narrow, self.lora_up)


def adapt(model: nn.Module, lora: Lora) -> nn.Module:
    """The Llama with adapters beside its targets, all else frozen. In place; the adapters have no values yet."""
    model.requires_grad_(False)
    ends = tuple(f".{TARGETS[name]}" for name in lora.targets)
    for path, module in list(model.named_modules()):
        if path.endswith(ends) and isinstance(module, nn.Linear):
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, Adapted(module, lora))
    return model


def is_adapter(name: str) -> bool:
    return name.endswith((DOWN, UP))


def first_value(name: str, size: torch.Size, seed: int) -> Tensor:
    """Float32 on the CPU: zeros for what goes up, uniform within inputs**-0.5 for what goes down, by (seed, name)."""
    if name.endswith(UP):
        return torch.zeros(size)
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    bound = size[1] ** -0.5
    return torch.empty(size).uniform_(-bound, bound, generator=generator)


class Merged(Mapping[str, Tensor]):
    """The weights of a model with its adapters added to them, under the model's names. One tensor is made at a time, when it is asked for.

    base      weights without adapters
    adapters  `...lora_down` and `...lora_up` by name; others in it are looked up before those of `base`
    """

    def __init__(self, base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], lora: Lora) -> None:
        self.base, self.adapters, self.lora = base, adapters, lora
        self.names = list(dict.fromkeys(name for name in (*base, *adapters) if not is_adapter(name)))

    def __getitem__(self, name: str) -> Tensor:
        weight = self.adapters[name] if name in self.adapters else self.base[name]
        path = name.removesuffix(".weight")
        if path + UP not in self.adapters:
            return weight
        up, down = (self.adapters[path + end].float() for end in (UP, DOWN))
        return torch.addmm(weight.float(), up, down, alpha=self.lora.scale).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
