"""Tensor parallelism for training (Shoeybi et al. 2019, "Megatron-LM", section 3).

In each region (attention, feed-forward) the first matrices are column-parallel, the last one is
row-parallel. The output and the gradient of the input are all-reduced: two all-reduces of whole
activations per layer and pass, so this axis belongs inside a host.

Layers of models that are not built in have styles (plans.py): each sums its own outputs, and
adjacent column-parallel layers with the same input share one all-reduce of its gradient.

Not DTensor, because the process groups change during the life of the model (groups.py).
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.plans import ParallelPlan, StyleKind
from lockstep.runtime.torch_private import version_of
from lockstep.tensor_slice import TensorSlice


class CopyToTensorParallel(torch.autograd.Function):
    """Identity; all-reduce of the gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, groups: ProcessGroups) -> Tensor:
        ctx.groups = groups
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.groups.all_reduce(grad.contiguous().clone(), ctx.groups.tensor_group), None


class ReduceFromTensorParallel(torch.autograd.Function):
    """All-reduce; identity of the gradient."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, groups: ProcessGroups) -> Tensor:
        return groups.all_reduce(summand.contiguous().clone(), groups.tensor_group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@runtime_checkable
class KeepsColumns(Protocol):
    """A linear layer with more than its weight by input column, as the masks of an adapter."""

    def keep_columns(self, start: int, stop: int) -> None:
        """Take these columns."""


class RowParallelLinear(nn.Linear):
    """A linear layer whose bias is added after the sum over the tensor axis."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight)


class LayerHooks:
    """The collectives of layers with styles, on tensor rank `part`."""

    def __init__(self, groups: ProcessGroups, part: int) -> None:
        self.groups = groups
        self.part = part
        self.parts = groups.layout.tensor
        # The newest input of a colwise layer, its version, its copy.
        self._shared: tuple[Tensor, int, Tensor] | None = None

    def install(self, linear: nn.Linear, style: StyleKind) -> None:
        splits_input = style.features == "input"
        if style.takes_whole:
            before = self.split_input if splits_input else self.copy_input
            linear.register_forward_pre_hook(torch.compiler.disable(before))
        if style.gives_whole:
            after = self.add_outputs if splits_input else self.gather_output
            linear.register_forward_hook(torch.compiler.disable(after))
        if splits_input:  # keeps its parameters and hooks
            object.__setattr__(linear, "__class__", RowParallelLinear)

    def copy_input(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states, *rest = inputs
        if not states.requires_grad:
            return inputs
        version = version_of(states)
        if not self._shared or self._shared[0] is not states or self._shared[1] != version:
            self._shared = states, version, copy_inputs(self.groups, _, (states,))[0]
        return self._shared[2], *rest

    def split_input(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states, *rest = self.copy_input(_, inputs)
        width = states.shape[-1] // self.parts
        return states.narrow(-1, self.part * width, width), *rest

    def gather_output(self, _: nn.Module, inputs: tuple[Tensor, ...], own: Tensor) -> Tensor:
        self._shared = None
        width = own.shape[-1]
        padded = F.pad(own, (self.part * width, (self.parts - 1 - self.part) * width))
        # Exact: each feature comes from one rank.
        return reduce_output(self.groups, _, inputs, padded)

    def add_outputs(self, linear: nn.Linear, inputs: tuple[Tensor, ...], summand: Tensor) -> Tensor:
        self._shared = None
        total = reduce_output(self.groups, linear, inputs, summand)
        return total if linear.bias is None else total + linear.bias.to(total.dtype)


def apply_tensor_parallel(
    model: nn.Module, plan: ParallelPlan, groups: ProcessGroups, part: int, parts: int
) -> dict[str, TensorSlice]:
    """Split a model in place; return {parameter: its slice}."""
    slices = tensor_slices(model, plan, part, parts)
    if parts == 1:
        return slices
    for name, parameter in list(model.named_parameters()):
        if slices[name].is_whole:
            continue
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        cut = slices[name].of(parameter.detach()).clone(memory_format=torch.contiguous_format)
        setattr(owner, last, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        if isinstance(owner, nn.Linear) and last == "weight":
            owner.out_features, owner.in_features = slices[name].local_shape
            if isinstance(owner, KeepsColumns) and (columns := slices[name].columns):
                owner.keep_columns(*columns)
    for name, module in model.named_modules():
        for pattern, attribute in plan.per_rank_counts:
            if re.search(pattern, name):
                setattr(module, attribute, getattr(module, attribute) // parts)
    hooks = LayerHooks(groups, part)
    for name, style in plan.split_styles().items():
        hooks.install(cast(nn.Linear, model.get_submodule(name)), style.kind)
    for name in plan.regions:
        region = model.get_submodule(name)
        region.register_forward_pre_hook(torch.compiler.disable(partial(copy_inputs, groups)))
        region.register_forward_hook(torch.compiler.disable(partial(reduce_output, groups)))
    return slices


def tensor_slices(
    model: nn.Module, plan: ParallelPlan, part: int, parts: int
) -> dict[str, TensorSlice]:
    """Return {parameter: its slice for worker `part` of `parts`}."""
    slices = {
        name: TensorSlice.whole(parameter.shape) for name, parameter in model.named_parameters()
    }
    for name in slices if parts > 1 else ():
        if packed := plan.packed(name):
            slices[name] = slices[name].split_rows(part, parts, packed)
        elif plan.splits_columns(name):
            slices[name] = slices[name].split_columns(part, parts)
    return slices


def copy_inputs(groups: ProcessGroups, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        return CopyToTensorParallel.apply(value, groups)  # type: ignore[no-untyped-call]

    return tuple(map(copied, inputs))


def reduce_output(
    groups: ProcessGroups, _: nn.Module, inputs: tuple[Any, ...], summand: Tensor
) -> Tensor:
    total: Tensor = ReduceFromTensorParallel.apply(summand, groups)  # type: ignore[no-untyped-call]
    return total
