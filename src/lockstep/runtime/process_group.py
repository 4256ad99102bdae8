"""torch's default process group: form it, create subgroups, gather JSON values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public at run time

from lockstep.runtime.torch_private import backend_timeout, reset_group_count, set_group_timeout

FORM_TIMEOUT_S = 10.0
FORM_NCCL_TIMEOUT_S = 60.0  # loading NCCL and creating a CUDA context on each GPU comes first


def form_timeout_s(device: torch.device) -> float:
    """Return how long a group may take to form before it has failed."""
    return FORM_NCCL_TIMEOUT_S if device.type == "cuda" else FORM_TIMEOUT_S


def gather_json(size: int, value: Any) -> list[Any]:
    """Collective. Return the JSON values of all ranks, in rank order."""
    if size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]))
    longest = max(int(n) for n in lengths)
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(padded, torch.nn.functional.pad(text, (0, longest - len(text))))
    return [json.loads(bytes(row[: int(n)].tolist())) for row, n in zip(padded, lengths, strict=True)]


def group_timeout(group: dist.ProcessGroup | None = None) -> timedelta:
    group = group or dist.group.WORLD
    assert group is not None
    return backend_timeout(group)


def new_subgroup(ranks: list[int]) -> dist.ProcessGroup | None:
    """Collective of `ranks` only. Return their group, with the default timeout; None for one rank."""
    if len(ranks) == 1:
        return None
    # With its device known, NCCL connects now: at the first collective, after minutes of compilation, the timeout would be too short.
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend_config() else None
    timeout = timedelta(seconds=form_timeout_s(device or torch.device("cpu")))
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True, device_id=device)
    set_group_timeout(group_timeout(), group)
    return group


def init_default_group(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """Collective. Form the default process group, in one attempt."""
    backend = choose_backend(device, os.environ)
    # The names of groups in the store contain torch's count of attempts: it must be equal on all ranks.
    reset_group_count()
    device_id = device if "nccl" in backend else None
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)
    assert dist.group.WORLD is not None
    dist.group.WORLD.bound_device_id = None  # else new_group splits this communicator, for which it needs all ranks
    dist.all_reduce(torch.zeros(1))


def choose_backend(device: torch.device, environ: Mapping[str, str]) -> str:
    """Return the backend of torch's groups: gloo for CPU tensors, NCCL for those on a GPU.

    NCCL refuses two workers on one GPU, except since 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1. So
    gloo serves workers that share the GPU named in LOCKSTEP_DEVICE.
    """
    is_shared = ":" in environ.get("LOCKSTEP_DEVICE", "") and environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1"
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" and not is_shared else "gloo"
