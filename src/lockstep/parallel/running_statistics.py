"""Buffers that follow the micro-batches, such as BatchNorm's running statistics, on all workers
alike.

In one process, micro-batch k changes the buffers that micro-batch k - 1 has left. Here every
micro-batch of a step starts from the buffers of the step's start, and the buffers after it are
exchanged bit by bit. At the commit every worker applies the changes in the order of the
micro-batches, so the result depends neither on the number of workers nor on repeated attempts.

BatchNorm moves its statistics r to (1 - m) r + m s, with momentum m and the statistics s of the
batch. After c such moves from r, to r', the change of the micro-batch is r' - (1 - m)**c r. With
momentum None they are means over all batches. A step of one micro-batch keeps r' unchanged.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError, refuse
from lockstep.log import log
from lockstep.runtime.tensor_bytes import as_bytes
from lockstep.runtime.torch_private import foreach_copy_
from lockstep.units import join_names

# By pattern of names, as in fnmatch.
BufferKinds = Mapping[str, Literal["local", "per_micro_batch"] | float]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
ROUNDINGS = 16  # of a pass and its difference, at most, in units of the last place
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class RunningStatistics:
    """The running statistics of the BatchNorm layers of `model`, and other buffers that forward
    passes change.

    kinds  of the other buffers. "local": each worker keeps its own value. "per_micro_batch": a pass
           overwrites the value, and a step leaves that of its last micro-batch. A number d: a pass
           moves the value b to d * b + c, as an average with decay d does, or a count with 1.0
    UsageError: a pattern that matches no buffer.
    """

    def __init__(self, model: nn.Module, micro_batches: int, kinds: BufferKinds) -> None:
        self.model = model
        self.micro_batches = micro_batches
        self.kinds = kinds
        buffers = list(dict(model.named_buffers()))
        kind_of: dict[str, object] = {}
        unknown = []
        for pattern, kind in kinds.items():
            matching = fnmatch.filter(buffers, pattern)
            unknown += [] if matching else [pattern]
            kind_of |= dict.fromkeys(matching, kind)
        if unknown:
            raise UsageError(
                f"no buffer of {type(model).__name__} matches {join_names(unknown)}",
                f"buffers={dict(kinds)}",
                f"the model has {join_names(buffers) or 'none'}",
            )
        self.local = {name for name, kind in kind_of.items() if kind == "local"}
        self.norms: dict[tuple[str, ...], Any] = {}  # by the names of their statistics
        for name, module in model.named_modules():
            names = tuple(f"{name}.{part}".lstrip(".") for part in STATISTICS)
            is_tracked = isinstance(module, BATCH_NORMS) and module.track_running_stats
            if is_tracked and not self.local.intersection(names):
                self.norms[names] = module
        followed = list(chain(*self.norms))
        self.decays = {
            name: 0.0 if kind == "per_micro_batch" else float(cast(float, kind))
            for name, kind in kind_of.items()
            if kind != "local" and name not in followed
        }
        self.names = [*followed, *(name for name in buffers if name in self.decays)]
        self._start: list[Tensor] | None = None  # the buffers before the step in progress
        # uint8 (K, bytes): the buffers after each micro-batch, zero for those of other workers
        self._rows: Tensor | None = None

    def start_step(self) -> None:
        """Keep the buffers; after a failed attempt, restore those before it."""
        if not self.names:
            return
        if self._start is None:
            self._start = [tensor.detach().clone() for tensor in self._buffers()]
        foreach_copy_(self._buffers(), self._start)
        size = sum(tensor.nbytes for tensor in self._start)
        self._rows = torch.zeros(
            self.micro_batches, size, dtype=torch.uint8, device=self._start[0].device
        )

    def end_micro_batch(self, k: int, *, counts: bool = True) -> None:
        """Take the buffers after micro-batch `k`, and restore those of the step's start.

        counts  False: another worker takes them
        """
        if self._start is None or self._rows is None:
            return
        buffers = self._buffers()
        if counts:
            torch.cat([as_bytes(tensor) for tensor in buffers], out=self._rows[k])
        # `data`: in a pipeline the backward pass, which does not read them, follows and refuses a
        # new version
        foreach_copy_([tensor.data for tensor in buffers], self._start)

    def exchange(
        self, group: dist.ProcessGroup, wait: Callable[[list[dist.Work | None]], None]
    ) -> None:
        """Collective. Receive the buffers after the micro-batches of other workers."""
        if self._rows is not None and group.size() > 1:
            # Exact: one worker has each row.
            wait([dist.all_reduce(self._rows, group=group, async_op=True)])

    def commit(self, trained: Sequence[int] | None = None) -> None:
        """Apply the changes of these micro-batches to the buffers; None: of all."""
        if self._start is None or self._rows is None:
            return
        rows = self._rows if trained is None else self._rows[[*trained]]
        buffers = self._buffers()
        parts = rows.split([tensor.nbytes for tensor in self._start], 1)
        after = [  # of each buffer: (K, elements)
            part.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
            for part, tensor in zip(parts, self._start, strict=True)
        ]
        # Buffers that move alike, by dtype, momentum, count and moves.
        alike = defaultdict[tuple[Any, ...], list[int]](list)
        for i, module in zip(range(0, 3 * len(self.norms), 3), self.norms.values(), strict=True):
            before = int(self._start[i + 2])
            moves = tuple(count - before for count in after[i + 2].flatten().tolist())
            alike[self._start[i].dtype, module.momentum, before, moves] += [i, i + 1]
            buffers[i + 2].fill_(before + sum(moves))
        for i, name in enumerate(self.names[3 * len(self.norms) :], 3 * len(self.norms)):
            if decay := self.decays[name]:
                alike[self._start[i].dtype, 1 - decay, 0, (1,) * len(rows)].append(i)
            else:
                buffers[i].copy_(after[i][-1].view_as(buffers[i]))
        for (_, momentum, before, moves), numbers in alike.items():
            start = torch.cat([self._start[i].reshape(-1) for i in numbers])
            moved_rows = torch.cat([after[i] for i in numbers], 1).unbind()
            moved = moved_statistics(start, moved_rows, before, moves, momentum)
            parts_moved = moved.split([self._start[i].numel() for i in numbers])
            for i, values in zip(numbers, parts_moved, strict=True):
                buffers[i].copy_(values.view(buffers[i].shape))
        self._start = self._rows = None

    def declared_values(self) -> dict[str, Tensor]:
        """Return copies of the buffers that `kinds` declares, without local ones."""
        return {name: self.model.get_buffer(name).detach().clone() for name in self.decays}

    def set_declared(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.model.get_buffer(name).data.copy_(value)

    def refuse_wrong_kinds(
        self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], again: Mapping[str, Tensor]
    ) -> None:
        """UsageError when a buffer does not change as its kind does.

        before  the values before a pass; after: those after it
        again   the values after the same pass, which started from `after`
        """
        refuse(
            [
                f"{name} ({decay or 'per_micro_batch'})"
                for name, decay in self.decays.items()
                if not follows_decay(before[name], after[name], again[name], decay)
            ],
            "these buffers change otherwise than declared:",
            f"buffers={dict(self.kinds)}; "
            "micro-batch 0 was computed twice, from the value before it and from the one after it",
            '"per_micro_batch" is for a value that each pass overwrites; '
            "a number d for an average b = d * b + c, 1.0 for a count or a sum. "
            "A queue: collect its rows with session.per_micro_batch, "
            "and update it after the micro-batch loop",
        )

    def _buffers(self) -> list[Tensor]:
        return [self.model.get_buffer(name) for name in self.names]


def follows_decay(before: Tensor, after: Tensor, again: Tensor, decay: float) -> bool:
    """Return whether a pass maps each value b to `decay` * b + c, up to roundings.

    before, after  of a pass; again: after the same pass, which started from `after`
    """
    moved = again.double() - after.double()
    expected = decay * (after.double() - before.double())
    is_rounded = decay > 0 and after.dtype.is_floating_point
    ulp = torch.finfo(after.dtype).eps if is_rounded else 0.0
    largest = torch.stack([before.abs(), after.abs(), again.abs()]).amax(0)
    is_right = (moved - expected).abs() <= ROUNDINGS * ulp * largest.double()
    is_right |= moved.isnan() & expected.isnan()
    return bool(is_right.all())


def moved_statistics(
    start: Tensor, after: Sequence[Tensor], count: int, moves: Sequence[int], momentum: float | None
) -> Tensor:
    """Return statistics after the moves of all micro-batches, given the statistics after each.

    start, count  the statistics before the step, and how often they had moved
    moves         of each micro-batch
    """
    if len(moves) == 1 or not any(moves):
        return after[0]
    first, value = start.double(), start.double()
    if momentum is None:
        total = count * first + sum(
            (count + n) * row.double() - count * first for row, n in zip(after, moves, strict=True)
        )
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
    """Make SyncBatchNorm layers plain, with a warning: their sums depend on the number of
    workers."""
    layers = {
        name or type(module).__name__: module
        for name, module in model.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
    }
    for module in layers.values():
        # Keeps its parameters, hooks and names.
        object.__setattr__(module, "__class__", PlainBatchNorm)
    if layers:
        log.warning(
            "SyncBatchNorm now normalizes each micro-batch by itself, like BatchNorm: %s",
            join_names(list(layers)),
        )
