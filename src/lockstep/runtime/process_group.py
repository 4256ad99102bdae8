"""torch's default process group: form it, create subgroups, gather JSON values."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public at run time

from lockstep.errors import CollectiveMismatchError
from lockstep.runtime.torch_private import backend_timeout, reset_group_count, set_group_timeout

FORM_TIMEOUT_S = 10.0
FORM_NCCL_TIMEOUT_S = 60.0  # loading NCCL and creating a CUDA context on each GPU comes first
# Modules whose functions pass collectives on for their callers.
PASSED_ON_BY = (
    "lockstep.runtime.process_group",
    "lockstep.elastic.generation_group",
    "lockstep.elastic.collectives",
)
TAG = 1  # of messages in rounds; another thread may send gradients, with tag 0, at the same time
Message = tuple[torch.Tensor, int]  # a buffer, and the rank that it is sent to or received from
Round = tuple[list[Message], list[Message]]  # sent, received


def form_timeout_s(device: torch.device) -> float:
    """Return how long a group may take to form before it has failed."""
    return FORM_NCCL_TIMEOUT_S if device.type == "cuda" else FORM_TIMEOUT_S


def gather_rounds(buffer: torch.Tensor, starts: Sequence[int], rank: int) -> Iterator[Round]:
    """Yield the rounds of Bruck's all-gather: ceil(log2(N)).
    Part i of `buffer`, from starts[i] to starts[i + 1], is that of rank + i modulo N."""
    size, known = len(starts) - 1, 1
    while known < size:
        # The parts 0 to end - known of this rank are the parts known to end of the receiver.
        end = min(2 * known, size)
        yield (
            [(buffer[: starts[end - known]], (rank - known) % size)],
            [(buffer[starts[known] : starts[end]], (rank + known) % size)],
        )
        known = end


def reduce_rounds(
    row: torch.Tensor, rank: int, size: int, combine: Callable[[torch.Tensor, torch.Tensor], None]
) -> Iterator[Round]:
    """Yield the rounds of an all-reduce of `row`, in place: at most 2 + log2(N), by recursive
    doubling.

    Ranks from the largest power of two on send their row first and receive the result last.
    combine  combines its second row into the first: exact, commutative and associative
    """
    power, received = 1 << (size.bit_length() - 1), torch.empty_like(row)
    extra = rank + power if rank + power < size else None
    if rank >= power:
        yield [(row, rank - power)], []
        yield [], [(row, rank - power)]
        return
    if extra is not None:
        yield [], [(received, extra)]
        combine(row, received)
    for distance in (1 << bit for bit in range(power.bit_length() - 1)):
        yield [(row, rank ^ distance)], [(received, rank ^ distance)]
        combine(row, received)
    if extra is not None:
        yield [(row, extra)], []


def run_rounds(rounds: Iterable[Round], wait: Callable[[list[dist.Work | None]], None]) -> None:
    """Collective. Send and receive the messages of each round, and `wait` for them."""
    for sent, received in rounds:
        sends = [dist.isend(part, dst=to, tag=TAG) for part, to in sent]
        wait(sends + [dist.irecv(part, src=source, tag=TAG) for part, source in received])


def gather_json(size: int, value: Any, wait: Callable[[list[dist.Work | None]], None]) -> list[Any]:
    """Collective. Return the JSON values of all ranks, in rank order. CollectiveMismatchError, on
    all of them, if some are in another gather: each message carries the name of its collective."""
    if size == 1:
        return [value]
    rank, text = dist.get_rank(), json.dumps([collective_name(), value]).encode()
    lengths = torch.full((size,), len(text))
    run_rounds(gather_rounds(lengths, range(size + 1), rank), wait)
    starts = [0, *accumulate(lengths.tolist())]
    texts = torch.frombuffer(bytearray(text).ljust(starts[-1]), dtype=torch.uint8)
    run_rounds(gather_rounds(texts, starts, rank), wait)
    messages = [json.loads(texts[start:end].numpy().tobytes()) for start, end in pairwise(starts)]
    # Part i is that of rank + i: rotate them into the order of ranks.
    messages = messages[-rank:] + messages[:-rank]
    refuse_other_collectives([name for name, _ in messages])
    return [received for _, received in messages]


def collective_name() -> str:
    """Return the function and the line that this collective is in, by the call stack: so none can
    be without a name, and no two have the same one. All workers of a run have the same sources."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in PASSED_ON_BY:
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}, line {frame.f_lineno}"


def refuse_other_collectives(names: Sequence[str]) -> None:
    """CollectiveMismatchError unless all ranks are in one collective. names: by rank"""
    if len(set(names)) == 1:
        return
    listed = [f"rank {rank} in {name}" for rank, name in enumerate(names)]
    raise CollectiveMismatchError(
        f"ranks are in different collectives: {'; '.join(listed)}",
        "each message of a gather carries the name of its collective",
        "every worker must call Lockstep's functions in the same order: save and evaluate on all "
        "ranks, not under `if rank == 0`; end the loop by session.stop(), not by a break that one "
        "worker decides; use the same version of Lockstep. "
        "If the loop does, report a bug of Lockstep, with events.jsonl and logs/",
    )


def group_timeout(group: dist.ProcessGroup | None = None) -> timedelta:
    group = group or dist.group.WORLD
    assert group is not None
    return backend_timeout(group)


def new_subgroup(ranks: list[int]) -> dist.ProcessGroup | None:
    """Collective of `ranks` only. Return their group, with the default timeout; None for one
    rank."""
    if len(ranks) == 1:
        return None
    # With its device known, NCCL connects now: at the first collective, after minutes of
    # compilation, the timeout would be too short.
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if "nccl" in dist.get_backend_config()
        else None
    )
    timeout = timedelta(seconds=form_timeout_s(device or torch.device("cpu")))
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout=timeout, use_local_synchronization=True, device_id=device
    )
    set_group_timeout(group_timeout(), group)
    return group


def init_default_group(
    store: Store, rank: int, size: int, device: torch.device, timeout_s: float
) -> None:
    """Collective. Form the default process group, in one attempt."""
    backend = choose_backend(device, os.environ)
    # The names of groups in the store contain torch's count of attempts: it must be equal on all
    # ranks.
    reset_group_count()
    device_id = device if "nccl" in backend else None
    timeout = timedelta(seconds=timeout_s)
    excepthook = sys.excepthook
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id
    )
    if size == 1:
        sys.excepthook = excepthook  # torch's writes [rank0] before each line of a traceback
    assert dist.group.WORLD is not None
    # Else new_group splits this communicator, for which it needs all ranks.
    dist.group.WORLD.bound_device_id = None
    dist.all_reduce(torch.zeros(1))


def choose_backend(device: torch.device, environ: Mapping[str, str]) -> str:
    """Return the backend of torch's groups: gloo for CPU tensors, NCCL for those on a GPU.
    NCCL refuses two workers on one GPU, except since 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1. So
    gloo serves workers that share the GPU named in LOCKSTEP_DEVICE."""
    is_shared = (
        ":" in environ.get("LOCKSTEP_DEVICE", "")
        and environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1"
    )
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and not is_shared else "gloo"
