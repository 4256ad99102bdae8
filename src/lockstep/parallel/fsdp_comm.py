"""FSDP's two collectives, replaced: they use the groups of the current generation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.groups import ProcessGroups


class CustomComm:
    """What torch's interfaces AllGather and ReduceScatter, which have no public name, share."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CapturedReduceScatter(CustomComm):
    """FSDP's reduce-scatter: keeps its input for the all-reduce hook, which FSDP calls next."""

    def __init__(self, captured: list[Tensor]) -> None:
        self.captured = captured

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        self.captured.append(input_tensor)


class GroupAllGather(CustomComm):
    """FSDP's all-gather, over the groups of this generation."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> dist.Work | None:
        groups, shard_group = self.groups, self.groups.gather_group
        assert shard_group is not None
        if output_tensor.is_cuda:
            groups.start_works(lambda: [dist.all_gather_into_tensor(output_tensor, input_tensor, group=shard_group)])
            return None
        parts = list(output_tensor.view(shard_group.size(), -1))  # FSDP has written this worker's part
        groups.board.enter_collective(output_tensor.nbytes)
        return AllGatherWork(groups, groups.start_works(lambda: start_all_gather(parts, shard_group)))


class AllGatherWork(dist.Work):
    """An all-gather of parameters in flight; waiting for it never raises."""

    def __init__(self, groups: ProcessGroups, works: list[dist.Work]) -> None:
        super().__init__()
        self.groups, self.works = groups, works

    def wait(self, timeout: Any = None) -> bool:
        self.groups.wait(self.works)
        return True


def start_all_gather(parts: list[Tensor], group: dist.ProcessGroup) -> list[dist.Work | None]:
    """Start an all-gather by sends and receives: parts[i] comes from member i."""
    own = group.rank()
    others = [i for i in range(group.size()) if i != own]
    works = [dist.irecv(parts[i], group=group, group_src=i) for i in others if parts[i].numel()]
    return works + [dist.isend(parts[own], group=group, group_dst=i) for i in others if parts[own].numel()]
