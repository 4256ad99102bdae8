"""A learner on one worker: interrupted and continued, and the memory that it leaves as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.resolve import resolve
from lockstep.layout import Layout
from lockstep.parallel.parallelize import LocalModel
from lockstep.record.step_timer import StepTimer
from lockstep.runtime.status_board import StatusBoard
from lockstep.training.diloco import Learners
from lockstep.training.inner_optimizers import mean_growth

H = 6


class Numbers:
    """A loader of one sample per micro-batch."""

    def micro_batch(self, step: int, k: int) -> Tensor:
        return torch.tensor([[1.0, step / 10, k / 10]])

    def tokens_in_step(self, step: int, micro_batches: range) -> int:
        return len(micro_batches)


def make_learners(over_after: list[int]) -> tuple[Learners, nn.Linear, list[int]]:
    """Return learners whose generation is over after these numbers of further steps; the passes."""
    torch.manual_seed(0)
    module, passes, left = nn.Linear(3, 2), [], [*over_after]

    def generation_error() -> str:
        if left and left[0] == 0:
            left.pop(0)
            return "a worker is lost"
        left[:1] = [left[0] - 1] if left else []
        return ""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        passes.append(round(float(batch[0, 1]) * 10))
        return nn.functional.dropout(model(batch), 0.5).square().sum()  # type: ignore[no-any-return]

    runtime: Any = SimpleNamespace(
        generation_error=generation_error,
        board=StatusBoard(None),
        world=SimpleNamespace(device=torch.device("cpu")),
    )
    flags = {
        "diloco.learners": "2",
        "diloco.every": str(H),
        "batch.micro_batches": "4",
        "steps": str(10 * H),
        "checkpoint.every_steps": "0",
    }
    loader: Any = Numbers()
    return (
        Learners(
            resolve(None, flags),
            LocalModel(module, Layout(), local_params=dict(module.named_parameters())),
            runtime,
            loader,
            loss,
            StepTimer(),
        ),
        module,
        passes,
    )


def gradients(loss: Tensor, module: nn.Linear) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(module.parameters())))


def test_an_interrupted_learner_continues_in_the_next_generation() -> None:
    whole, module, passes = make_learners([])
    expected = whole.train(12, 1)
    learners, own, own_passes = make_learners([2, 0, 3])
    for _ in range(3):
        learners.train(12, 1)
    loss = learners.train(12, 1)
    assert own_passes == passes == [step for step in range(12, 12 + H) for _ in range(2)], (
        "no step is computed twice"
    )
    assert loss.item() == expected.item()
    for got, wanted in zip(gradients(loss, own), gradients(expected, module), strict=True):
        assert torch.equal(got, wanted) and wanted.abs().sum() > 0
    learners.train(12 + H, 1)
    assert len(own_passes) == 4 * H, "the next outer step trains all of its steps"


def test_a_learner_is_not_continued_from_weights_that_were_rolled_back() -> None:
    """The same step starts again at other common weights: the run returned to a checkpoint."""
    learners, module, passes = make_learners([3])
    learners.train(12, 1)
    with torch.no_grad():
        module.weight += 1
    loss = learners.train(12, 1)
    assert len(passes) == 2 * (3 + H), "all steps are computed again"
    fresh, other, _ = make_learners([])
    with torch.no_grad():
        other.weight += 1
    expected = fresh.train(12, 1)
    assert loss.item() == expected.item()
    for got, wanted in zip(gradients(loss, module), gradients(expected, other), strict=True):
        assert torch.equal(got, wanted)


def test_weights_and_gradients_are_as_before() -> None:
    learners, module, _ = make_learners([])
    weights, sums = (
        [p.detach().clone() for p in module.parameters()],
        [torch.ones_like(p) for p in module.parameters()],
    )
    for p, gradient in zip(module.parameters(), sums, strict=True):
        p.grad = gradient
    learners.train(0, 0)
    for p, weight, gradient in zip(module.parameters(), weights, sums, strict=True):
        assert (
            torch.equal(p, weight)
            and p.grad is gradient
            and torch.equal(gradient, torch.ones_like(p))
        )


def test_adamw_takes_full_steps_on_average_while_its_first_moment_grows() -> None:
    assert mean_growth(0.9, 1) == pytest.approx(0.1) and mean_growth(0.0, 7) == 1
    assert mean_growth(0.9, 50) == pytest.approx(sum(1 - 0.9 ** (t + 1) for t in range(50)) / 50)
