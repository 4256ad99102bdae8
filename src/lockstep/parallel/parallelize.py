"""From a model on the meta device to what this worker holds of it: the one place where the order of wrapping stands.

    1. pipeline      layers of other stages are taken out; what is left is a smaller model
    2. tensor        the matrices themselves get smaller; all that follows sees plain, smaller layers
    3. recompute     inside the units, so that what is computed again is computed while its unit is gathered
    4. compile       inside the units too: a compiled layer is one graph for all layers; gathering stays outside of it
    5. shard         around each block, then around the model (embedding, norms, output): what is left belongs to the root
    6. memory        only now: a worker never has more than its pieces
    7. first values  each parameter's piece of its first value, or of the checkpoint that the run starts from

Replicas alone need none of this but 3, 4, 6 and 7: the model is whole, and DistributedDataParallel (replicate.py) carries its gradients.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lockstep.layout import Layout, Spot
from lockstep.models.build import materialise
from lockstep.parallel.groups import Wires
from lockstep.parallel.pipeline import Stage, keep
from lockstep.parallel.plans import Plan, plan_of
from lockstep.parallel.tensor_parallel import split
from lockstep.tensor_slice import Piece

NUMBERS = itertools.count()
FirstValue = Callable[[str, torch.Size], Tensor]


@dataclass
class Held:
    """What this worker holds of a model: all of it, or its pieces.

    module  to be called; its parameters are FSDP's
    named   name -> the same memory as an ordinary parameter of this worker's piece, for the optimizer and the checkpoint
    pieces  name -> which piece that is
    units   FSDP's modules in the order of the forward pass, the root last
    shared  name -> what the tensor axis leaves, before it is sharded
    summands  names of those whose gradient is the sum of what the tensor axis's workers have
    """

    module: nn.Module
    layout: Layout
    wires: Wires | None = None
    named: dict[str, nn.Parameter] = field(default_factory=dict)
    pieces: dict[str, Piece] = field(default_factory=dict)
    units: list[FSDPModule] = field(default_factory=list)
    shared: dict[str, Piece] = field(default_factory=dict)
    stage: Stage | None = None
    summands: tuple[str, ...] = ()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This worker's pieces."""
        return iter(self.named.values())

    def is_borrowed(self, name: str) -> bool:
        """Whether the parameter is the first stage's, and this one has a copy of it."""
        return self.stage is not None and name in self.stage.borrowed

    def rows_of_trained(self, shard: int) -> list[tuple[int, int, int, bool]]:
        """For each trained parameter that is this stage's own: where its rows begin and end among all rows of them, which of its rows is
        this shard's first, and whether the tensor axis has cut it."""
        found, first = [], 0
        for name, parameter in self.named.items():
            if parameter.requires_grad and not self.is_borrowed(name):
                rows = self.shared[name].size[0]
                start = min(rows, shard * -(-rows // self.layout.shard))
                found.append((first, first + rows, start, not self.shared[name].is_whole))
                first += rows
        return found


def whole_or_held(model: nn.Module | Held) -> tuple[nn.Module, Held | None]:
    """(the module, what this worker holds of it where a replica is several workers; None where it is one)."""
    if not isinstance(model, Held):
        return model, None
    return model.module, model if model.layout.unit > 1 else None


def hold(
    model: nn.Module,
    layout: Layout,
    spot: Spot,
    first_value: FirstValue,
    device: torch.device,
    *,
    inside: Callable[[list[nn.Module]], None] | None = None,
    units_ahead: int = 1,
    free_after_forward: bool = True,
    parts_of_stages: int = 1,
) -> Held:
    """This worker's part of `model` (on the meta device): the whole where a replica is one worker.

    spot                where this worker stands in its replica
    inside              what is done to the blocks before they are sharded (recompute, compile)
    units_ahead         units gathered ahead of the one that computes: 1 + units_ahead are alive at once
    free_after_forward  False: units stay gathered from the forward to the backward pass (ZeRO-2): less traffic, more memory
    parts_of_stages     of the model that each stage holds, a lap of all stages apart (interleaved)
    """
    if layout.unit == 1:
        whole = materialise(model, device, first_value)
        if inside:
            inside([whole.get_submodule(name) for name in plan_of(whole).units])
        return Held(whole, layout, named=dict(whole.named_parameters()))
    plan, wires = plan_of(model), Wires(layout, aside=device.type == "cpu")
    stage = keep(model, spot.stage, layout.pipeline, parts_of_stages) if layout.pipeline > 1 else None
    plan = plan.within(model)
    pieces = split(model, plan, wires, spot.tensor, layout.tensor)
    if inside:
        inside([model.get_submodule(name) for name in plan.units])
    units = shard(model, plan, device, spot.shard, layout.shard, free_after_forward)
    look_ahead(units, units_ahead)
    shared, pieces = pieces, {name: piece.cut_rows(spot.shard, layout.shard) for name, piece in pieces.items()}
    summands = tuple(filter(plan.is_summand, pieces)) if layout.tensor > 1 else ()
    held = Held(model, layout, wires, pieces=pieces, units=units, shared=shared, stage=stage, summands=summands)
    model.to_empty(device=device)
    cast(FSDPModule, model)._get_fsdp_state()._lazy_init()  # now, since it may move what the parameters below share
    for name, parameter in model.named_parameters():
        local = cast(Tensor, parameter).to_local().detach()  # type: ignore[attr-defined]
        assert tuple(local.shape) == pieces[name].size, (name, local.shape, pieces[name])
        with torch.no_grad():
            local.copy_(pieces[name].of(first_value(name, torch.Size(pieces[name].shape))))
        held.named[name] = nn.Parameter(local, requires_grad=parameter.requires_grad)
    return held


def shard(model: nn.Module, plan: Plan, device: torch.device, part: int, parts: int, free_after_forward: bool) -> list[FSDPModule]:
    """Wrap each unit, then the model. The mesh only says who is who: its group has no backend, nothing can be sent over it."""
    mesh = DeviceMesh(device.type, list(range(parts)), mesh_dim_names=("shard",), _init_backend=False, _rank=part)
    name = f"lockstep-shard-{next(NUMBERS)}"
    mesh._pg_registry[name] = dist.ProcessGroup(part, parts)  # type: ignore[call-arg]  # whose store may be left out
    mesh._dim_group_names = [cast(Any, name)]
    _register_process_group(cast(Any, name), mesh._pg_registry[name])  # which holds it weakly
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it does on a CPU
        for name in plan.units:
            fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=free_after_forward)
        fully_shard(model, mesh=mesh)
    return [cast(FSDPModule, model.get_submodule(name)) for name in plan.units] + [cast(FSDPModule, model)]


def look_ahead(units: list[FSDPModule], ahead: int) -> None:
    """The rate limiter: which units are asked for when one begins, forward and backward."""
    blocks = units[:-1]
    for i, unit in enumerate(blocks):
        unit.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + ahead])
        # a unit that names itself names nobody: FSDP would choose one by itself
        unit.set_modules_to_backward_prefetch(blocks[max(0, i - ahead) : i][::-1] or [unit])
    if blocks:
        units[-1].set_modules_to_forward_prefetch(blocks[:ahead])
        units[-1].set_modules_to_backward_prefetch(blocks[max(0, len(blocks) - ahead) :][::-1] or [units[-1]])
