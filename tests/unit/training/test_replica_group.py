"""Refusals of ReplicaGroup and Checkpointer, at construction and in a step. One process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from lockstep.checkpoint.store import CheckpointStore
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import DivergedError, UsageError
from lockstep.parallel import frozen_state
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


@pytest.fixture
def runtime() -> Iterator[ElasticRuntime]:
    with ElasticRuntime.join() as runtime:
        yield runtime


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def one_step(replicas: ReplicaGroup, step: int, optimizer: torch.optim.Optimizer) -> None:
    for k in replicas.micro_batches(step):
        replicas.backward(replicas(torch.full((2, 3), float(step + k))).square().sum())
    optimizer.step()


def test_second_loop_of_a_step_is_refused(runtime: ElasticRuntime) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ReplicaGroup(runtime, model, micro_batches=1) as replicas:
        one_step(replicas, 0, optimizer)
        with pytest.raises(UsageError, match="a second micro-batch loop in step 1"):
            one_step(replicas, 0, optimizer)
        one_step(replicas, 1, optimizer)


def test_rank_and_size_are_read_once_per_generation(
    runtime: ElasticRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ReplicaGroup(runtime, model, micro_batches=1) as replicas:
        one_step(replicas, 0, optimizer)
        with monkeypatch.context() as patch:
            for name in ("get_rank", "get_world_size"):
                patch.delattr(torch.distributed, name)
            one_step(replicas, 1, optimizer)


# The state of a user's loop.


def test_trained_parameters_in_no_optimizer_are_refused_by_name(
    runtime: ElasticRuntime, tmp_path: Path
) -> None:
    model = layers()
    checkpointer = Checkpointer(
        tmp_path, runtime, model, torch.optim.SGD(model[0].parameters(), lr=0.1)
    )
    with pytest.raises(
        UsageError,
        match=r"2 trained parameters are in no optimizer that session.prepare has received: 1\.weight, 1\.bias",
    ):
        ReplicaGroup(runtime, model, checkpointer, micro_batches=1)
    model[1].requires_grad_(False)
    with ReplicaGroup(runtime, model, checkpointer, micro_batches=1):
        pass


def test_second_replica_group_or_checkpointer_is_refused_until_the_first_is_closed(
    runtime: ElasticRuntime, tmp_path: Path
) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        Checkpointer(tmp_path / "first", runtime, model, optimizer) as checkpointer,
        ReplicaGroup(runtime, model, checkpointer, micro_batches=1),
    ):
        with pytest.raises(UsageError, match="a second ReplicaGroup on one ElasticRuntime"):
            ReplicaGroup(runtime, model, checkpointer, micro_batches=1)
        with pytest.raises(UsageError, match="a second Checkpointer on one ElasticRuntime"):
            Checkpointer(tmp_path / "second", runtime, model, optimizer)
    with (
        Checkpointer(tmp_path / "second", runtime, model, optimizer) as checkpointer,
        ReplicaGroup(runtime, model, checkpointer, micro_batches=1),
    ):
        pass


def test_checkpointer_of_another_module_is_refused(runtime: ElasticRuntime, tmp_path: Path) -> None:
    model = layers()
    checkpointer = Checkpointer(
        tmp_path, runtime, model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.raises(
        UsageError,
        match="the ReplicaGroup trains Sequential, the Checkpointer saves another Sequential",
    ):
        ReplicaGroup(runtime, layers(), checkpointer, micro_batches=1)


def test_digest_covers_weights_whose_memory_was_replaced(runtime: ElasticRuntime) -> None:
    """As when averaged weights replace them for a while: p.data = average."""
    model = layers()
    with ReplicaGroup(runtime, model, micro_batches=1) as replicas:
        before = replicas.replica.digest()
        model[0].weight.data = model[0].weight.data.clone().mul_(2.0)
        assert replicas.replica.digest() != before
        model[0].weight.data.mul_(0.5)
        assert replicas.replica.digest() == before


def test_unaligned_buffer_is_hashed(runtime: ElasticRuntime) -> None:
    class Shifted(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.register_buffer("table", torch.arange(5.0)[1:3])

    model = Shifted()
    with ReplicaGroup(runtime, model, micro_batches=1) as replicas:
        before = replicas.runner.state.frozen_state.digest()
        model.table[0] = 7.0
        assert replicas.runner.state.frozen_state.digest() != before


class Warmup:
    """A user's class that wraps a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.inner = [scheduler]

    def state_dict(self) -> Any:
        return self.inner[0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner[0].load_state_dict(state)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 1),
    "ReduceLROnPlateau": schedulers.ReduceLROnPlateau,
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.ConstantLR(o)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_unregistered_scheduler_is_refused(
    runtime: ElasticRuntime, tmp_path: Path, name: str
) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    with (
        Checkpointer(tmp_path, runtime, model, optimizer) as checkpointer,
        pytest.raises(UsageError, match="sets the learning rate of SGD"),
    ):
        ReplicaGroup(runtime, model, checkpointer, micro_batches=1)
    for known in (scheduler, Warmup(scheduler)):
        with (
            Checkpointer(tmp_path, runtime, model, optimizer, state={"any": known}) as checkpointer,
            ReplicaGroup(runtime, model, checkpointer, micro_batches=1),
        ):
            pass


