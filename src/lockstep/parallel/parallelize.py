"""Turn a model on the meta device into this worker's part of it, wrapped in this order:

    1. pipeline    remove the layers of other stages
    2. tensor      split the matrices; everything after sees ordinary, smaller layers
    3. checkpoint  activation checkpointing inside the units, to recompute while gathered
    4. compile     inside the units: one graph serves all layers, gathering stays outside
    5. shard       wrap each block, then the model: embedding, norms and output belong to the root
    6. allocate    only now, so a worker never has more than its slices
    7. initialize  each parameter's slice of its initial value, or of the starting checkpoint

Plain replicas need only 3, 4, 6 and 7.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.errors import UsageError, refuse
from lockstep.layout import Coordinates, Layout
from lockstep.parallel.deferred_init import materialize
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.plan_check import PlanCheck, split_layers
from lockstep.parallel.plans import (
    ParallelPlan,
    Patterns,
    PipelineStage,
    StagedModel,
    TensorPlan,
    build_stage,
    plan_of,
)
from lockstep.runtime.torch_private import (
    fsdp_parameters,
    init_fsdp,
    mesh_without_backend,
    slice_of_dtensor,
    version_of,
)
from lockstep.tensor_slice import TensorSlice
from lockstep.units import join_names

GROUP_NUMBERS = itertools.count()
InitParam = Callable[[str, torch.Size], Tensor]
Marks = tuple[int, bool, bool]


class SliceMemory(NamedTuple):
    """Where the values of a slice are. storage: of a sharded tensor, it has no memory; an
    assignment to .data replaces it, and not the slice."""

    name: str
    tensor: Tensor
    storage: torch.UntypedStorage
    address: int

    def has_moved(self) -> bool:
        return (
            self.tensor.untyped_storage() is not self.storage
            or address_of(self.tensor) != self.address
        )


@dataclass
class LocalModel:
    """This worker's part of a model: all of it, or slices."""

    module: nn.Module  # to call; its parameters belong to FSDP
    layout: Layout
    groups: ProcessGroups = field(default_factory=partial(ProcessGroups, Layout()))
    # On this worker's slice, for optimizer and checkpoint.
    local_params: dict[str, nn.Parameter] = field(default_factory=dict)
    # name -> its slice of the whole tensor.
    slices: dict[str, TensorSlice] = field(default_factory=dict)
    fsdp_units: list[FSDPModule] = field(default_factory=list)  # in forward order, the root last
    # name -> the slice left by the tensor axis, before sharding.
    tensor_slices: dict[str, TensorSlice] = field(default_factory=dict)
    stage: PipelineStage | None = None
    # Names of parameters whose gradient is the sum over the tensor axis.
    partial_grads: tuple[str, ...] = ()
    plan: ParallelPlan | None = None
    plan_check: PlanCheck | None = None  # for the first step of a start
    # That checkpoints hold, whole on each worker.
    buffers: dict[str, Tensor] = field(default_factory=dict)
    # The units of each average of the model, its root last.
    averages: list[list[FSDPModule]] = field(default_factory=list)
    # name -> whole parameter of a user's model, of any stage, alive where the user has kept it,
    # and its marks before the cut
    originals: dict[str, tuple[ReferenceType[nn.Parameter], Marks]] = field(default_factory=dict)
    # Empty, of other stages: optimizers list all parameters.
    placeholders: dict[str, nn.Parameter] = field(default_factory=dict)
    updated_together: list[list[str]] = field(default_factory=list)  # parameters of each optimizer
    memory: list[SliceMemory] = field(default_factory=list)  # see `keep_memory`
    _known: set[int] = field(default_factory=set)  # ids of FSDP's parameters

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self.local_params.values())

    def refuse_changes(self, trained: Collection[str]) -> None:
        """UsageError: replaced parameters were used or changed, or others than `trained` are
        trained."""
        pairs = zip(self.local_params.items(), self.module.parameters(), strict=True)
        changed = [
            name
            for name, (whole, marks) in self.originals.items()
            if (p := whole()) is not None and marks_of(p) != marks
        ]
        refuse(
            changed
            or [
                name
                for (name, p), q in pairs
                if {p.requires_grad, q.requires_grad} != {name in trained}
            ],
            "parameters that are not those of the sharded model were used or changed:",
            "parameters from an optimizer, or from the model before it was sharded",
            "take them from the model in each step; "
            "set requires_grad of its layers before the micro-batches, not in a pipeline",
        )

    def keep_memory(self, name: str, *tensors: Tensor) -> None:
        """Remember where the values of a slice are, which FSDP and the optimizer share."""
        for tensor in tensors:
            self.memory.append(
                SliceMemory(name, tensor, tensor.untyped_storage(), address_of(tensor))
            )

    def refuse_replaced(self) -> None:
        """UsageError: the values of a parameter are no longer where FSDP gathers them."""
        moved = [slice_memory.name for slice_memory in self.memory if slice_memory.has_moved()]
        moved += self.foreign_parameters(self.module)
        if moved:
            names = join_names(list(dict.fromkeys(moved)))
            raise UsageError(
                f"parameters have left the memory that the shards gather: {names}",
                "an assignment to .data, or of a new nn.Parameter: "
                "passes would not see the new values",
                "change them in place: p.data.copy_(...), p.data.mul_(...)",
            )

    def foreign_parameters(self, module: nn.Module) -> list[str]:
        """Return the names of parameters of a module that FSDP does not know: it would replace
        them."""
        foreign = [name for name, p in module.named_parameters() if id(p) not in self._known]
        if foreign:  # or gathered for the first time
            self._known = {id(p) for unit in self.fsdp_units for p in fsdp_parameters(unit)}
            foreign = [name for name, p in module.named_parameters() if id(p) not in self._known]
        return foreign

    def is_tied_copy(self, name: str) -> bool:
        """Return whether the parameter is a copy of the first stage's."""
        return self.stage is not None and name in self.stage.borrowed


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor, of this worker's slice if it is sharded."""
    return (slice_of_dtensor(tensor) if isinstance(tensor, DTensor) else tensor).data_ptr()


