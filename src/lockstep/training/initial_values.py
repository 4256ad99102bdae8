"""The initial values of a model, drawn only when neither a checkpoint nor other workers provide
them.

A model is built with NaN in every parameter that checkpoints contain. If no state was loaded,
`draw_initial_values` replaces them; one that it missed makes the first loss NaN, which ends the
run.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.layout import Layout
from lockstep.parallel.deferred_init import materialize
from lockstep.parallel.parallelize import InitParam, LocalModel
from lockstep.runtime.tensor_bytes import as_bytes
from lockstep.tensor_slice import TensorSlice


class InitialValues(Protocol):
    """The values that a model on the meta device starts with."""

    def init_param(self, name: str, shape: torch.Size) -> Tensor:
        """Return the whole initial value of a parameter or buffer, on the CPU: the same on all
        workers."""

    def is_saved(self, name: str) -> bool:
        """Return whether checkpoints hold it; others have their initial value in every start."""

    def release(self) -> None:
        """Free what the values were computed from: the model has them."""


def until_drawn(init: InitialValues, model: nn.Module) -> InitParam:
    """Return how to fill a new model: NaN where a checkpoint or `draw_initial_values` follows."""
    names = {name for name, _ in model.named_parameters() if init.is_saved(name)}
    return deferred(init.init_param, names)


def allocate(model: nn.Module, device: torch.device, init: InitialValues) -> nn.Module:
    """Move a whole model from the meta device to `device`, in place."""
    return materialize(model, device, until_drawn(init, model))


def deferred(init_param: InitParam, names: Collection[str]) -> InitParam:
    """Return `init_param` with NaN in place of the parameters `names`, which takes no memory."""
    return lambda name, shape: (
        torch.tensor(math.nan).expand(shape) if name in names else init_param(name, shape)
    )


@torch.no_grad()
def draw_initial_values(
    model: nn.Module | LocalModel, init: InitialValues, runtime: ElasticRuntime
) -> None:
    """Collective. Fill the parameters that `deferred` left as NaN.

    The value of a parameter follows from the seed and its name, all of it at once. So the shards of
    a replica take turns: each draws a whole parameter and sends the others their rows. Memory: one
    whole parameter.
    """
    if isinstance(model, nn.Module):
        model = LocalModel(model, Layout(), local_params=dict(model.named_parameters()))
    layout = model.layout
    rank = runtime.world.rank
    ranks = layout.ranks_along(rank, "shard") if layout.workers_per_replica > 1 else [rank]
    slices = {
        name: model.tensor_slices.get(name, TensorSlice.whole(p.shape))
        for name, p in model.local_params.items()
        if init.is_saved(name)
    }
    # By whole size: the same order on all shards, which draw parameters of similar size at a time.
    names = sorted(slices, key=lambda name: (-math.prod(slices[name].shape), name))
    for start in range(0, len(names), len(ranks)):
        received = []
        works = []
        sent = []
        for owner, name in zip(ranks, names[start : start + len(ranks)], strict=False):
            parameter = model.local_params[name]
            if owner != rank:
                rows = torch.empty(parameter.shape, dtype=parameter.dtype)
                received.append((parameter, rows))
                works.append(runtime.group.irecv(as_bytes(rows), owner) if rows.numel() else None)
                continue
            shape = torch.Size(slices[name].shape)
            value = init.init_param(name, shape).to(parameter.dtype)
            for shard, other in enumerate(ranks):
                rows = (
                    slices[name].split_rows(shard, len(ranks)) if len(ranks) > 1 else slices[name]
                ).of(value)
                if other == rank:
                    parameter.copy_(rows)
                elif rows.numel():
                    sent.append(as_bytes(rows))  # kept until the other has received it
                    works.append(runtime.group.isend(sent[-1], other))
        runtime.group.wait(works)
        for parameter, rows in received:
            parameter.copy_(rows)
