"""A plan of tensor parallelism for a model that is not built in: a style for each of its layers.

    colwise                         nn.Linear, split by output features; ("colwise", 3): three
                                    matrices packed in one weight
    rowwise                         nn.Linear, split by input features; its outputs are summed
    colwise_gather_output           as colwise, and each worker gets the whole output
    rowwise_split_input             as rowwise, from a whole input
    replicated_with_grad_allreduce  a module with whole weights between colwise and rowwise layers,
                                    such as a norm of each head: its gradients are summed

The names are those of the plans of `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import nn

from lockstep.errors import UsageError
from lockstep.runtime.torch_private import own_parameters
from lockstep.units import join_names

TensorPlan = Mapping[str, str | Sequence[str | int]] | Literal["auto"] | None
PARTIAL = "replicated_with_grad_allreduce"
STYLES = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", PARTIAL)
WHERE = "session.prepare(tensor_plan=...), or the plan of a Hugging Face model"


class LayerStyle(NamedTuple):
    """The style of a layer. packed: matrices in its weight."""

    name: str
    packed: int = 1


def styles_of(model: nn.Module, plan: TensorPlan) -> dict[str, LayerStyle]:
    """Return {layer: its style}. plan: patterns of names, as in fnmatch; "auto": see
    `plans_in_configs`. UsageError for a plan that does not fit the model."""
    modules = dict(model.named_modules())
    if plan == "auto":
        by_pattern = plans_in_configs(model)
    else:
        given: Mapping[str, Any] = plan or {}
        by_pattern = {
            pattern: LayerStyle(*([style] if isinstance(style, str) else style))
            for pattern, style in given.items()
        }
    if not by_pattern:
        raise UsageError(
            f"there is no plan of the layers of {type(model).__name__} that the tensor axis splits",
            WHERE,
            'give tensor_plan={"layers.*.attention.query": "colwise", "layers.*.attention.out": "rowwise", ...}, or set tensor to 1',
        )
    if wrong := [
        f"{style.name} of {pattern}"
        for pattern, style in by_pattern.items()
        if style.name not in STYLES
    ]:
        raise UsageError(
            f"styles of layers that are not supported: {join_names(wrong)}",
            WHERE,
            f"the styles are {', '.join(STYLES)}",
        )
    matching = {
        pattern: [name for name in modules if fnmatchcase(name, pattern)] for pattern in by_pattern
    }
    if unknown := [pattern for pattern, names in matching.items() if not names and plan != "auto"]:
        raise UsageError(
            f"no module matches {join_names(unknown)}",
            WHERE,
            f"{type(model).__name__} has {join_names(list(modules)[1:])}",
        )
    return {name: by_pattern[pattern] for pattern, names in matching.items() for name in names}


def plans_in_configs(model: nn.Module) -> dict[str, LayerStyle]:
    """Return the plan in the configuration of a Hugging Face model, or of one inside `model`. The
    output layer, which that lists elsewhere, stays whole."""
    plans = dict[str, LayerStyle]()
    for path, module in model.named_modules():
        if getattr(module, "base_model", None) is module:
            listed = getattr(getattr(module, "config", None), "base_model_tp_plan", None) or {}
            plans |= {
                f"{path}.{pattern}".lstrip("."): LayerStyle(style)
                for pattern, style in listed.items()
            }
    return plans


def refuse_unsplittable(model: nn.Module, styles: Mapping[str, LayerStyle], parts: int) -> None:
    """UsageError for layers that are no plain nn.Linear, or whose features cannot be divided."""
    modules = dict(model.named_modules())
    holders = [
        id(p)
        for module in model.modules()
        for p in own_parameters(module).values()
        if p is not None
    ]
    if other := [
        f"{name} is a {type(module).__name__}"
        for name in styles
        if type(module := modules[name]).forward is not nn.Linear.forward
        or own_parameters(module).get("weight") is None
    ]:
        raise UsageError(
            f"only nn.Linear can be split: {join_names(other)}",
            WHERE,
            "split other layers, or write it with nn.Linear",
        )
    if tied := [name for name in styles if holders.count(id(modules[name].weight)) > 1]:
        raise UsageError(
            f"weights that other modules share cannot be split: {join_names(tied)}",
            WHERE,
            "leave them out of the plan",
        )
    for name, style in styles.items():
        linear = modules[name]
        assert isinstance(linear, nn.Linear)
        columns = style.name.startswith("colwise")
        features, kind = (
            (linear.out_features, "output") if columns else (linear.in_features, "input")
        )
        if features % (parts * style.packed):
            packed = f" in {style.packed} packed matrices" if style.packed > 1 else ""
            raise UsageError(
                f"tensor {parts} does not divide the {features} {kind} features{packed} of {name}",
                WHERE,
                "set another tensor, or leave the layer and its partners out of the plan",
            )
