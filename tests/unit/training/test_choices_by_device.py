"""What Lockstep chooses by device: the kernels of AdamW and the size of buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.config.schema import OptimOptions
from lockstep.network.bucket_sizes import default_bucket_size
from lockstep.tasks.optim import make_optimizers


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
    optimizer = make_optimizers(model, OptimOptions(fused=asked))[0]
    assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == [
        (fused, False)
    ] * 2


def test_buckets_are_larger_on_a_gpu() -> None:
    assert default_bucket_size(torch.device("cuda:0").type) == 100_000_000
    assert default_bucket_size("cpu") == 25_000_000