# Losses, gradients and weights that are not finite.


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "loss nan in step 2": lambda out: out.sum() * float("nan"),
    "loss 0.0 in step 2, gradient not finite: 0.weight": lambda out: (out.sum() * 0).sqrt(),
}


@pytest.mark.parametrize("what", LOSSES)
def test_nonfinite_loss_or_gradient_ends_the_run_before_the_update(
    runtime: ElasticRuntime, tmp_path: Path, what: str
) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    refused = pytest.raises(DivergedError, match=what)
    with (
        refused as error,
        Checkpointer(tmp_path, runtime, model, optimizer) as checkpointer,
        ReplicaGroup(runtime, model, checkpointer, micro_batches=1) as replicas,
    ):
        one_step(replicas, 0, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in replicas.micro_batches(1):
            replicas.backward(LOSSES[what](replicas(torch.ones(2, 3))))
    assert error.value.exit_code == 4
    assert all(map(torch.equal, before, model.parameters()))


def test_nonfinite_gradients_can_be_left_to_a_scaler(
    runtime: ElasticRuntime, tmp_path: Path
) -> None:
    model = layers()
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=1e-3),
        torch.amp.GradScaler("cpu", init_scale=2.0**120),
    )
    with (
        Checkpointer(tmp_path, runtime, model, optimizer, state={"scaler": scaler}) as checkpointer,
        ReplicaGroup(
            runtime, model, checkpointer, micro_batches=1, on_nonfinite="ignore"
        ) as replicas,
    ):
        for step in range(3):
            for _ in replicas.micro_batches(step):
                replicas.backward(scaler.scale(replicas(torch.full((2, 3), 1e4)).square().sum()))
            scaler.step(optimizer)
            scaler.update()
        checkpointer.save(3)
    assert scaler.get_scale() < 2.0**120 and all(
        bool(p.isfinite().all()) for p in model.parameters()
    )


def test_nonfinite_state_is_not_saved_and_the_last_checkpoint_stays(
    runtime: ElasticRuntime, tmp_path: Path
) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model.register_buffer("mask", torch.full((3,), float("-inf")))
    refused = pytest.raises(
        DivergedError,
        match=r"not finite after step 2: optim\.0\.weight\.momentum_buffer\n.*checkpoints: 1",
    )
    with refused, Checkpointer(tmp_path, runtime, model, optimizer, keep=1) as checkpointer:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        checkpointer.save(1)
        assert checkpointer.saver and checkpointer.saver.wait()
        optimizer.state[model[0].weight]["momentum_buffer"][0, 0] = float("inf")
        checkpointer.save(2)
    assert checkpointer.store.steps() == [1]


# Memory of parameters.


@pytest.mark.parametrize("shared_first", [False, True])
def test_parameters_that_share_other_memory_than_at_the_start_are_refused_at_the_save(
    runtime: ElasticRuntime, tmp_path: Path, shared_first: bool
) -> None:
    """A target network: after a resume it would no longer follow the other one, or follow it again."""
    model, target = layers(), layers().requires_grad_(False)
    if shared_first:
        target[0].weight.data = model[0].weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with (
        pytest.raises(UsageError, match=r"0\.weight and state\.target\.0\.weight share"),
        Checkpointer(tmp_path, runtime, model, optimizer, state={"target": target}) as checkpointer,
        ReplicaGroup(runtime, model, checkpointer, micro_batches=1) as replicas,
    ):
        one_step(replicas, 0, optimizer)
        checkpointer.save(1)
        one_step(replicas, 1, optimizer)
        target[0].weight.data = (
            target[0].weight.data.clone() if shared_first else model[0].weight.data
        )
        checkpointer.save(2)
    assert checkpointer.store.steps() == [1]


