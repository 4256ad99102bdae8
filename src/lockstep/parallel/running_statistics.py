"""Buffers that follow the micro-batches, such as BatchNorm's running statistics, on all workers alike.

In one process, micro-batch k changes the buffers that micro-batch k - 1 has left. Here every
micro-batch of a step starts from the buffers of the step's start, and the buffers after it are
exchanged bit by bit. At the commit every worker applies the changes in the order of the
micro-batches, so the result depends neither on the number of workers nor on repeated attempts.

BatchNorm moves its statistics r to (1 - m) r + m s, with momentum m and the statistics s of the
batch. After c such moves from r, to r', the change of the micro-batch is r' - (1 - m)**c r. With
momentum None they are means over all batches. A step of one micro-batch keeps r' unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.log import log
from lockstep.runtime.tensor_bytes import as_bytes
from lockstep.units import join_names

BufferKinds = Mapping[str, Literal["local", "per_micro_batch"]]  # by pattern of names, as in fnmatch
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class RunningStatistics:
    """The running statistics of the BatchNorm layers of `model`, and its "per_micro_batch" buffers.

    kinds  what else forward passes may change. "local": each worker keeps its own value.
           "per_micro_batch": a step leaves the value after its last micro-batch
    UsageError: a pattern that matches no buffer.
    """

    def __init__(self, model: nn.Module, micro_batches: int, kinds: BufferKinds) -> None:
        self.model, self.micro_batches = model, micro_batches
        buffers = list(dict(model.named_buffers()))
        if unknown := [pattern for pattern in kinds if not any(fnmatchcase(name, pattern) for name in buffers)]:
            what = f"no buffer of {type(model).__name__} matches {join_names(unknown)}"
            raise UsageError(what, f"buffers={dict(kinds)}", f"the model has {join_names(buffers) or 'none'}")
        kind_of = {name: kind for pattern, kind in kinds.items() for name in buffers if fnmatchcase(name, pattern)}
        self.local = {name for name, kind in kind_of.items() if kind == "local"}
        norms = {name: module for name, module in model.named_modules() if isinstance(module, BATCH_NORMS) and module.track_running_stats}
        self.norms = {tuple(f"{name}.{part}".lstrip(".") for part in STATISTICS): module for name, module in norms.items()}
        self.norms = {names: module for names, module in self.norms.items() if not self.local.intersection(names)}
        followed = [name for names in self.norms for name in names]
        self.names = [*followed, *(name for name in buffers if kind_of.get(name) == "per_micro_batch" and name not in followed)]
        self._start: dict[str, Tensor] | None = None  # the buffers before the step in progress
        self._rows: Tensor | None = None  # uint8 (K, bytes): the buffers after each micro-batch, zero for those of other workers

    def start_step(self) -> None:
        """Keep the buffers; after a failed attempt, restore those before it."""
        if not self.names:
            return
        if self._start is None:
            self._start = {name: tensor.clone() for name, tensor in self._buffers().items()}
        self._restore()
        size = sum(tensor.nbytes for tensor in self._start.values())
        self._rows = torch.zeros(self.micro_batches, size, dtype=torch.uint8, device=next(iter(self._start.values())).device)

    def end_micro_batch(self, k: int, *, counts: bool = True) -> None:
        """Take the buffers after micro-batch `k`, and restore those of the step's start.

        counts  False: another worker takes them
        """
        if self._rows is None:
            return
        if counts:
            self._rows[k] = torch.cat([as_bytes(tensor) for tensor in self._buffers().values()])
        self._restore()

    def exchange(self, group: dist.ProcessGroup, wait: Callable[[list[dist.Work | None]], None]) -> None:
        """Collective. Receive the buffers after the micro-batches of other workers."""
        if self._rows is not None and group.size() > 1:
            wait([dist.all_reduce(self._rows, group=group, async_op=True)])  # exact: one worker has each row

    def commit(self) -> None:
        """Apply the changes of all micro-batches to the buffers."""
        if self._start is None or self._rows is None:
            return
        after, buffers = [self._from_bytes(row) for row in self._rows], self._buffers()
        for (mean, variance, count), module in self.norms.items():
            before = int(self._start[count])
            moves = [int(row[count]) - before for row in after]
            for name in (mean, variance):
                buffers[name].copy_(moved_statistics(self._start[name], [row[name] for row in after], before, moves, module.momentum))
            buffers[count].fill_(before + sum(moves))
        for name in self.names[len(STATISTICS) * len(self.norms) :]:
            buffers[name].copy_(after[-1][name])
        self._start = self._rows = None

    def _buffers(self) -> dict[str, Tensor]:
        return {name: self.model.get_buffer(name) for name in self.names}

    def _restore(self) -> None:
        assert self._start is not None
        for name, tensor in self._buffers().items():
            tensor.copy_(self._start[name])

    def _from_bytes(self, row: Tensor) -> dict[str, Tensor]:
        assert self._start is not None
        ends = [0, *accumulate(tensor.nbytes for tensor in self._start.values())]
        parts = [row[start:end].clone() for start, end in pairwise(ends)]
        return {name: part.view(like.dtype).view(like.shape) for part, (name, like) in zip(parts, self._start.items(), strict=True)}


def moved_statistics(start: Tensor, after: Sequence[Tensor], count: int, moves: Sequence[int], momentum: float | None) -> Tensor:
    """Return statistics after the moves of all micro-batches, given the statistics after each.

    start, count  the statistics before the step, and how often they had moved
    moves         of each micro-batch
    """
    if len(moves) == 1 or not any(moves):
        return after[0]
    first, value = start.double(), start.double()
    if momentum is None:
        total = count * first + sum((count + n) * row.double() - count * first for row, n in zip(after, moves, strict=True))
        return total / (count + sum(moves))
    for row, n in zip(after, moves, strict=True):
        keep = (1 - momentum) ** n
        value = keep * value + (row.double() - keep * first)
    return value


class PlainBatchNorm(nn.BatchNorm1d):
    """BatchNorm of any shape (batch, channels, ...), within a micro-batch."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")


def replace_sync_batchnorm(model: nn.Module) -> None:
    """Make SyncBatchNorm layers plain, with a warning: their sums depend on the number of workers."""
    layers = {name or type(module).__name__: module for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}
    for module in layers.values():
        object.__setattr__(module, "__class__", PlainBatchNorm)  # keeps its parameters, hooks and names
    if layers:
        log.warning("SyncBatchNorm now normalizes each micro-batch by itself, like BatchNorm: %s", join_names(list(layers)))
