"""Tensor parallelism for inference: weights are split as for training, without its hooks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.models.llama import Llama, LlamaConfig
from lockstep.parallel.plans import plan_of_llama
from lockstep.parallel.tensor_parallel import tensor_slices


def refuse_indivisible(config: LlamaConfig, parts: int, where: str) -> None:
    """UsageError: the heads or the inner width cannot be split into `parts` equal parts."""
    sizes = {"heads": config.n_heads, "key-value heads": config.n_kv_heads, "inner width": config.ffn_dim}
    if uneven := [f"{size} {name}" for name, size in sizes.items() if size % parts]:
        valid = [n for n in range(1, config.n_kv_heads + 1) if not any(size % n for size in sizes.values())]
        raise UsageError(f"{' and '.join(uneven)} cannot be split over {parts} processes", where, f"give {' or '.join(map(str, valid))}")


def apply_tensor_parallel(model: Llama, runtime: ElasticRuntime, where: str) -> dist.ProcessGroup:
    """Collective. Split a model that every process has whole; return the group of its all-reduces.

    UsageError, which names the option `where`: the model cannot be split so.
    """
    refuse_indivisible(model.config, runtime.world.size, where)
    slices = tensor_slices(model, plan_of_llama(model), runtime.world.rank, runtime.world.size)
    for name, parameter in model.named_parameters():
        if not slices[name].is_whole:
            parameter.data = slices[name].of(parameter.data).clone(memory_format=torch.contiguous_format)  # frees the whole weight
    assert dist.group.WORLD is not None
    return dist.group.WORLD
