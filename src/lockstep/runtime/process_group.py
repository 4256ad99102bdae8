"""torch's default process group: form it, create subgroups, gather JSON values."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public at run time

from lockstep.runtime.torch_private import backend_timeout, reset_group_count, set_group_timeout

FORM_TIMEOUT_S = 10.0


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
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=FORM_TIMEOUT_S), use_local_synchronization=True)
    set_group_timeout(group_timeout(), group)
    return group


def init_default_group(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """Collective. Form the default process group, in one attempt."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # The names of groups in the store contain torch's count of attempts: it must be equal on all ranks.
    reset_group_count()
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    dist.all_reduce(torch.zeros(1))
