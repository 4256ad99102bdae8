"""Flipped bits in a frozen weight, a buffer and an EMA are detected. Real processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep.elastic.fault_injection import flip_bit
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import DivergedError, LockstepError
from lockstep.parallel import frozen_state
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup

SLICE_BYTES, FLIP_AT = 256, 3


class Adapted(nn.Module):
    """A frozen matrix beside a trained one, and a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.trained = (
            nn.Linear(16, 16, bias=False).requires_grad_(False),
            nn.Linear(16, 16),
        )
        self.register_buffer("scale", torch.rand(8))

    def forward(self, rows: torch.Tensor) -> Any:
        return (self.frozen(rows) + self.trained(rows)) * self.scale.mean()


def train(runtime: ElasticRuntime, folder: str, flipped: str) -> tuple[int, str]:
    """Train 12 steps and save; rank 1 flips a bit of `flipped` after FLIP_AT steps.

    Return (committed steps, the error).
    """
    frozen_state.SLICE_BYTES = SLICE_BYTES
    model, step = Adapted(), 0
    optimizer, ema = (
        torch.optim.SGD(model.trained.parameters(), lr=1e-3),
        AveragedModel(model.trained),
    )
    tensors = {"frozen": model.frozen.weight, "buffer": model.scale, "ema": ema.module.weight}
    try:
        with (
            Checkpointer(
                Path(folder), runtime, model, optimizer, state={"ema": ema}
            ) as checkpointer,
            ReplicaGroup(runtime, model, checkpointer, micro_batches=6) as replicas,
        ):
            while step < 12:
                if step == FLIP_AT and runtime.world.rank == 1 and flipped:
                    flip_bit([tensors[flipped]])
                for k in replicas.micro_batches(step):
                    replicas.backward(replicas(torch.full((2, 16), k / 6)).square().sum())
                optimizer.step()
                step += 1
            checkpointer.save(step)
    except LockstepError as error:
        return step, error.what
    return step, ""


# 1,024 bytes of frozen weights and 32 of the buffer, in slices of 256: compared in 5 steps.
@pytest.mark.parametrize(
    ("flipped", "last", "what"),
    [
        ("", 12, ""),
        ("frozen", FLIP_AT + 5, "the weights of rank 1 differ"),
        ("buffer", FLIP_AT + 5, "the weights of rank 1 differ"),
        (
            "ema",
            12,
            "the weights, optimizer state or values of session.state of rank 1 differ before step 13",
        ),
    ],
)
def test_flipped_bit_outside_the_trained_weights_is_detected(
    tmp_path: Path, flipped: str, last: int, what: str
) -> None:
    results = run_ranks(train, 3, str(tmp_path), flipped)
    assert all(what in text and bool(text) == bool(what) for _, text in results), results
    assert len(set(results)) == 1 and (results[0][0] <= last if what else results[0][0] == 12)
    assert bool(list(tmp_path.glob("step-*"))) == (not what)


class Vector(nn.Module):
    """Ten weights, whose gradient is `gradient`."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.gradient = nn.Parameter(torch.zeros(10)), torch.ones(10)

    def forward(self) -> torch.Tensor:
        out = self.weights * 1.0
        out.register_hook(lambda _: self.gradient)
        return out


def train_with_gradient(runtime: ElasticRuntime, indices: list[int], value: float) -> str:
    """Train one step in which rank 1 has `value` at `indices` of its gradient; return the error."""
    model = Vector()
    model.gradient[indices if runtime.world.rank == 1 else []] = value
    try:
        with ReplicaGroup(runtime, model, micro_batches=2, rehearse=False) as replicas:
            for _ in replicas.micro_batches(0):
                replicas.backward(replicas().sum())
    except DivergedError as error:
        return error.what
    return (
        str(model.weights.grad[indices].tolist())
        if model.weights.grad is not None
        else "no gradient"
    )


@pytest.mark.parametrize(
    ("indices", "value", "refused"),
    [
        ([0], float("inf"), True),
        ([9], float("nan"), True),
        ([0, 1], 3e38, False),
        ([8, 9], -3e38, False),
    ],
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_refused_on_all(
    indices: list[int], value: float, refused: bool
) -> None:
    """Each rank reads its part only; a sum of finite elements may overflow."""
    results = run_ranks(train_with_gradient, 2, indices, value)
    expected = (
        "loss 0.0 in step 1, gradient not finite: weights"
        if refused
        else str(torch.full((2,), value).tolist())
    )
    assert results == [expected] * 2
