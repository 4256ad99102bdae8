"""Process groups of one worker, one per axis, and collectives on them that never raise.

A peer may fail in the middle of a pass, where an exception would leave torch in an undefined state.
So the first error is kept until the end of the pass, whose results are discarded: nothing is sent
after it, and receive buffers keep their old values. Each generation forms the groups again, and a
model is wrapped by FSDP only once: FSDP's mesh only defines the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.layout import Coordinates, Layout
from lockstep.parallel.ordered_sum import start_exchange
from lockstep.runtime.process_group import new_subgroup
from lockstep.runtime.status_board import StatusBoard
from lockstep.runtime.work import WorkWaiter, static_group

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Connection:
    """The ties of process groups to a run.

    board             records the current collective
    generation_error  returns why the generation is over; "" while it is valid
    form_context      entered while groups are formed
    """

    board: StatusBoard = field(default_factory=partial(StatusBoard, None))
    generation_error: Callable[[], str] = static_group
    form_context: Callable[[], AbstractContextManager[None]] = nullcontext


class RankPosition(NamedTuple):
    """The place of this worker among those of a generation. layout: with its replicas."""

    rank: int
    layout: Layout
    at: Coordinates


class ProcessGroups:
    """The process groups of this worker. None where an axis has size 1, or before `form`.

    gather_group    shards of a unit's parameters, used by the thread of the model
    scatter_group   the same workers, for gradients: the reducer thread needs a separate group
    replica_group   workers with the same slices in other replicas, for gradients
    tensor_group    workers that share each layer
    pipeline_group  stages of the pipeline
    tied_group      first and last stage, for a weight that both have
    in_thread       see `WorkWaiter`
    """

    def __init__(self, layout: Layout, in_thread: bool = True) -> None:
        self.layout, self.in_thread = layout, in_thread
        self.failure: Exception | None = None
        self.connect(Connection())
        self.waited_s = 0.0  # by the thread of the model, in this step
        self.clear()

    def connect(self, connection: Connection) -> None:
        self.board = connection.board
        self.form_context = connection.form_context
        self.waits = WorkWaiter(connection.generation_error, in_thread=self.in_thread)

    def clear(self) -> None:
        self.formed = False
        self._position: RankPosition | None = None
        self.failure = None
        self.gather_group: Group = None
        self.scatter_group: Group = None
        self.replica_group: Group = None
        self.tensor_group: Group = None
        self.pipeline_group: Group = None
        self.tied_group: Group = None

    def form(self) -> None:
        """Collective. Form the groups of this generation, with as many replicas as it has."""
        self._position = self._read_position()
        rank, layout, _ = self._position
        stages = layout.ranks_along(rank, "pipeline")
        ends = [stages[0], stages[-1]]
        with self.form_context():
            self.gather_group = new_subgroup(layout.ranks_along(rank, "shard"))
            self.scatter_group = new_subgroup(layout.ranks_along(rank, "shard"))
            self.replica_group = dist.group.WORLD
            if layout.workers_per_replica > 1 or layout.replicate == 1:
                self.replica_group = new_subgroup(layout.ranks_along(rank, "replicate"))
            self.tensor_group = new_subgroup(layout.ranks_along(rank, "tensor"))
            self.pipeline_group = new_subgroup(stages)
            if len(stages) > 1 and rank in ends:
                self.tied_group = new_subgroup(ends)
        self.formed = True

    @property
    def position(self) -> RankPosition:
        """The position of this worker, which `form` has read for the generation."""
        return self._position or self._read_position()

    def _read_position(self) -> RankPosition:
        rank, layout = dist.get_rank(), self.layout_of(dist.get_world_size())
        return RankPosition(rank, layout, layout.coordinates(rank))

    def layout_of(self, workers: int) -> Layout:
        return replace(self.layout, replicate=workers // self.layout.workers_per_replica)

    def start_works(self, start: Callable[[], Iterable[dist.Work | None]]) -> list[dist.Work]:
        try:
            return [] if self.failure else [work for work in start() if work is not None]
        except Exception as error:
            self.record_failure(error)
            return []

    def wait(self, works: list[dist.Work]) -> None:
        start_s = time.perf_counter()
        if self.failure is None:
            try:
                self.waits.wait(works)
            except Exception as error:
                self.record_failure(error)
        self.waited_s += time.perf_counter() - start_s

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Context manager whose waits are not those of a step."""
        waited_s = self.waited_s
        try:
            yield
        finally:
            self.waited_s = waited_s

    def record_failure(self, error: Exception) -> None:
        """Keep the first error for the end of the pass."""
        error.__traceback__ = None  # it references the group
        self.failure = self.failure or error

    def raise_failure(self) -> None:
        if self.failure:
            raise self.failure

    def all_reduce(self, tensor: Tensor, group: Group) -> Tensor:
        """Collective in the group. Sum in place; the same bits on all members."""
        if group is not None:
            self.board.enter_collective(tensor.nbytes)
            start = partial(dist.all_reduce, tensor, group=group, async_op=True)
            self.wait(self.start_works(lambda: [start()]))
        return tensor

    def all_reduce_in_order(self, tensor: Tensor, group: Group) -> Tensor:
        """Collective. Sum in place in rank order: the bits do not depend on tensor splits."""
        if group is not None and tensor.numel():
            gathered = tensor.new_empty(group.size(), *tensor.shape)
            self.board.enter_collective(gathered.nbytes)
            start = partial(dist.all_gather, list(gathered), tensor, group=group, async_op=True)
            self.wait(self.start_works(lambda: [start()]))
            tensor.copy_(gathered[0])
            for summand in gathered[1:]:
                tensor.add_(summand)
        return tensor


def all_to_all_rows(
    parts: list[Tensor], group: Group, waits: WorkWaiter, tag: int = 0
) -> list[Tensor]:
    """Collective. Send parts[i] to member i; return the parts received, in rank order."""
    if group is None:
        return parts
    others = [i for i in range(group.size()) if i != group.rank()]
    rows = [torch.empty_like(part) if i in others else part for i, part in enumerate(parts)]
    sends, receives = ([(i, tensors[i]) for i in others] for tensors in (parts, rows))
    waits.wait(start_exchange(sends, receives, group, tag=tag), group)
    return rows
