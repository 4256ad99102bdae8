"""Shard a user's module: each worker keeps its slices of the initial values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.checkpoint.state_dict import named_tensors
from lockstep.errors import UsageError, refuse
from lockstep.layout import Coordinates, Layout
from lockstep.parallel.gradient_watch import refuse_unsupported
from lockstep.parallel.parallelize import (
    DEFAULT_SPLITS,
    InitParam,
    LocalModel,
    SplitOptions,
    marks_of,
    parallelize,
    set_prefetch,
    shard_units,
)
from lockstep.parallel.plans import (
    HasPlan,
    ParallelPlan,
    find_units,
    styles_of,
)
from lockstep.parallel.sequential import build_sequential_stage
from lockstep.parallel.tensor_parallel import apply_tensor_parallel
from lockstep.runtime.torch_private import (
    has_gradient_hooks,
    init_fsdp,
    is_compiled_in_place,
    is_compiled_wrapper,
)
from lockstep.tensor_slice import TensorSlice
from lockstep.units import join_names


def refuse_unshardable(model: nn.Module, units: Sequence[str]) -> None:
    """UsageError, with names, for parameters that FSDP cannot slice."""
    where = f"{type(model).__name__}, in shards"
    parameters = dict(model.named_parameters())
    refuse_unsupported(model)
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise UsageError(
            f"a {type(model).__name__} has no forward()",
            where,
            "wrap it in a module whose forward() calls its parts",
        )
    refuse(
        [name for name, p in parameters.items() if has_gradient_hooks(p)],
        "gradient hooks of parameters would not run in shards:",
        where,
        "remove the hooks, or train with whole replicas",
    )
    refuse_compiled(model, units, where)
    dtypes: dict[str, dict[torch.dtype, str]] = {}
    for name, p in parameters.items():
        if p.requires_grad:
            dtypes.setdefault(
                next((unit for unit in units if name.startswith(f"{unit}.")), ""), {}
            )[p.dtype] = name
    if mixed := [names for names in dtypes.values() if len(names) > 1]:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in mixed[0].items())
        raise UsageError(
            f"trained parameters that are gathered together have several dtypes: {listed}",
            where,
            "train one dtype in each unit, or give units that separate them: "
            "session.prepare(..., units=...)",
        )


def refuse_compiled(model: nn.Module, units: Sequence[str], where: str) -> None:
    """UsageError if torch.compile wraps a module, or if a graph spans several units."""
    modules = dict(model.named_modules())
    if wrapped := [
        name or "the model" for name, module in modules.items() if is_compiled_wrapper(module)
    ]:
        raise UsageError(
            f"torch.compile wraps {join_names(wrapped)}, which renames the parameters",
            where,
            "compile the blocks in place, before session.prepare: block.compile()",
        )
    compiled = [name for name, module in modules.items() if is_compiled_in_place(module)]
    if around := [
        name for name in compiled if not name or any(unit.startswith(f"{name}.") for unit in units)
    ]:
        raise UsageError(
            f"{around[0] or 'the model'} is compiled as one graph, "
            "which may have other bits in whole replicas than in shards",
            where,
            "compile the units instead, before session.prepare: "
            f"compile() of {join_names(list(units)) or 'its layers'}",
        )


def shard_module(
    model: nn.Module,
    layout: Layout,
    position: Coordinates,
    device: torch.device,
    *,
    init_param: InitParam | None = None,
    splits: SplitOptions = DEFAULT_SPLITS,
) -> LocalModel:
    """Return this worker's slices of `model`, which becomes FSDP's."""
    parameters = dict(model.named_parameters())
    originals = {name: (ref(p), marks_of(p)) for name, p in parameters.items()}
    rests = {name: (p.shape[1:], p.dtype) for name, p in parameters.items()}
    del parameters
    split = partial(parallelize, model, layout, position, init_param, device, **vars(splits))
    has_plan = isinstance(model, HasPlan)
    given = [name for name in ("units", "tensor_plan", "split_points") if getattr(splits, name)]
    if has_plan and given:
        raise UsageError(
            f"{join_names(given)} would have no effect: {type(model).__name__} has its own plan",
            "session.prepare(...)",
            "leave them out",
        )
    if not has_plan and splits.pipeline_chunks > 1:
        raise UsageError(
            f"pipeline_chunks={splits.pipeline_chunks} is not supported for own models",
            "session.prepare(...)",
            "leave it at 1",
        )
    local = split() if has_plan else shard_own_module(model, layout, position, splits, split)
    placeholders = {
        name: nn.Parameter(
            torch.empty(0, *rest, dtype=dtype, device=device), requires_grad=originals[name][1][1]
        )
        for name, (rest, dtype) in rests.items()
        if name not in local.local_params
    }
    return replace(local, originals=originals, placeholders=placeholders)


def shard_own_module(
    model: nn.Module,
    layout: Layout,
    position: Coordinates,
    splits: SplitOptions,
    split: Callable[..., LocalModel],
) -> LocalModel:
    names = find_units(model, splits.units)
    refuse_unshardable(model, names)
    first_names = {id(p): name for name, p in model.named_parameters()}
    styles = styles_of(model, splits.tensor_plan) if layout.tensor > 1 else {}
    stage = None
    if layout.pipeline > 1:
        stage = build_sequential_stage(model, position.stage, layout.pipeline, splits.split_points)
    # Of a tied parameter the name that the first stage saves.
    names_here = [first_names[id(p)] for p in model.parameters()]
    local = split(plan=ParallelPlan(tuple(names), styles=styles), stage=stage)
    tensors = named_tensors(model).items()
    buffers = {name: tensor for name, tensor in tensors if name not in local.local_params}
    first_name = dict(zip(local.local_params, names_here, strict=True))
    parts: list[dict[str, Any]] = [local.local_params, local.slices, local.tensor_slices]
    params, slices, tensor_slices = (
        {first_name[name]: value for name, value in part.items()} for part in parts
    )
    slices |= {name: TensorSlice.whole(buffer.shape) for name, buffer in buffers.items()}
    model.register_state_dict_pre_hook(refuse_state_dict)
    model.register_load_state_dict_pre_hook(refuse_state_dict)
    return replace(
        local, local_params=params, slices=slices, tensor_slices=tensor_slices, buffers=buffers
    )


def refuse_state_dict(module: nn.Module, *_: Any) -> None:
    raise UsageError(
        "state_dict() of a sharded model would hold this worker's slices only",
        type(module).__name__,
        "export the whole weights from a checkpoint: lockstep checkpoint export RUN; "
        "load weights before session.steps",
    )


# Averages of the model.


def find_copy(value: Any, model: nn.Module) -> nn.Module | None:
    """Return the module in `value`, such as an AveragedModel, that is a copy of `model`."""

    def shapes(module: nn.Module) -> list[tuple[str, torch.Size]]:
        return [(name, p.shape) for name, p in module.named_parameters()]

    modules = value.modules() if isinstance(value, nn.Module) else ()
    found = next((module for module in modules if shapes(module) == shapes(model)), None)
    return None if found is None or {*found.parameters()} & {*model.parameters()} else found


@torch.no_grad()
def shard_average(
    prefix: str,
    average: nn.Module,
    copy: nn.Module,
    local: LocalModel,
    position: Coordinates,
    init_param: InitParam | None = None,
) -> None:
    """Shard `copy`, the module in `average` with the parameters of the model, as `local` is
    sharded.

    prefix      of the names of `average` in checkpoints
    init_param  see `parallelize`
    """
    mesh = cast(DTensor, next(local.module.parameters())).device_mesh
    assert local.plan
    apply_tensor_parallel(copy, local.plan, local.groups, position.tensor, local.layout.tensor)
    if not all(p.is_meta for p in copy.parameters()):
        init_param = None  # the copy has values, although those of the model are deferred
    fsdp_units = shard_units(copy, local.plan.units, mesh, reshard_after_forward=True)
    set_prefetch(fsdp_units, 1)
    if init_param:
        copy.to_empty(device=mesh.device_type)
    init_fsdp(copy)
    for name, tensor in (*copy.named_parameters(), *copy.named_buffers()):
        if init_param:
            value = init_param(name, tensor.shape)
            target = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            target.copy_(local.slices[name].of(value) if name in local.slices else value)
    for name, sharded in copy.named_parameters():
        local.keep_memory(prefix + name, sharded)
    local.averages.append(fsdp_units)
    path = next(name for name, module in average.named_modules() if module is copy)
    for name, tensor in average.state_dict().items():
        parameter = name.removeprefix(f"{path}.") if path else name
        whole = part = TensorSlice.whole(tensor.shape)
        if isinstance(tensor, DTensor):
            # A second name of a tied parameter has no slice; the tensor axis does not split it.
            whole = local.tensor_slices.get(parameter, whole)
            part = whole.split_rows(position.shard, local.layout.shard)
        local.tensor_slices[prefix + name] = whole
        local.slices[prefix + name] = part
    copy.register_state_dict_post_hook(save_slices)
    copy.register_load_state_dict_pre_hook(load_slices)


def save_slices(module: nn.Module, tensors: dict[str, Any], *_: Any) -> None:
    for name, value in tensors.items():
        if isinstance(value, DTensor):
            tensors[name] = value.to_local()


def load_slices(module: nn.Module, tensors: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, p in module.named_parameters(remove_duplicate=False):
        like, part = cast(DTensor, p), tensors[prefix + name]
        tensors[prefix + name] = DTensor.from_local(
            part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )
