"""Gradients of a learner's micro-batches in a whole replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.groups import Connection
from lockstep.parallel.learner_replica import LearnerReplica, build_learner_replica


class Sums(nn.Module):
    """Parameters to which autograd gives one gradient, expanded from a scalar; `unused` gets
    none."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, factor: float) -> Tensor:
        return ((self.a + self.b) * factor).sum()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def replica_of(model: Sums, **options: Any) -> LearnerReplica:
    return build_learner_replica(
        model, micro_batches=2, connection=Connection(), init_sync=True, **options
    )


def test_gradients_that_share_memory_are_added_once(group_of_one: None) -> None:
    model = Sums()
    with replica_of(model, unused="zero") as replica:
        for k in replica.passes(0, range(4, 7)):
            replica.add_pass(replica(float(k)), 2, 0)
        gradients = [p.grad for p in (model.a, model.b, model.unused)]
        assert [g.tolist() for g in gradients if g is not None] == [[15.0] * 3] * 2 + [[0.0] * 3]
        assert replica.numbers.tolist() == [[6.0 * k, 2.0, 0.0] for k in range(4, 7)]


def test_a_parameter_without_a_gradient_is_refused_by_name(group_of_one: None) -> None:
    with replica_of(Sums()) as replica, pytest.raises(UsageError, match=r"1 of 3 .*: unused"):
        for k in replica.passes(0, range(2)):
            replica.add_pass(replica(float(k)), 0, 0)


def test_differences_of_learners_become_the_gradient(group_of_one: None) -> None:
    model = Sums()
    with replica_of(model) as replica:
        for m in replica.micro_batches(0):
            replica.add_learner(1.5 + m, [torch.full((3,), 1.0 + m) for _ in range(3)])
        assert [*replica.losses().values()] == [1.5, 2.5]
        assert [p.grad.tolist() for p in model.parameters() if p.grad is not None] == [
            [3.0] * 3
        ] * 3
