"""Where a model may be split, by module and parameter names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from torch import nn

from lockstep.errors import UsageError
from lockstep.layout import LayoutLimits
from lockstep.parallel.tensor_plan import PARTIAL, LayerStyle
from lockstep.units import join_names

Patterns = str | Sequence[str] | None


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
        style, packed = self.style_of(name)
        if style.startswith("colwise"):
            return packed
        return next(
            (count for pattern, count in self.column_parallel if re.search(pattern, name)), 0
        )

    def splits_columns(self, name: str) -> bool:
        """Return whether this is a row-parallel weight."""
        return bool(re.search(self.row_parallel, name)) or (
            self.style_of(name).name.startswith("rowwise") and name.endswith(".weight")
        )

    def is_partial(self, name: str) -> bool:
        """Return whether this is a whole weight whose gradient is summed over the tensor axis."""
        return bool(re.search(self.partial_grads, name)) or self.style_of(name).name == PARTIAL

    def split_styles(self) -> dict[str, LayerStyle]:
        """Return the styles of layers whose weights are split."""
        return {name: style for name, style in self.styles.items() if style.name != PARTIAL}

    def style_of(self, parameter: str) -> LayerStyle:
        return self.styles.get(parameter.rpartition(".")[0], LayerStyle("", 0))

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
        if unknown := [
            pattern for pattern in listed if not any(fnmatchcase(name, pattern) for name in modules)
        ]:
            where = f"session.prepare(units={patterns!r})"
            raise UsageError(
                f"no module matches {join_names(unknown)}",
                where,
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
