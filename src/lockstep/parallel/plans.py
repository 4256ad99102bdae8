"""Where each model may be cut. Models know nothing of distribution; what is said of them here are names.

units    blocks that the shard axis gathers and frees one after the other, in the order of the forward pass
regions  parts that the tensor axis shares: what comes in is whole, what goes out is added up. The head of each is cut by rows
         (a part of the heads, of the inner width), its tail by columns
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import nn

from lockstep.errors import UsageError
from lockstep.layout import Bounds
from lockstep.models.llama import Llama
from lockstep.models.translator import Translator


@dataclass(frozen=True)
class Plan:
    """units   names of modules
    regions  names of modules
    heads    weights of a region cut by rows, as (pattern of their names, matrices that are packed in them)
    tails    weights cut by columns: a pattern of their names
    summands weights of a region that stay whole, a pattern of their names: each worker has a summand of their gradient
    counted  what of a region counts its share, as (pattern of the modules' names, attribute)
    widths   what the tensor axis must divide
    layers   that can be dealt to stages
    """

    units: tuple[str, ...]
    regions: tuple[str, ...]
    heads: tuple[tuple[str, int], ...]
    tails: str
    summands: str = r"$^"
    counted: tuple[tuple[str, str], ...] = ()
    widths: tuple[int, ...] = ()
    layers: int = 0

    def packed(self, name: str) -> int:
        """Matrices packed in a weight that is cut by rows; 0 where it is not."""
        return next((count for pattern, count in self.heads if re.search(pattern, name)), 0)

    def is_tail(self, name: str) -> bool:
        return re.search(self.tails, name) is not None

    def is_summand(self, name: str) -> bool:
        return re.search(self.summands, name) is not None

    def within(self, model: nn.Module) -> Plan:
        """For a model of which only some layers are left."""
        there = dict(model.named_modules())

        def holds(name: str) -> bool:
            return name in there and not isinstance(there[name], nn.Identity)

        return replace(self, units=tuple(filter(holds, self.units)), regions=tuple(filter(holds, self.regions)))

    def bounds(self, micro_batches: int) -> Bounds:
        return Bounds(micro_batches, self.widths, self.layers)


def plan_of(model: nn.Module) -> Plan:
    """Where `model` may be cut. UsageError for a model of which nothing is known here."""
    if isinstance(model, Llama):
        return plan_of_llama(model)
    if isinstance(model, Translator):
        return plan_of_translator(model)
    raise UsageError(
        f"{type(model).__name__} cannot be cut",
        "layout",
        "leave layout.shard, layout.tensor and layout.pipeline at 1: replicas take any model",
    )


def plan_of_llama(model: Llama) -> Plan:
    shape = model.shape
    layers = [f"layers.{i}" for i in range(shape.layers)]
    return Plan(
        units=tuple(layers),
        regions=tuple(f"{layer}.{part}" for layer in layers for part in ("attention", "feed_forward")),
        heads=((r"attention\.(query|key|value)\.(weight|lora_up)$", 1), (r"feed_forward\.(gate|up)\.(weight|lora_up)$", 1)),
        tails=r"(attention|feed_forward)\.out\.(weight|lora_down)$",
        summands=r"\.out\.lora_up$|\.(query|key|value|gate|up)\.lora_down$",
        widths=(shape.heads, shape.key_value_heads, shape.feed_forward),
        layers=shape.layers,
    )


def plan_of_translator(model: Translator) -> Plan:
    encoder = [f"encoder.{i}" for i in range(len(model.encoder))]
    decoder = [f"decoder.{i}" for i in range(len(model.decoder))]
    parts = ("self_attention", "cross_attention", "feed_forward")
    names = dict(model.named_modules())
    hidden = len(model.get_parameter("decoder.0.feed_forward.up.weight"))
    return Plan(
        units=(*encoder, "encoder_norm", *decoder),  # a unit of its own: what is left to the root is used at both ends alone
        regions=tuple(name for layer in (*encoder, *decoder) for part in parts if (name := f"{layer}.{part}") in names),
        heads=((r"query_key_value\.weight$", 3), (r"key_value\.weight$", 2), (r"(query|up)\.weight$", 1)),
        tails=r"(attention|feed_forward)\.out\.weight$",
        counted=((r"_attention$", "heads"),),
        widths=(model.heads, hidden),
        layers=len(encoder) + len(decoder),
    )
