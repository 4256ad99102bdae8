"""What Lockstep chooses by device: the kernels of AdamW and the size of buckets."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.config.schema import OptimOptions, ParallelOptions, RunConfig
from lockstep.elastic.world import World
from lockstep.training import setup
from lockstep.training.optim import adamw


@pytest.mark.parametrize(
    ("device", "asked", "fused"),
    [("cuda", False, True), ("cpu", False, False), ("cpu", True, True)],
)
def test_adamw_is_fused_on_a_gpu_and_on_request(device: str, asked: bool, fused: bool) -> None:
    model = nn.Module()
    with FakeTensorMode():  # tensors with a device and no memory
        model.weight, model.bias = (
            nn.Parameter(torch.empty(shape, device=device)) for shape in ((2, 3), (2,))
        )
    optimizer = adamw(model, OptimOptions(fused=asked))
    assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == [
        (fused, False)
    ] * 2


@pytest.mark.parametrize(
    ("device", "asked", "used"),
    [("cuda:0", 0, 100_000_000), ("cpu", 0, 25_000_000), ("cuda:0", 7, 7)],
)
def test_buckets_are_larger_on_a_gpu(
    device: str, asked: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed = MagicMock()
    monkeypatch.setattr(setup, "ReplicaGroup", formed)
    checkpointer = MagicMock(
        runtime=MagicMock(world=World(0, 1, 0, 1, "here", torch.device(device)))
    )
    setup.make_replica_group(
        RunConfig(parallel=ParallelOptions(bucket_bytes=asked)),
        MagicMock(),
        MagicMock(),
        checkpointer,
        MagicMock(),
        MagicMock(),
    )
    assert formed.call_args.kwargs["bucket_bytes"] == used
