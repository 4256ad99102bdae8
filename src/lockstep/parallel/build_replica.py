"""Build a replica: whole, or in slices of several workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.layout import Layout
from lockstep.network.subtrees import equal_shares
from lockstep.parallel.bucket_source import BucketSource
from lockstep.parallel.gradient_source import GradientSource, SumOptions
from lockstep.parallel.groups import Connection, ProcessGroups
from lockstep.parallel.parallelize import LocalModel
from lockstep.parallel.pipeline import StageSource
from lockstep.parallel.replica import Replica
from lockstep.parallel.running_statistics import RunningStatistics
from lockstep.parallel.unit_source import UnitSource
from lockstep.runtime.numerics import sha256_of
from lockstep.runtime.process_group import gather_json


def build_replica(
    model: nn.Module | LocalModel,
    *,
    micro_batches: int,
    seed: int = 0,
    statistics: RunningStatistics | None = None,
    init_sync: bool = True,
    connection: Connection | None = None,
    **sums: Any,
) -> Replica:
    """Return a replica of one worker, or a worker's part of a replica that has a LocalModel.

    init_sync  Collective: give all whole replicas rank 0's weights. False: they are equal, or
               received later
    sums       see SumOptions
    """
    options = SumOptions(**sums)
    local = model if isinstance(model, LocalModel) else None
    module = model.module if isinstance(model, LocalModel) else model
    in_thread = next(module.parameters()).device.type == "cpu"
    groups = local.groups if local else ProcessGroups(Layout(), in_thread)
    groups.connect(connection or Connection())
    source: GradientSource
    if local:
        source = StageSource(local, options) if local.stage else UnitSource(local, options)
    else:
        source = BucketSource(module, groups, options)
    replica = Replica(source, module, micro_batches=micro_batches, seed=seed, statistics=statistics)
    if init_sync and not local:
        start_equal(replica)
    return replica


def start_equal(replica: Replica) -> None:
    """Collective. Give a whole replica the weights of rank 0."""
    module = replica.module
    equal_shares(dist.get_world_size(), replica.leaves)  # refuses too many ranks
    replica.source.agree()
    tensors = [*module.parameters(), *module.buffers()]
    take_weights_of_rank_0(tensors, tensors[0].device, replica.groups.waits.wait)


def take_weights_of_rank_0(
    tensors: list[Tensor],
    device: torch.device,
    wait: Callable[[list[dist.Work | None]], None],
) -> None:
    """Collective. Weights that are equal already, as from one seed, are not sent: a link may be
    slow. On a GPU they are, since its links are faster than a hash."""
    size = dist.get_world_size()
    if size == 1:
        return
    if device.type == "cpu" and len(set(gather_json(size, sha256_of(tensors), wait))) == 1:
        return
    for tensor in tensors:
        value = tensor.detach().to(device).contiguous()  # gloo ignores strides
        dist.broadcast(value, 0)
        if value.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(value)
