"""BatchNorm's running statistics: the same bits on any number of workers, those of a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import Tensor, nn

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import LockstepError
from lockstep.parallel.running_statistics import RunningStatistics
from lockstep.training.replica_group import ReplicaGroup

STEPS = 4


class Normalized(nn.Module):
    """BatchNorm with a momentum, without one, called twice per forward pass, and in eval mode."""

    def __init__(self, momentum: float | None = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 8), nn.Linear(8, 1)
        self.moving, self.mean = (
            nn.BatchNorm1d(8, momentum=momentum),
            nn.BatchNorm1d(8, momentum=None),
        )
        self.still = nn.BatchNorm1d(8).eval()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int32))

    def forward(self, rows: Tensor) -> Any:
        hidden = self.still(self.mean(self.moving(self.inner(rows))))
        hidden = self.moving(hidden + 1)
        return self.outer(hidden)


def rows_of(step: int, k: int) -> Tensor:
    return (
        torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + k)) * (k + 1) + step
    )


def state_of(model: nn.Module) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


def train_plainly(micro_batches: int) -> dict[str, list[float]]:
    model = Normalized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for k in range(micro_batches):
            (model(rows_of(step, k)).square().mean() / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def train_in_a_group(runtime: ElasticRuntime, micro_batches: int) -> dict[str, list[float]]:
    model = Normalized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ReplicaGroup(runtime, model, micro_batches=micro_batches) as replicas:
        for step in range(STEPS):
            for k in replicas.micro_batches(step):
                replicas.backward(replicas(rows_of(step, k)).square().mean() / micro_batches)
            optimizer.step()
    return state_of(model)


def test_statistics_have_the_same_bits_on_any_number_of_workers() -> None:
    on_one = run_ranks(train_in_a_group, 1, 4)[0]
    for workers in (2, 3, 4):
        assert run_ranks(train_in_a_group, workers, 4) == [on_one] * workers
    plain = train_plainly(4)
    assert (
        on_one["moving.num_batches_tracked"]
        == plain["moving.num_batches_tracked"]
        == [2 * 4 * STEPS]
    )
    for name, values in plain.items():
        torch.testing.assert_close(
            torch.tensor(on_one[name]), torch.tensor(values), rtol=1e-5, atol=1e-6
        )


def test_statistics_of_one_micro_batch_are_those_of_a_plain_loop() -> None:
    assert run_ranks(train_in_a_group, 1, 1) == [train_plainly(1)]


def test_a_repeated_step_moves_the_statistics_once() -> None:
    def statistics_after(attempts: list[int]) -> dict[str, list[float]]:
        model = Normalized()
        statistics = RunningStatistics(model, 2, {})
        for micro_batches in attempts:
            statistics.start_step()
            for k in range(micro_batches):
                model(rows_of(0, k))
                statistics.end_micro_batch(k)
            model(rows_of(0, 7))  # interrupted: the forward pass ran, the micro-batch did not end
        statistics.start_step()
        for k in range(2):
            model(rows_of(0, k))
            statistics.end_micro_batch(k)
        statistics.commit()
        return state_of(model)

    assert statistics_after([1, 0, 2]) == statistics_after([])


class Declared(nn.Module):
    """Buffers that forward passes change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("newest", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(3))

    def forward(self, rows: Tensor) -> Any:
        self.get_buffer("newest").copy_(rows[0])
        self.get_buffer("count").add_(1)
        self.get_buffer("average").mul_(0.75).add_(0.25 * rows.mean(0))
        return (self.weight * rows).sum()


class Marked(nn.Module):
    """Buffers whose bytes in a row are not aligned, and one that the forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("marks", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("table", torch.zeros(2, 3).t())
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, rows: Tensor) -> Any:
        self.table = self.table + rows[0, :, None]
        self.get_buffer("marks").logical_xor_(rows[0] > 0)
        return self.norm(rows.double())


def test_buffers_of_any_dtype_and_layout_are_followed() -> None:
    for micro_batches in (1, 2):
        model, expected = Marked(), Marked()
        statistics = RunningStatistics(
            model, micro_batches, {"marks": "per_micro_batch", "table": "per_micro_batch"}
        )
        statistics.start_step()
        for k in range(micro_batches):
            model(rows_of(0, k))
            statistics.end_micro_batch(k)
        statistics.commit()
        expected(rows_of(0, micro_batches - 1))
        assert model.get_buffer("marks").tolist() == expected.get_buffer("marks").tolist()
        assert model.get_buffer("table").tolist() == expected.get_buffer("table").tolist()
        assert int(model.norm.get_buffer("num_batches_tracked")) == micro_batches


def train_declared(runtime: ElasticRuntime, buffers: Any) -> Any:
    model = Declared()
    try:
        with ReplicaGroup(runtime, model, micro_batches=4, buffers=buffers) as replicas:
            for step in range(2):
                for k in replicas.micro_batches(step):
                    replicas.backward(replicas(rows_of(step, k)))
    except LockstepError as error:
        return str(error)
    return state_of(model)


def test_declared_buffers_follow_all_micro_batches_or_stay_local() -> None:
    kinds: dict[str, Any] = {"newest": "per_micro_batch", "count": 1.0, "average": 0.75}
    plain = Declared()
    for step in range(2):
        for k in range(4):
            plain(rows_of(step, k))
    states = [state for workers in (1, 2, 4) for state in run_ranks(train_declared, workers, kinds)]
    assert states == states[:1] * 7
    assert states[0]["newest"] == plain.get_buffer("newest").tolist() and states[0]["count"] == [8]
    assert torch.allclose(torch.tensor(states[0]["average"]), plain.get_buffer("average"))
    counts = [state["count"] for state in run_ranks(train_declared, 2, {"*": "local"})]
    assert counts == [[4], [4]]


@pytest.mark.parametrize(
    ("buffers", "what"),
    [
        ({}, "buffers changed in the forward passes of step 1: newest, count, average (Declared)"),
        (
            {"newest": "local", "average": "local"},
            "buffers changed in the forward passes of step 1: count (Declared)",
        ),
        ({"wrong.*": "local"}, "no buffer of Declared matches wrong.*"),
        (
            {"*": "per_micro_batch"},
            "change otherwise than declared: count (per_micro_batch), average (per_micro_batch)",
        ),
        (
            {"newest": 1.0, "count": 1.0, "average": 0.745},
            "change otherwise than declared: newest (1.0), average (0.745)",
        ),
    ],
)
def test_undeclared_buffers_are_refused_by_name(buffers: dict[str, str], what: str) -> None:
    assert all(what in error for error in run_ranks(train_declared, 2, buffers))


def train_synchronized(runtime: ElasticRuntime) -> tuple[str, dict[str, list[float]]]:
    model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4))
    torch.manual_seed(0)
    nn.init.normal_(model[0].weight)
    with ReplicaGroup(runtime, model, micro_batches=4) as replicas:
        for k in replicas.micro_batches(0):
            replicas.backward(replicas(rows_of(0, k)).sum())
    return type(model[1]).__name__, state_of(model)


def test_sync_batchnorm_becomes_plain() -> None:
    kind, state = run_ranks(train_synchronized, 1)[0]
    assert kind == "PlainBatchNorm" and run_ranks(train_synchronized, 2) == [(kind, state)] * 2
