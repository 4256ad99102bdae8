"""Plans of how a model may be split, by module and parameter names; cuts into stages of a pipeline.

A plan of tensor parallelism for a model that is not built in has a style for each of its layers:

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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError, refuse
from lockstep.layout import LayoutLimits
from lockstep.network.pipeline_schedule import adjacent_blocks
from lockstep.parallel.digest import digest_of
from lockstep.runtime.numerics import pack_generators
from lockstep.runtime.tensor_bytes import tensors_of
from lockstep.runtime.torch_private import own_parameters
from lockstep.units import join_names

Patterns = str | Sequence[str] | None
TensorPlan = Mapping[str, str | Sequence[str | int]] | Literal["auto"] | None
PARTIAL = "replicated_with_grad_allreduce"
WHERE = "session.prepare(tensor_plan=...), or the plan of a Hugging Face model"


class StyleKind(NamedTuple):
    """The "output" or "input" features that a style splits, and whether each rank takes the whole
    input and gives the whole output."""

    features: str = ""
    takes_whole: bool = False
    gives_whole: bool = False


STYLES = {
    "colwise": StyleKind("output", takes_whole=True),
    "rowwise": StyleKind("input", gives_whole=True),
    "colwise_gather_output": StyleKind("output", takes_whole=True, gives_whole=True),
    "rowwise_split_input": StyleKind("input", takes_whole=True, gives_whole=True),
    PARTIAL: StyleKind(),
}


class LayerStyle(NamedTuple):
    """The style of a layer. packed: matrices in its weight."""

    name: str = ""
    packed: int = 1

    @property
    def kind(self) -> StyleKind:
        return STYLES.get(self.name, StyleKind())


@dataclass(frozen=True)
class ParallelPlan:
    """How a model may be split; patterns are searched in names of parameters or modules.

    units            modules that the shard axis gathers and frees, in forward order
    regions          modules that the tensor axis shares: input replicated, output all-reduced
    column_parallel  first weights of a region, split by rows: (pattern, matrices packed in one)
    row_parallel     last weight of a region, split by columns
    partial_grads    whole weights whose gradient is summed over the tensor axis
    per_rank_counts  attributes to divide by the tensor axis: (pattern of modules, attribute)
    widths           numbers that the tensor axis must divide
    layers           that can be split into stages
    styles           of layers by name, instead of regions and patterns
    """

    units: tuple[str, ...]
    regions: tuple[str, ...] = ()
    column_parallel: tuple[tuple[str, int], ...] = ()
    row_parallel: str = r"$^"
    partial_grads: str = r"$^"
    per_rank_counts: tuple[tuple[str, str], ...] = ()
    widths: tuple[int, ...] = ()
    layers: int = 0
    styles: Mapping[str, LayerStyle] = field(default_factory=dict)

    def packed(self, name: str) -> int:
        """Return the number of matrices packed in a column-parallel weight; 0 for other weights."""
        style = self.style_of(name)
        if style.kind.features == "output":
            return style.packed
        counts = (count for pattern, count in self.column_parallel if re.search(pattern, name))
        return next(counts, 0)

    def splits_columns(self, name: str) -> bool:
        """Return whether this is a row-parallel weight."""
        is_split = self.style_of(name).kind.features == "input"
        return bool(re.search(self.row_parallel, name)) or (is_split and name.endswith(".weight"))

    def is_partial(self, name: str) -> bool:
        """Return whether this is a whole weight whose gradient is summed over the tensor axis."""
        return bool(re.search(self.partial_grads, name)) or self.style_of(name).name == PARTIAL

    def split_styles(self) -> dict[str, LayerStyle]:
        """Return the styles of layers whose weights are split."""
        return {name: style for name, style in self.styles.items() if style.kind.features}

    def style_of(self, parameter: str) -> LayerStyle:
        return self.styles.get(parameter.rpartition(".")[0], LayerStyle())

    def within(self, model: nn.Module) -> ParallelPlan:
        """Return the plan of a pipeline stage, which has only some of the layers."""
        present = {
            name for name, module in model.named_modules() if not isinstance(module, nn.Identity)
        }
        units, regions = (
            tuple(name for name in names if name in present) for names in (self.units, self.regions)
        )
        return replace(self, units=units, regions=regions)

    def layout_limits(self, micro_batches: int) -> LayoutLimits:
        return LayoutLimits(micro_batches, self.widths, self.layers)


@runtime_checkable
class HasPlan(Protocol):
    """A model that knows how it may be split."""

    def parallel_plan(self) -> ParallelPlan:
        """Return its plan."""


def plan_of(model: nn.Module) -> ParallelPlan:
    """Return the plan of a built-in model. UsageError: there is none for its type."""
    if isinstance(model, HasPlan):
        return model.parallel_plan()
    raise UsageError(
        f"{type(model).__name__} cannot be sharded or split",
        "layout",
        "leave layout.shard, layout.tensor and layout.pipeline at 1: replicas support any model",
    )


def find_units(model: nn.Module, patterns: Patterns = None) -> list[str]:
    """Return the names of the modules that the shard axis gathers and frees, in forward order.

    patterns  units are the outermost modules with such names, as in fnmatch. None: modules of the
              types in `_no_split_modules` of a Hugging Face model. Without these: repeated blocks,
              the children of a ModuleList or Sequential, of one type and with submodules
    A module that shares a parameter with another part belongs to the root, which is gathered for a
    whole pass.
    UsageError: a pattern that matches no module.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    if patterns is not None:
        listed = [patterns] if isinstance(patterns, str) else list(patterns)
        refuse(
            [
                pattern
                for pattern in listed
                if not any(fnmatchcase(name, pattern) for name in modules)
            ],
            "no module matches",
            f"session.prepare(units={patterns!r})",
            f"{type(model).__name__} has {join_names(list(modules))}",
        )
        matching = [
            name for name in modules if any(fnmatchcase(name, pattern) for pattern in listed)
        ]
    elif types := set(getattr(model, "_no_split_modules", None) or ()):
        matching = [name for name, module in modules.items() if type(module).__name__ in types]
    else:
        matching = [
            name
            for name in modules
            if is_repeated_block(model.get_submodule(name.rpartition(".")[0]))
        ]
    units: list[str] = []
    for name in matching:
        if not any(name.startswith(f"{unit}.") for unit in units) and any(
            True for _ in modules[name].parameters()
        ):
            units.append(name)
    return without_shared_parameters(model, units)


