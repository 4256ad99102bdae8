"""A lost peer leaves a replica its buffers and its gradient, but no group."""

from __future__ import annotations

import weakref

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import PeersLostError
from lockstep.parallel.build_replica import build_replica
from lockstep.parallel.replica import restored_buffers


def test_buffers_have_their_values_again_after_a_lost_peer() -> None:
    norm = nn.BatchNorm1d(3)
    with pytest.raises(PeersLostError), restored_buffers(norm):
        norm(torch.randn(4, 3))
        assert norm.num_batches_tracked == 1
        raise PeersLostError("a peer is gone", "")
    assert norm.num_batches_tracked == 0 and norm.running_mean is not None
    assert not norm.running_mean.any()


def release(runtime: ElasticRuntime) -> None:
    with build_replica(nn.Linear(2, 2), micro_batches=2) as replica:
        for _ in replica.micro_batches(0):
            replica.backward(replica(torch.ones(1, 2)).sum())
        assert replica.source.plan.group is not None
        gradients = [p.grad.clone() for p in replica.parameters if p.grad is not None]
        replica.release_groups()
        assert replica.source.plan.group is None
        assert all(map(torch.equal, gradients, [p.grad for p in replica.parameters]))


class SideStream:
    """In place of the stream of a GPU's reducer, whose jobs may still read the released tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.references = [weakref.ref(tensor) for tensor in tensors]
        self.waited_for: list[bool] = []

    def wait_stream(self, stream: object) -> None:
        self.waited_for.append(all(reference() is not None for reference in self.references))


def release_beside_stream(runtime: ElasticRuntime) -> None:
    with build_replica(nn.Linear(2, 2), micro_batches=8) as replica:
        source = replica.source
        for k in replica.micro_batches(0):
            replica.backward(replica(torch.ones(1, 2)).sum())
            if k % 4 == 2:  # a sum of two micro-batches is in the tree
                break
        partial_sums = [tensor for _, sums in source._tree.stack for tensor in sums.tensors]
        assert partial_sums
        stream = SideStream(partial_sums)
        del partial_sums
        source.reducer._stream = stream
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", lambda device: stream)
            replica.release_groups()
        source.reducer._stream = None
        assert stream.waited_for == [True]
        assert not any(reference() for reference in stream.references)


def test_partial_sums_are_dropped_after_the_side_stream_is_waited_for() -> None:
    run_ranks(release_beside_stream, 1)


def test_a_released_replica_keeps_its_gradient_and_no_group() -> None:
    run_ranks(release, 2)
