"""Matrices that several workers share, in the middle of each layer (Shoeybi et al. 2019, "Megatron-LM", section 3).

Of each region (attention, feed-forward) a worker has a part of the heads or of the inner width: the first matrices are cut by rows, the
last one by columns. What comes in is the same on all; its gradient is added up. What goes out are summands; they are added up. Two sums in
the forward pass of a layer, two in the backward pass, each of the whole activations: this axis belongs inside a machine.

By hand rather than by DTensor, since the groups change while the model lives (wires.py).
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.parallel.groups import Wires
from lockstep.parallel.plans import Plan
from lockstep.tensor_slice import Piece


class Enter(torch.autograd.Function):
    """As it is; its gradient is added up."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, wires: Wires) -> Tensor:
        ctx.wires = wires
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return ctx.wires.add_up(slope.contiguous().clone(), ctx.wires.tensor), None


class Leave(torch.autograd.Function):
    """Added up; its gradient goes to each summand as it is."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, wires: Wires) -> Tensor:
        return wires.add_up(summand.contiguous().clone(), wires.tensor)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope, None


def split(model: nn.Module, plan: Plan, wires: Wires, part: int, parts: int) -> dict[str, Piece]:
    """Cut the model on the meta device for one of `parts` workers, in place; for each parameter's name what is left of it."""
    pieces = {name: Piece.whole(parameter.shape) for name, parameter in model.named_parameters()}
    if parts == 1:
        return pieces
    for name, parameter in list(model.named_parameters()):
        packed = plan.packed(name)
        if packed:
            pieces[name] = pieces[name].cut_rows(part, parts, packed)
        elif plan.is_tail(name):
            pieces[name] = pieces[name].cut_columns(part, parts)
        else:
            continue
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        cut = torch.empty(pieces[name].size, dtype=parameter.dtype, device="meta")
        setattr(owner, last, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        if isinstance(owner, nn.Linear) and last == "weight":
            owner.out_features, owner.in_features = pieces[name].size
    for name, module in model.named_modules():
        for pattern, attribute in plan.counted:
            if re.search(pattern, name):
                setattr(module, attribute, getattr(module, attribute) // parts)
    for name in plan.regions:
        region = model.get_submodule(name)
        region.register_forward_pre_hook(torch.compiler.disable(partial(enter, wires)))
        region.register_forward_hook(torch.compiler.disable(partial(leave, wires)))
    return pieces


def enter(wires: Wires, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What enters a region: tensors that have a gradient get the sum of all workers' parts of it."""
    return tuple(
        Enter.apply(one, wires) if isinstance(one, Tensor) and one.requires_grad else one  # type: ignore[no-untyped-call]
        for one in inputs
    )


def leave(wires: Wires, _: nn.Module, inputs: tuple[Any, ...], summand: Tensor) -> Tensor:
    """What leaves it."""
    total: Tensor = Leave.apply(summand, wires)  # type: ignore[no-untyped-call]
    return total
