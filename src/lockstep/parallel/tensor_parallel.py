"""Tensor parallelism for training (Shoeybi et al. 2019, "Megatron-LM", section 3).

In each region (attention, feed-forward) the first matrices are column-parallel, the last one is
row-parallel. The output and the gradient of the input are all-reduced: two all-reduces of whole
activations per layer and pass, so this axis belongs inside a host.

Not DTensor, because the process groups change during the life of the model (groups.py).
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.models.lora import LoRALinear
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.plans import ParallelPlan
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


def apply_tensor_parallel(model: nn.Module, plan: ParallelPlan, groups: ProcessGroups, part: int, parts: int) -> dict[str, TensorSlice]:
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
            if isinstance(owner, LoRALinear) and (columns := slices[name].columns):
                owner.keep_columns(*columns)
    for name, module in model.named_modules():
        for pattern, attribute in plan.per_rank_counts:
            if re.search(pattern, name):
                setattr(module, attribute, getattr(module, attribute) // parts)
    for name in plan.regions:
        region = model.get_submodule(name)
        region.register_forward_pre_hook(torch.compiler.disable(partial(copy_inputs, groups)))
        region.register_forward_hook(torch.compiler.disable(partial(reduce_output, groups)))
    return slices


def tensor_slices(model: nn.Module, plan: ParallelPlan, part: int, parts: int) -> dict[str, TensorSlice]:
    """Return {parameter: its slice for worker `part` of `parts`}."""
    slices = {name: TensorSlice.whole(parameter.shape) for name, parameter in model.named_parameters()}
    for name in slices if parts > 1 else ():
        if packed := plan.packed(name):
            slices[name] = slices[name].split_rows(part, parts, packed)
        elif re.search(plan.row_parallel, name):
            slices[name] = slices[name].split_columns(part, parts)
    return slices


def copy_inputs(groups: ProcessGroups, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        CopyToTensorParallel.apply(value, groups) if isinstance(value, Tensor) and value.requires_grad else value  # type: ignore[no-untyped-call]
        for value in inputs
    )


def reduce_output(groups: ProcessGroups, _: nn.Module, inputs: tuple[Any, ...], summand: Tensor) -> Tensor:
    total: Tensor = ReduceFromTensorParallel.apply(summand, groups)  # type: ignore[no-untyped-call]
    return total
