"""Replacements of FSDP's two collectives, over the groups of the current generation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.exchange import start_exchange
from lockstep.parallel.groups import ProcessGroups


class CustomComm:
    """Base of both collectives; torch's interfaces AllGather and ReduceScatter are private."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CapturedReduceScatter(CustomComm):
    """FSDP's reduce-scatter: keeps its input for the all-reduce hook, which FSDP calls next."""

    def __init__(self, captured: list[Tensor]) -> None:
        self.captured = captured

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.captured.append(input_tensor)


class GroupAllGather(CustomComm):
    def __init__(self, groups: ProcessGroups, unit: int) -> None:
        self.groups, self.unit = groups, unit

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        groups, shard_group = self.groups, self.groups.gather_group
        assert shard_group is not None
        if output_tensor.is_cuda:
            groups.start_works(
                lambda: [
                    dist.all_gather_into_tensor(output_tensor, input_tensor, group=shard_group)
                ]
            )
            return None
        parts = output_tensor.view(shard_group.size(), -1)  # FSDP has written this worker's part
        groups.board.enter_collective(output_tensor.nbytes)
        others = [i for i in range(len(parts)) if i != shard_group.rank()]
        sends, receives = (
            [(i, parts[shard_group.rank()]) for i in others],
            [(i, parts[i]) for i in others],
        )
        return AllGatherWork(
            groups,
            groups.start_works(lambda: start_exchange(sends, receives, shard_group, tag=self.unit)),
        )


class AllGatherWork(dist.Work):
    """An all-gather of parameters in flight; waiting for it never raises."""

    def __init__(self, groups: ProcessGroups, works: list[dist.Work]) -> None:
        super().__init__()
        self.groups, self.works = groups, works

    def wait(self, timeout: Any = None) -> bool:
        self.groups.wait(self.works)
        return True
