"""Hooks of FSDP's units: its two collectives, over the groups of the current generation, and the
order in which units run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.ordered_sum import start_exchange
from lockstep.parallel.parallelize import LocalModel
from lockstep.units import join_names


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
        self.groups = groups
        self.unit = unit

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        groups, shard_group = self.groups, self.groups.gather_group
        assert shard_group is not None
        if output_tensor.is_cuda:
            gather = partial(dist.all_gather_into_tensor, output_tensor, input_tensor)
            groups.start_works(lambda: [gather(group=shard_group)])
            return None
        parts = output_tensor.view(shard_group.size(), -1)  # FSDP has written this worker's part
        groups.board.enter_collective(output_tensor.nbytes)
        own = shard_group.rank()
        others = [i for i in range(len(parts)) if i != own]
        sends, receives = [(i, parts[own]) for i in others], [(i, parts[i]) for i in others]
        start = partial(start_exchange, sends, receives, shard_group, tag=self.unit)
        return AllGatherWork(groups, groups.start_works(start))


class AllGatherWork(dist.Work):
    """An all-gather of parameters in flight; waiting for it never raises."""

    def __init__(self, groups: ProcessGroups, works: list[dist.Work]) -> None:
        super().__init__()
        self.groups = groups
        self.works = works

    def wait(self, timeout: Any = None) -> bool:
        self.groups.wait(self.works)
        return True


class UnitOrder:
    """The units that run in each forward pass, compared with those of the first pass.

    All shards of a replica gather and reduce the units together, in one order. A shard whose
    micro-batch leaves a unit out would gather the next one while the others wait for this one.

    units  name -> module, without the root
    """

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self.names = list(units)
        self._first: list[str] = []  # the order of the first pass
        self._ran: list[str] = []
        self._where = ""  # current micro-batch; "" outside of its forward pass
        before_unit = torch.compiler.disable(self._before_unit)
        for name, unit in units.items():  # the hook runs before FSDP gathers the unit
            unit.register_forward_pre_hook(partial(before_unit, name), prepend=True)

    def start(self, where: str) -> None:
        self._where = where
        self._ran = []

    def end(self) -> None:
        """End the forward pass. UsageError: units did not run."""
        if self._where and (missing := [name for name in self.names if name not in self._ran]):
            self._refuse(missing)
        self._first = self._first or self._ran
        self._where = ""  # a later forward pass recomputes activations

    def _before_unit(self, name: str, *_: Any) -> None:
        # A second run in one pass is refused, by name, when its gradients arrive (UnitSource).
        if not self._where or not torch.is_grad_enabled() or name in self._ran:
            return
        following = [other for other in self._first if other not in self._ran]
        if following and following[0] != name:
            self._refuse(following[: following.index(name)], f" before {name}")
        self._ran.append(name)

    def _refuse(self, missing: list[str], when: str = "") -> None:
        raise UsageError(
            f"{join_names(missing)} did not run{when} in {self._where}",
            "modules that the shards gather one by one must run in every micro-batch, in one order",
            'if the model leaves layers out: Session(..., unused="zero"); '
            "if it changes their order: session.prepare(..., units=())",
        )


def fill_unused_gradients(local: LocalModel) -> None:
    """Let FSDP reduce zeros for parameters without a gradient in a pass. UsageError: it cannot.

    With several units it could not: a shard would not gather the units that it leaves out.
    """
    root = local.fsdp_units[-1]
    layout = local.layout
    units = len(local.fsdp_units)
    if units > 1 or layout.workers_per_replica > layout.shard:
        raise UsageError(
            'unused="zero" needs a model that the shards gather at once, '
            f"and this one has {units} parts",
            f"layout {layout}",
            "give layout.shard only, and no units in session.prepare",
        )
    if not hasattr(root, "set_reduce_scatter_unused_params"):
        raise UsageError(
            f'torch {torch.__version__} does not support unused="zero" in shards',
            f"layout {layout}",
            "install torch 2.13, or train with whole replicas",
        )
    root.set_reduce_scatter_unused_params(True)