# Buffers and frozen weights.


@pytest.mark.parametrize("persistent", [True, False])
def test_sparse_buffers_are_refused_by_name(runtime: ElasticRuntime, persistent: bool) -> None:
    model = layers()
    model.register_buffer("adjacency", torch.eye(3).to_sparse(), persistent=persistent)
    with pytest.raises(
        UsageError,
        match=r"sparse parameters and buffers are not supported: adjacency \(torch\.sparse_coo\)",
    ):
        ReplicaGroup(runtime, model, micro_batches=1)


class Counting(nn.Module):
    """A buffer that is replaced in each forward pass, and counts them."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(1), persistent=persistent)

    def forward(self, rows: torch.Tensor) -> Any:
        self.seen = self.seen + 1
        return self.inner(rows)


class Cached(Counting):
    """A cache that is computed again for a longer input, equal where it had values."""

    def forward(self, rows: torch.Tensor) -> Any:
        self.seen = torch.arange(len(self.seen) + 1.0)
        return self.inner(rows)


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_changed_by_the_forward_pass_are_refused_by_name(
    persistent: bool, runtime: ElasticRuntime
) -> None:
    with (
        pytest.raises(UsageError, match=r"passes of step 1: seen \(Counting\)"),
        ReplicaGroup(runtime, model := Counting(persistent), micro_batches=2) as replicas,
    ):
        before = model.inner.weight.detach().clone()
        one_step(replicas, 0, torch.optim.SGD(model.parameters()))
    assert torch.equal(before, model.inner.weight)


def test_a_cache_that_grows_in_the_forward_pass_is_accepted(runtime: ElasticRuntime) -> None:
    with ReplicaGroup(runtime, cache := Cached(False), micro_batches=2) as replicas:
        one_step(replicas, 0, torch.optim.SGD(cache.parameters()))
    assert len(cache.seen) == 3, "the rehearsal leaves no trace"


def test_every_byte_of_frozen_weights_and_buffers_is_hashed_in_one_cycle_of_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frozen_state, "SLICE_BYTES", 64)
    frozen = [
        torch.zeros(9, dtype=torch.bfloat16),
        torch.zeros(50),
        torch.zeros(0),
        torch.zeros(3, 5).t(),
        torch.tensor(1.0),
    ]
    module = nn.BatchNorm1d(4)
    rest = frozen_state.FrozenState(module, frozen)
    count = len(rest.slices)
    assert count == 7
    before, whole = [rest.digest(number) for number in range(count)], rest.digest()
    for tensor in (*frozen, module.running_mean, module.num_batches_tracked):
        assert tensor is not None
        for position in range(tensor.numel()):
            original = tensor.detach().clone()
            torch.as_strided(tensor, (tensor.numel(),), (1,))[position] += 1
            assert (
                sum(rest.digest(number) != digest for number, digest in enumerate(before)) == 1
                and rest.digest() != whole
            )
            tensor.copy_(original)
    assert [
        rest.digest(number + count) for number in range(count)
    ] == before and rest.digest() == whole


def test_layers_frozen_differently_after_a_resume_are_a_warning(
    runtime: ElasticRuntime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for start, frozen, warned in ((0, False, False), (1, False, False), (2, True, True)):
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0].requires_grad_(not frozen)
        caplog.clear()
        with Checkpointer(tmp_path / "checkpoints", runtime, model, optimizer) as checkpointer:
            assert checkpointer.resume() == start
            with ReplicaGroup(runtime, model, checkpointer, micro_batches=1) as replicas:
                one_step(replicas, start, optimizer)
            checkpointer.save(start + 1)
        assert ("other layers frozen: 0.bias, 0.weight changed since" in caplog.text) is warned, (
            caplog.text
        )


def test_loading_a_checkpoint_has_no_time_limit(
    runtime: ElasticRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path / "checkpoints", runtime, model, optimizer) as checkpointer:
        checkpointer.resume()
        checkpointer.save(1)
    phases = []
    read = CheckpointStore.read_share

    def read_share(store: CheckpointStore, *args: Any) -> Any:
        phases.append(runtime.board.phase)
        return read(store, *args)

    monkeypatch.setattr(CheckpointStore, "read_share", read_share)
    before = runtime.board.phase
    with Checkpointer(tmp_path / "checkpoints", runtime, model, optimizer) as checkpointer:
        assert checkpointer.resume() == 1 and runtime.board.phase == before
    assert phases == ["preparing"]
