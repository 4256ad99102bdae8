"""What a vote reads of a step's results: from a device in one copy, since each waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.parallel.build_replica import build_replica
from lockstep.parallel.digest import Digest
from lockstep.parallel.replica import Replica

READS = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.cpu, Tensor.numpy}


class OnDevice(Tensor):
    """A tensor that counts what the host reads of it, and of what is computed from it."""

    reads = 0

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cls.reads += function in READS
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result.as_subclass(Tensor) if function is Tensor.cpu else result


@pytest.fixture(autouse=True)
def no_reads() -> Iterator[None]:
    OnDevice.reads = 0
    yield


def trained_replica(values: list[float]) -> Replica:
    """Return a replica after a step whose micro-batches have these losses and gradients."""
    replica = build_replica(nn.Linear(1, 1, bias=False), micro_batches=len(values))
    for k in replica.micro_batches(0):
        replica.backward(replica(torch.tensor([[values[k]]])).sum())
    source = replica.source
    source.slice_sums = [tensor.as_subclass(OnDevice) for tensor in source.slice_sums]
    replica._losses = {k: loss.as_subclass(OnDevice) for k, loss in replica._losses.items()}
    return replica


def read_results(runtime: ElasticRuntime) -> None:
    with trained_replica([1.0, 2.0, 3.0]) as replica:
        weight = replica.parameters[0].item()
        squared = torch.tensor(9.0).as_subclass(OnDevice)
        digest = Digest(2**63, torch.tensor(-(2**62) + 1).as_subclass(OnDevice))
        results = replica.results(squared, [Digest(3), digest])
        assert results.losses == {k: pytest.approx((k + 1) * weight) for k in range(3)}
        assert results.is_finite and results.digests == [3, 2**62 + 1] and OnDevice.reads == 1
        assert not replica.results(torch.tensor(float("inf"))).is_finite
    with trained_replica([1.0, float("inf")]) as replica:
        assert not replica.results().is_finite


def read_elsewhere(runtime: ElasticRuntime) -> None:
    """The loss is on the CPU, the gradient on a device: here a meta tensor."""
    with trained_replica([1.0, 2.0]) as replica:
        replica.source.slice_sums = [torch.zeros((), device="meta", dtype=torch.float64)]
        replica.source.parameters = [nn.Parameter(torch.zeros(1, device="meta"))]
        with pytest.raises(NotImplementedError, match="meta"):  # it has no values to read
            replica.results()


def test_a_loss_on_another_device_is_taken() -> None:
    run_ranks(read_elsewhere, 1)


def test_losses_and_finiteness_are_read_at_once() -> None:
    run_ranks(read_results, 1)
