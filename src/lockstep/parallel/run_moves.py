"""Send the messages of a schedule between processes, and compare with torch's own collective."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.network.moves import Move, Schedule, rounds
from lockstep.parallel.ordered_sum import start_exchange
from lockstep.runtime.work import WorkWaiter

REPEATS = 3
TOLERANCE = 1e-5  # of sums, relative to the largest one: fp32 in another order


class Measured(NamedTuple):
    """Seconds of the slowest rank, median of REPEATS; `difference` from torch, relative to the
    largest value."""

    measured_s: float
    torch_s: float
    difference: float


def run_moves(
    schedule: Schedule, buffer: Tensor, group: dist.ProcessGroup, waits: WorkWaiter
) -> None:
    """Collective. Play the schedule on each rank's `buffer` (length,), in place."""
    rank, length = group.rank(), buffer.numel()

    def part(move: Move) -> Tensor:
        return buffer[move.slice_of(length)]

    for moves in rounds(schedule):
        sends = [(move.receiver, part(move)) for move in moves if move.sender == rank]
        own = [move for move in moves if move.receiver == rank]
        tensors = [torch.empty_like(part(move)) if move.adds else part(move) for move in own]
        receives = [(move.sender, tensor) for move, tensor in zip(own, tensors, strict=True)]
        waits.wait(start_exchange(sends, receives, group), group)
        for move, tensor in zip(own, tensors, strict=True):
            if move.adds:
                part(move).add_(tensor)


def measure_moves(
    collective: str, schedule: Schedule, size: int, group: dist.ProcessGroup
) -> Measured:
    """Collective. Play a schedule on `size` bytes of fp32, rounded up to equal parts of the ranks.
    LockstepError if the result is not that of torch."""
    ranks, rank = group.size(), group.rank()
    length = -(-size // (4 * ranks)) * ranks
    values = torch.randn(length, generator=torch.Generator().manual_seed(rank))
    own = slice(rank * length // ranks, (rank + 1) * length // ranks)
    result = values.clone()
    expected = values.clone()
    waits = WorkWaiter()
    seconds = timed(lambda: run_moves(schedule, result.copy_(values), group, waits), group)
    torch_seconds = timed(lambda: run_torch(collective, expected.copy_(values), own, group), group)
    of_root = slice(0, length if rank == 0 else 0)
    valid = {"reduce": of_root, "reduce-scatter": own}.get(collective, slice(0, length))
    difference = torch.zeros(1)
    if len(expected[valid]):
        errors = (result - expected)[valid].abs() / expected[valid].abs().amax()
        difference[0] = errors.max()
    dist.all_reduce(difference, dist.ReduceOp.MAX, group=group)
    bound = TOLERANCE if "reduce" in collective else 0.0
    if not float(difference) <= bound:
        raise LockstepError(
            f"the {collective} differs from torch's "
            f"by {float(difference):.3g} of the largest value",
            f"{ranks} ranks, {length} values of fp32; at most {bound:g} is rounding",
            "report this",
        )
    return Measured(seconds, torch_seconds, float(difference))


def timed(function: Callable[[], object], group: dist.ProcessGroup) -> float:
    """Collective. Return the seconds of the slowest rank, the median of REPEATS."""
    durations = []
    for _ in range(REPEATS):
        dist.barrier(group)
        started_s = time.perf_counter()
        function()
        duration = torch.tensor(time.perf_counter() - started_s, dtype=torch.float64)
        dist.all_reduce(duration, dist.ReduceOp.MAX, group=group)
        durations.append(float(duration))
    return statistics.median(durations)


def run_torch(collective: str, buffer: Tensor, own: slice, group: dist.ProcessGroup) -> None:
    """Collective. Run torch's collective on each rank's `buffer`, in place. own: the range of this
    rank."""
    if collective == "broadcast":
        dist.broadcast(buffer, 0, group=group)
    elif collective == "reduce":
        dist.reduce(buffer, 0, group=group)
    elif collective == "all-reduce":
        dist.all_reduce(buffer, group=group)
    elif collective == "all-gather":
        dist.all_gather(list(buffer.chunk(group.size())), buffer[own].clone(), group=group)
    else:
        dist.reduce_scatter(
            buffer[own], [part.clone() for part in buffer.chunk(group.size())], group=group
        )
