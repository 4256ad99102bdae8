"""A Llama that only runs, cut over processes by torch's own tensor parallelism.

Nothing heals here and no gradient is summed, so DTensor and its mesh serve as they are; for training see tensor.py."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lockstep.elastic.world import World
from lockstep.errors import UsageError
from lockstep.models.llama import Llama, Shape


def tensor_plan(model: Llama) -> dict[str, ParallelStyle]:
    """Which matrices of a Llama are cut for tensor parallelism, for `parallelize_module` (Shoeybi et al. 2019, "Megatron-LM").

    What makes heads or inner units is cut by its rows, so each process has whole heads and computes attention and gate alone;
    what brings them back is cut by its columns, so each has a part of the sum: one all-reduce after attention, one after the
    gated unit. Embedding, norms and output are whole everywhere.
    """
    plan: dict[str, ParallelStyle] = {}
    for number in range(len(model.layers)):
        for name in ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up"):
            plan[f"layers.{number}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "feed_forward.out"):
            plan[f"layers.{number}.{name}"] = RowwiseParallel()
    return plan


def refuse_tensor(shape: Shape, parts: int, where: str) -> None:
    """UsageError when the heads or the inner width cannot be cut into `parts` equal parts."""
    sizes = {"heads": shape.heads, "key-value heads": shape.key_value_heads, "inner width": shape.feed_forward}
    if odd := [f"{size} {name}" for name, size in sizes.items() if size % parts]:
        right = [n for n in range(1, shape.key_value_heads + 1) if not any(size % n for size in sizes.values())]
        raise UsageError(f"{' and '.join(odd)} cannot be cut over {parts} processes", where, f"give {' or '.join(map(str, right))}")


def cut_by_tensor(model: Llama, world: World, where: str) -> dist.ProcessGroup:
    """Collective. Cut a model that each process of the world has whole, so that each keeps its part; the group over which to sum.

    where  what asked for it, for the error. UsageError when it cannot be cut so
    """
    refuse_tensor(model.shape, world.size, where)
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("tensor",))
    parallelize_module(model, mesh, tensor_plan(model), src_data_rank=None)
    return mesh.get_group()
