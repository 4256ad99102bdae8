"""torch's default process group: form it, make subgroups of it, gather JSON values over it."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

FORM_S = 10.0


def gather_json(size: int, value: Any) -> list[Any]:
    """Collective. The JSON values of all processes of the group, in the order of the ranks."""
    if size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(text)]))
    room = max(int(n) for n in lengths)
    padded = [torch.zeros(room, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(padded, torch.nn.functional.pad(text, (0, room - len(text))))
    return [json.loads(bytes(row[: int(n)].tolist())) for row, n in zip(padded, lengths, strict=True)]


def limit(group: dist.ProcessGroup | None = None) -> timedelta:
    """How long a collective of the group may take; None: of all."""
    group = group or dist.group.WORLD
    assert group is not None
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def subgroup(ranks: list[int]) -> dist.ProcessGroup | None:
    """Collective of these ranks alone. A group of them, with the time-out of the group of all; None when there is only one."""
    if len(ranks) == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timedelta(seconds=FORM_S), use_local_synchronization=True)
    dist.distributed_c10d._set_pg_timeout(limit(), group)
    return group


# Meeting.


def init_group(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """Collective. torch's default group, tried once. The one place where groups are made."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # torch counts the groups that it has tried to form, and the count is part of their names in the store: it must be the same on all.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    dist.all_reduce(torch.zeros(1))