def is_repeated_block(container: nn.Module) -> bool:
    """Return whether the children of a module are repeated blocks."""
    children = (
        list(container.children()) if isinstance(container, nn.ModuleList | nn.Sequential) else []
    )
    return (
        len(children) > 1
        and len({type(child) for child in children}) == 1
        and any(True for _ in children[0].children())
    )


def without_shared_parameters(model: nn.Module, units: list[str]) -> list[str]:
    holders: dict[int, set[str]] = {}  # id of a parameter -> units, or "" for the root
    for path, module in model.named_modules(remove_duplicate=False):
        unit = next((name for name in units if path == name or path.startswith(f"{name}.")), "")
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(unit)
    sharing = {unit for names in holders.values() if len(names) > 1 for unit in names}
    return [unit for unit in units if unit not in sharing]


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
            'give tensor_plan={"layers.*.attention.query": '
            '"colwise", "layers.*.attention.out": "rowwise", ...}, or set tensor to 1',
        )
    refuse(
        [
            f"{style.name} of {pattern}"
            for pattern, style in by_pattern.items()
            if style.name not in STYLES
        ],
        "styles of layers that are not supported:",
        WHERE,
        f"the styles are {', '.join(STYLES)}",
    )
    matching = {
        pattern: [name for name in modules if fnmatchcase(name, pattern)] for pattern in by_pattern
    }
    refuse(
        [pattern for pattern, names in matching.items() if not names and plan != "auto"],
        "no module matches",
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
    refuse(
        [
            f"{name} is a {type(module).__name__}"
            for name in styles
            if type(module := modules[name]).forward is not nn.Linear.forward
            or own_parameters(module).get("weight") is None
        ],
        "only nn.Linear can be split:",
        WHERE,
        "split other layers, or write it with nn.Linear",
    )
    refuse(
        [name for name in styles if holders.count(id(modules[name].weight)) > 1],
        "weights that other modules share cannot be split:",
        WHERE,
        "leave them out of the plan",
    )
    for name, style in styles.items():
        linear = cast(nn.Linear, modules[name])
        kind = style.kind.features
        features = linear.out_features if kind == "output" else linear.in_features
        if features % (parts * style.packed):
            packed = f" in {style.packed} packed matrices" if style.packed > 1 else ""
            raise UsageError(
                f"tensor {parts} does not divide the {features} {kind} features{packed} of {name}",
                WHERE,
                "set another tensor, or leave the layer and its partners out of the plan",
            )


class Chunk(NamedTuple):
    """Adjacent layers of the model, and whether they are the model's first and last."""

    layers: Sequence[int]
    first: bool
    last: bool


class StagedModel(nn.Module):
    """A model of layers in a row, which can be on the meta device."""

    masks_follow_layers = False  # True: random masks follow from the layer, in every layout alike

    @property
    def tied_parameters(self) -> tuple[str, ...]:
        """Parameters of the first stage that the last one uses, too."""
        raise NotImplementedError

    def layer_names(self) -> list[str]:
        """Return the names of the layers, in the order of the forward pass."""
        raise NotImplementedError

    def outer_modules(self, layers: Sequence[str], *, first: bool, last: bool) -> list[str]:
        """Return the modules beside its layers that a chunk uses.

        first, last  whether it is the first chunk of the model, and the last
        """
        raise NotImplementedError

    def activation_shapes(self, *inputs: Any) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors that a chunk passes on, given the model's inputs."""
        raise NotImplementedError

    def forward_chunk(
        self, chunk: Chunk, received: Sequence[Tensor], *inputs: Any, **named: Any
    ) -> tuple[Tensor, ...]:
        """Run a chunk on what it has received; the last one returns (loss,)."""
        raise NotImplementedError


class PendingMicroBatch(NamedTuple):
    """Inputs of a micro-batch for the pipeline, and what the loop had set when it gave them.

    autocast_dtype  None: autocast is disabled
    generators      states of torch's generators (numerics.pack_generators), for the first chunk;
                    empty where each chunk has its own seed
    data            digest of the inputs, equal on all stages
    """

    k: int
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    autocast_dtype: torch.dtype | None
    generators: Tensor
    data: int


@dataclass(frozen=True)
class PipelineStage:
    """A worker's part of a model that is split into stages."""

    number: int
    stages: int
    chunks: tuple[Chunk, ...]
    # Names of the modules of each chunk; empty: all belong to one chunk.
    modules: tuple[tuple[str, ...], ...]
    borrowed: tuple[str, ...] = ()  # copies of parameters of the first stage, which saves them
    lent: tuple[str, ...] = ()  # parameters of the first stage that the last stage has too
    # Random draws continue where the former stage ended: the bits of one stage.
    passes_generators: bool = False

    def holds(self, chunk: int, name: str) -> bool:
        return not self.modules or any(
            name.startswith(f"{module}.") for module in self.modules[chunk]
        )

    def pend(
        self, k: int, inputs: tuple[Any, ...], named: dict[str, Any], device: torch.device
    ) -> PendingMicroBatch:
        """Return micro-batch `k` with the state of autocast and the generators."""
        autocast_dtype = (
            torch.get_autocast_dtype(device.type)
            if torch.is_autocast_enabled(device.type)
            else None
        )
        if not self.passes_generators:
            return PendingMicroBatch(
                k, inputs, named, autocast_dtype, torch.empty(0, dtype=torch.uint8), 0
            )
        tensors = list(tensors_of(inputs))
        data = digest_of(
            [*tensors, torch.tensor([size for tensor in tensors for size in tensor.shape])]
        )
        return PendingMicroBatch(k, inputs, named, autocast_dtype, pack_generators(device), data)


def build_stage(model: StagedModel, stage: int, stages: int, chunks_each: int) -> PipelineStage:
    """Remove the layers of other stages from a model on the meta device, in place.

    The forward pass becomes that of a chunk. Chunk c of stage s is chunk c * stages + s of all.
    """
    names = model.layer_names()
    total = stages * chunks_each
    ranges = adjacent_blocks(range(len(names)), total)
    chunks = tuple(Chunk(ranges[n], n == 0, n == total - 1) for n in range(stage, total, stages))
    layers = [[names[layer] for layer in chunk.layers] for chunk in chunks]
    modules = tuple(
        (*own, *model.outer_modules(own, first=chunk.first, last=chunk.last))
        for own, chunk in zip(layers, chunks, strict=True)
    )
    kept = set(chain(*modules))
    for name in (*names, *model.outer_modules(names, first=True, last=True)):
        if name not in kept:
            remove_module(model, name)
    model.forward = lambda received, chunk, inputs, named: model.forward_chunk(
        chunks[chunk], received(), *inputs, **named
    )
    first, last = chunks[0].first, chunks[-1].last
    shared = model.tied_parameters if first != last else ()
    borrowed = shared if last else ()
    lent = shared if first else ()
    return PipelineStage(stage, stages, chunks, modules, borrowed, lent)


def remove_module(model: nn.Module, name: str) -> None:
    """Replace a module, if the model has it, so that later layers keep their numbers."""
    path, _, last = name.rpartition(".")
    if getattr(model.get_submodule(path), last, None) is not None:
        setattr(model.get_submodule(path), last, nn.Identity())
