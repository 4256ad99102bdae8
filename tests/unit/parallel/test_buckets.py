"""Buckets: which gradients are reduced together, and how they lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.parallel.buckets import Bucket, GradientBuckets, dense_strides
from lockstep.runtime.torch_private import version_of


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(3, 4).t(),
        torch.zeros(()),
        torch.zeros(1, 5, 1),
    ],
)
def test_dense_parameter_keeps_its_strides(tensor: torch.Tensor) -> None:
    gradient = torch.autograd.grad(tensor.requires_grad_().sum(), tensor, create_graph=False)[0]
    (bucket,) = [Bucket([0], [nn.Parameter(tensor.detach())])]
    assert (
        dense_strides(tensor) == tensor.stride() == bucket.views[0].stride()
        and bucket.views[0].shape == gradient.shape
    )


def test_parameter_with_gaps_or_overlaps_has_a_row_major_gradient() -> None:
    assert dense_strides(torch.zeros(4, 12)[:, ::2]) == (6, 1)
    assert dense_strides(torch.zeros(1).expand(3)) == (1,)


def test_buckets_are_reported_in_their_order_even_if_a_later_one_is_complete_first() -> None:
    first, second = parameters(4, 4)
    ready: list[list[int]] = []
    buckets = GradientBuckets(
        [first, second], 16, lambda bucket: ready.append(list(bucket.indices)), order=[1, 0]
    )
    buckets.start_pass(fill=True, send=True)
    first.sum().backward()
    assert ready == [] and buckets.missing() == [1]
    second.sum().backward()
    assert ready == [[1], [0]] and buckets.missing() == []
    buckets.close()


def test_gradients_change_versions_separately() -> None:
    """Views of one tensor share a version; then a change of one gradient would blame the others."""
    first, second = parameters(4, 4)
    buckets = GradientBuckets([first, second], 10**6, lambda bucket: None)
    buckets.start_pass(fill=True)
    (first.sum() + second.sum()).backward()
    assert first.grad is not None and second.grad is not None
    before = version_of(second.grad)
    first.grad.mul_(2)
    assert version_of(second.grad) == before and buckets.buckets[0].buffer.sum() == 12
    buckets.close()