def marks_of(parameter: nn.Parameter) -> Marks:
    """Return what changes when the parameter is changed in place, frozen, or gets a gradient."""
    return version_of(parameter), parameter.requires_grad, parameter.grad is None


def unwrap_local_model(model: nn.Module | LocalModel) -> tuple[nn.Module, LocalModel | None]:
    """Return (module, local model); the local model is None where a replica is one worker."""
    if isinstance(model, LocalModel):
        return model.module, model if model.layout.workers_per_replica > 1 else None
    return model, None


@dataclass(frozen=True)
class SplitOptions:
    """How a model is split.

    units, tensor_plan, split_points  where, of a user's module; not of one that knows it itself
                           (HasPlan). See `find_units`, `styles_of` and `first_blocks`
    prefetch_units         units gathered ahead of the one that computes
    reshard_after_forward  False: keep units gathered until the backward pass (ZeRO-2)
    pipeline_chunks        interleaved pipeline: model chunks of each stage
    verify                 compare layers with styles with whole ones in the first step
    """

    units: Patterns = None
    tensor_plan: TensorPlan = None
    split_points: Sequence[str] = ()
    prefetch_units: int = 1
    reshard_after_forward: bool = True
    pipeline_chunks: int = 1
    verify: bool = True


DEFAULT_SPLITS = SplitOptions()


