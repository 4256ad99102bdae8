"""Tensor parallelism for inference, by torch's DTensor.

Inference recovers from no failures and sums no gradients, so DTensor and its mesh serve unchanged.
For training see parallel/tensor_parallel.py.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lockstep.elastic.world import World
from lockstep.errors import UsageError
from lockstep.models.llama import Llama, LlamaConfig


def tensor_parallel_plan(model: Llama) -> dict[str, ParallelStyle]:
    """Return the plan of a Llama for `parallelize_module` (Shoeybi et al. 2019, "Megatron-LM").

    Matrices that produce heads or inner units are column-parallel, those that project back are
    row-parallel: an all-reduce after attention and one after the feed-forward.
    """
    plan: dict[str, ParallelStyle] = {}
    for number in range(len(model.layers)):
        for name in ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up"):
            plan[f"layers.{number}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "feed_forward.out"):
            plan[f"layers.{number}.{name}"] = RowwiseParallel()
    return plan


def refuse_indivisible(config: LlamaConfig, parts: int, where: str) -> None:
    """UsageError: the heads or the inner width cannot be split into `parts` equal parts."""
    sizes = {"heads": config.n_heads, "key-value heads": config.n_kv_heads, "inner width": config.ffn_dim}
    if uneven := [f"{size} {name}" for name, size in sizes.items() if size % parts]:
        valid = [n for n in range(1, config.n_kv_heads + 1) if not any(size % n for size in sizes.values())]
        raise UsageError(f"{' and '.join(uneven)} cannot be split over {parts} processes", where, f"give {' or '.join(map(str, valid))}")


def apply_tensor_parallel(model: Llama, world: World, where: str) -> dist.ProcessGroup:
    """Collective. Split a model that every process has whole; return the group of its all-reduces.

    where  option that asked for it, for the error. UsageError: the model cannot be split so
    """
    refuse_indivisible(model.config, world.size, where)
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("tensor",))
    parallelize_module(model, mesh, tensor_parallel_plan(model), src_data_rank=None)
    return mesh.get_group()
