"""The groups of one worker, an axis each, in the present generation; and collectives on them that never raise.

A peer may be lost in the middle of a forward or backward pass, where an error would leave torch's machinery, and the user's loop, in the
midst of something. So the first error is kept for the end of the pass; from then on nothing is sent, and what was to come stays as it is:
the numbers of that pass are not used.

The parameters of FSDP's units are cut over a mesh whose group has no backend: it only says who is who. What is sent goes over the groups
here, which are made anew with each generation, so that a model which lives need not be wrapped again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.layout import Layout
from lockstep.runtime.process_group import subgroup
from lockstep.runtime.status_board import Board
from lockstep.runtime.work import Waits


class Wires:
    """The groups of this worker. None where an axis has one place, or before `lay`.

    gather   the shards of a unit's parameters, for the thread of the model
    scatter  the same workers, for the gradients, which travel beside it (one group must not be used by two threads)
    across   those who hold the same in other replicas, for the gradients
    tensor   those who share each layer
    stages   those of the pipeline
    tied     the first and the last stage, for a matrix that both have
    aside    as for Waits
    """

    def __init__(self, layout: Layout, aside: bool = True) -> None:
        self.layout = layout
        self.laying: Callable[[], AbstractContextManager[None]] = nullcontext  # around the forming of groups (World.more_groups)
        self.failure: Exception | None = None
        self.board = Board(None)
        self.waits = Waits(aside=aside)
        self.waited_s = 0.0  # in the thread of the model, in the present step
        self.laid = False
        self.drop()

    def drop(self) -> None:
        """Forget the groups: they are broken, or left."""
        self.laid = False
        self.failure = None
        self.gather: dist.ProcessGroup | None = None
        self.scatter: dist.ProcessGroup | None = None
        self.across: dist.ProcessGroup | None = None
        self.tensor: dist.ProcessGroup | None = None
        self.stages: dist.ProcessGroup | None = None
        self.tied: dist.ProcessGroup | None = None

    def lay(self) -> None:
        """Collective. The groups of the present generation, whose ranks stand as the layout says; all replicas that there are now."""
        rank, layout = dist.get_rank(), self.now()

        stages = layout.along(rank, "pipeline")
        with self.laying():
            self.gather, self.scatter = subgroup(layout.along(rank, "shard")), subgroup(layout.along(rank, "shard"))
            self.across, self.tensor = subgroup(layout.along(rank, "replicate")), subgroup(layout.along(rank, "tensor"))
            self.stages = subgroup(stages)
            self.tied = subgroup([stages[0], stages[-1]]) if len(stages) > 1 and rank in (stages[0], stages[-1]) else None
        self.laid = True

    def now(self) -> Layout:
        """The layout with as many replicas as there are in this generation."""
        return self.of(dist.get_world_size())

    def of(self, workers: int) -> Layout:
        """The layout of so many workers."""
        return replace(self.layout, replicate=workers // self.layout.unit)

    def guard(self, begin: Any) -> list[dist.Work]:
        """The works that `begin()` starts; none after a failure."""
        if self.failure is not None:
            return []
        try:
            return [work for work in begin() if work is not None]
        except Exception as error:
            self.fail(error)
            return []

    def wait(self, works: list[dist.Work]) -> None:
        """Wait for all, in the thread of the model."""
        began_s = time.perf_counter()
        if self.failure is None:
            try:
                self.waits.finish(works)
            except Exception as error:
                self.fail(error)
        self.waited_s += time.perf_counter() - began_s

    def fail(self, error: Exception) -> None:
        """Keep the first error for the end of the pass."""
        error.__traceback__ = None  # it holds the group
        self.failure = self.failure or error

    def add_up(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Collective in the group. The sum, in place; the same bits on all of them."""
        if group is not None:
            self.board.collective(tensor.nbytes)
            self.wait(self.guard(lambda: [dist.all_reduce(tensor, group=group, async_op=True)]))
        return tensor

    def add_in_order(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Collective in the group. The sum, in place, in the order of its members: the bits do not depend on where tensors are cut."""
        if group is not None and tensor.numel():
            every = tensor.new_empty(group.size(), *tensor.shape)
            self.board.collective(every.nbytes)
            self.wait(self.guard(lambda: [dist.all_gather(list(every), tensor, group=group, async_op=True)]))
            tensor.copy_(every[0])
            for one in every[1:]:
                tensor.add_(one)
        return tensor


class Arrival(dist.Work):
    """Parameters on their way; waiting for them never raises."""

    def __init__(self, wires: Wires, works: list[dist.Work]) -> None:
        super().__init__()
        self.wires, self.works = wires, works

    def wait(self, timeout: Any = None) -> bool:
        self.wires.wait(self.works)
        return True


def everybody_sends(parts: list[Tensor], group: dist.ProcessGroup) -> list[dist.Work | None]:
    """Begin: parts[i] comes from member i, and parts[own] goes to all others."""
    own = group.rank()
    others = [i for i in range(group.size()) if i != own]
    works = [dist.irecv(parts[i], group=group, group_src=i) for i in others if parts[i].numel()]
    return works + [dist.isend(parts[own], group=group, group_dst=i) for i in others if parts[own].numel()]


def exchange_rows(parts: list[Tensor], group: dist.ProcessGroup | None, waits: Waits) -> list[Tensor]:
    """Collective. parts[i] goes to member i; what they have sent to this one, in their order (its own is parts[own] itself)."""
    if group is None:
        return parts
    own = group.rank()
    if parts[own].is_cuda:
        received = torch.empty_like(torch.stack(parts))
        dist.all_to_all_single(received, torch.stack(parts), group=group)
        return list(received)
    rows = [part if i == own else torch.empty_like(parts[own]) for i, part in enumerate(parts)]
    others = [i for i in range(len(parts)) if i != own]
    works = [dist.irecv(rows[i], group=group, group_src=i) for i in others]
    works += [dist.isend(parts[i], group=group, group_dst=i) for i in others]
    waits.finish(works, group)
    return rows