def parallelize(
    model: nn.Module,
    layout: Layout,
    coordinates: Coordinates,
    init_param: InitParam | None,
    device: torch.device,
    *,
    plan: ParallelPlan | None = None,
    stage: PipelineStage | None = None,
    **given: Any,
) -> LocalModel:
    """Return this worker's part of `model`.

    init_param  returns an initial value; `model` is on the meta device. None: it has its values,
                and a replica is several workers
    plan        None: that of the built-in models
    stage       to which `model` has been cut already
    given       see SplitOptions
    """
    options = SplitOptions(**given)
    if layout.workers_per_replica == 1 and init_param:
        whole = materialize(model, device, init_param)
        return LocalModel(whole, layout, local_params=dict(whole.named_parameters()))
    plan = plan or plan_of(model)
    groups = ProcessGroups(layout, in_thread=device.type == "cpu")
    if stage is None and layout.pipeline > 1:
        assert isinstance(model, StagedModel)  # others are refused by their plan, without layers
        stage = build_stage(model, coordinates.stage, layout.pipeline, options.pipeline_chunks)
    plan = plan.within(model)
    tensor_slices, check = split_layers(
        model, plan, groups, coordinates.tensor, verify=options.verify
    )
    # The mesh only defines the ranks; its group cannot send.
    name = f"lockstep-shard-{next(GROUP_NUMBERS)}"
    mesh = mesh_without_backend(device.type, coordinates.shard, layout.shard, name)
    units = shard_units(model, plan.units, mesh, options.reshard_after_forward)
    set_prefetch(units, options.prefetch_units)
    slices = {
        name: part.split_rows(coordinates.shard, layout.shard)
        for name, part in tensor_slices.items()
    }
    local = LocalModel(
        model,
        layout,
        groups,
        slices=slices,
        fsdp_units=units,
        tensor_slices=tensor_slices,
        stage=stage,
        plan=plan,
        plan_check=check,
    )
    if layout.tensor > 1:
        local.partial_grads = tuple(name for name in slices if plan.is_partial(name))
    if init_param:
        model.to_empty(device=device)
        for name, buffer in model.named_buffers():
            buffer.copy_(init_param(name, buffer.shape))
    take_shards(local, init_param)
    return local


def take_shards(local: LocalModel, init_param: InitParam | None) -> None:
    """Initialize FSDP, and fill `local_params`; `init_param` returns their initial values."""
    init_fsdp(local.module)  # now, since it may move what the parameters below share
    for name, parameter in local.module.named_parameters():
        shard = cast(Tensor, parameter).to_local().detach()  # type: ignore[attr-defined]
        part = local.slices[name]
        assert tuple(shard.shape) == part.local_shape, (name, shard.shape, part)
        if init_param:
            with torch.no_grad():
                shard.copy_(part.of(init_param(name, torch.Size(part.shape))))
        local.local_params[name] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        local.keep_memory(name, parameter, local.local_params[name])


def shard_units(
    model: nn.Module, names: Sequence[str], mesh: DeviceMesh, reshard_after_forward: bool
) -> list[FSDPModule]:
    """Wrap the units and the model. UsageError, with names, for parameters that FSDP cannot
    slice."""
    where, parameters = f"{type(model).__name__}, in shards", dict(model.named_parameters())
    refuse(
        [name for name, p in parameters.items() if not p.dim()],
        "scalar parameters cannot be sharded:",
        where,
        "give them the shape (1,), or train with whole replicas",
    )
    refuse(
        [name for name, p in parameters.items() if not p.numel()],
        "parameters without elements cannot be sharded:",
        where,
        "leave them out of the model, or train with whole replicas",
    )
    refuse(
        [name for name, p in parameters.items() if not p.is_contiguous()],
        "parameters that are not contiguous cannot be sharded:",
        where,
        "call .contiguous() on them",
    )
    recurrent = [name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)]
    # A GRU on an H200 with torch 2.11 and cuDNN 9, measured with examples/gallery/lines_of_text.py.
    if recurrent and mesh.device_type == "cuda":
        raise UsageError(
            f"recurrent layers on a GPU cannot be sharded: {join_names(recurrent)}",
            where,
            "train with whole replicas: in shards cuDNN gives them other bits",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP's, about CPUs
        units = [
            fully_shard(
                model.get_submodule(name), mesh=mesh, reshard_after_forward=reshard_after_forward
            )
            for name in names
        ]
        return [*units, fully_shard(model, mesh=mesh)]


def set_prefetch(units: list[FSDPModule], ahead: int) -> None:
    """Set which units are gathered when one starts, in each pass: the rate limiter."""
    blocks = units[:-1]
    for i, unit in enumerate(blocks):
        unit.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        # a unit that names itself prefetches none; with an empty list FSDP would choose one
        unit.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1] or [unit])
    if blocks:
        last = blocks[max(0, len(blocks) - ahead) :]
        units[-1].set_modules_to_forward_prefetch(blocks[:ahead])
        units[-1].set_modules_to_backward_prefetch(last[::-1] or [units[-1]])
