"""LoRA (Hu et al. 2021): frozen matrices, each with a trained low-rank adapter beside it.

    y = x W^T + alpha / rank * (x D^T) U^T        W (out, in), D (rank, in), U (out, rank)

U is initialized to zero, so the adapted model starts equal to the base model. Gradients, optimizer
state and checkpoints hold D and U only. Merged, W + alpha / rank * U D is a Llama. PEFT's folders
of adapters hold D as lora_A and U as lora_B.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.adapter_config import ADAPTER_CONFIG, LORA_TARGETS, read_adapter_config
from lockstep.data.order import splitmix64
from lockstep.errors import CheckpointError, UsageError
from lockstep.models.hub import ADAPTER_FILE, LazyTensors, match_shapes, tensor_locations
from lockstep.models.llama_config import hf_name
from lockstep.models.transformers_model import TransformersModel
from lockstep.parallel.deferred_init import generator_of, number_of

if TYPE_CHECKING:
    from lockstep.config.schema import LoraOptions

DOWN, UP = ".lora_down", ".lora_up"


class LoRALinear(nn.Linear):
    """A linear layer, its weight and bias frozen, with an adapter.

    path  of the layer in the model; the masks of dropout follow from it
    """

    def __init__(self, inner: nn.Linear, lora: LoraOptions, path: str) -> None:
        super().__init__(
            inner.in_features,
            inner.out_features,
            bias=False,
            device="meta",
            dtype=inner.weight.dtype,
        )
        self.weight = inner.weight
        self.bias = inner.bias
        self.scale = lora.alpha / lora.rank
        self.dropout = lora.dropout
        self.number = number_of(path)
        self.mask_width = inner.in_features
        self.columns = slice(None)
        self.lora_down = nn.Parameter(inner.weight.new_empty(lora.rank, inner.in_features))
        self.lora_up = nn.Parameter(inner.weight.new_empty(inner.out_features, lora.rank))

    def forward(self, states: Tensor) -> Tensor:
        dropped = self.drop(states) if self.dropout and self.training else states
        narrow = F.linear(dropped, self.lora_down)  # (..., rank)
        return super().forward(states) + self.scale * F.linear(narrow, self.lora_up)

    def keep_columns(self, start: int, stop: int) -> None:
        """Take these columns of the masks: the layer holds these columns of the weight."""
        self.columns = slice(start, stop)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def drop(self, states: Tensor) -> Tensor:
        """Apply dropout, with a mask of the generators' seed (the micro-batch) and of this layer.

        So masks do not depend on which other layers this worker has, and recomputation repeats
        them.
        """
        seed = splitmix64(torch.initial_seed(), self.number) >> 1
        generator = torch.Generator(states.device).manual_seed(seed)
        kept = 1 - self.dropout
        mask = states.new_empty(*states.shape[:-1], self.mask_width)
        mask.bernoulli_(kept, generator=generator)
        return states * mask[..., self.columns].div(kept)


def add_adapters(model: nn.Module, lora: LoraOptions) -> nn.Module:
    """Freeze a model and add adapters to its targets, in place and not initialized.

    UsageError: the model has no such matrix.
    """
    model.requires_grad_(False)
    missing = {LORA_TARGETS.get(name, name): name for name in lora.targets}
    targets = {*missing}
    linear = {
        path: hf_name(f"{path}.weight").split(".")[-2]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output_layer(model)
    }
    for path, name in linear.items():
        if name in targets:
            module = cast(nn.Linear, model.get_submodule(path))
            missing.pop(name, None)
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, LoRALinear(module, lora, path))
    if missing:
        what = f"the model has no linear layers {', '.join(missing)}"
        hint = f"remove {', '.join(missing.values())} from lora.targets"
        hint += f"; the model has {', '.join(dict.fromkeys(linear.values()))}"
        raise UsageError(what, f"lora.targets = {', '.join(lora.targets)}", hint)
    return model


def output_layer(model: nn.Module) -> Any:
    """Return the layer of the logits, which gets no adapter."""
    if isinstance(model, TransformersModel):
        return model.inner.get_output_embeddings()
    return getattr(model, "output", None)


def is_adapter(name: str) -> bool:
    return name.endswith((DOWN, UP))


def init_param(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return an adapter's initial value by (seed, name): up 0, down uniform in fan_in**-0.5."""
    if name.endswith(UP):
        return torch.zeros(shape)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator_of(seed, name))


def merged_weights(
    base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], lora: LoraOptions
) -> LazyTensors:
    """Return the weights of `base`, each merged with its adapter (`...lora_down`, `...lora_up`) on
    access."""

    def merge(name: str) -> Tensor:
        weight, path = base[name], name.removesuffix(".weight")
        if path + UP not in adapters:
            return weight
        up, down = (adapters[path + end].float() for end in (UP, DOWN))
        return torch.addmm(weight.float(), up, down, alpha=lora.alpha / lora.rank).to(weight.dtype)

    return LazyTensors(base, merge)


def open_adapter(folder: Path, model: nn.Module, lora: LoraOptions) -> LazyTensors:
    """Return the adapters in a folder of PEFT under the names of `model`, each read on access.

    CheckpointError: the folder is damaged, or its adapters are not those of `lora` and `model`.
    """
    saved = read_adapter_config(folder)
    expected = {
        "lora.rank": lora.rank,
        "lora.alpha": lora.alpha,
        "lora.targets": [name for name in LORA_TARGETS if name in lora.targets],
    }
    for key, value in expected.items():
        if saved[key] != value:
            raise CheckpointError(
                f"{key} is {value}, and the adapters in {folder} have {saved[key]}",
                f"lora.init_from; {folder / ADAPTER_CONFIG}",
                f"remove {key}, or set it to that of the folder",
            )
    adapters = {name: tensor for name, tensor in model.named_parameters() if is_adapter(name)}
    located = tensor_locations(folder / ADAPTER_FILE)
    return match_shapes(located, adapters, {}, folder / ADAPTER_CONFIG)
