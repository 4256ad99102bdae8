"""Inner optimizers of DiLoCo: the start of their moments, and the rates that the loop sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.tasks.optim import LeanAdamW
from lockstep.training.inner_optimizers import InnerOptimizers, mean_growth, start_moments

H = 4


class Guard:
    """Allows updates in `step`."""

    def __init__(self, step: int, mean_square: float = 1e-4) -> None:
        self.step: int | None = step
        self.asked = 0
        self.square = torch.tensor(mean_square)

    def begin_update(self, optimizer: torch.optim.Optimizer) -> int | None:
        return self.step

    def mean_square(self) -> Tensor:
        self.asked += 1
        return self.square


def make_model() -> nn.Linear:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (LeanAdamW, {"state_dtype": torch.bfloat16}),
    ],
)
def test_moments_start_from_mean_squares_of_rows(kind: Any, options: dict[str, Any]) -> None:
    model = make_model()
    before = model.weight.detach().clone()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    start_moments(optimizer, torch.tensor(0.0))
    assert torch.equal(model.weight, before)
    state, gradient = optimizer.state[model.weight], model.weight.grad
    assert gradient is not None and not state["exp_avg"].any() and float(state["step"]) == 1e6
    rows = gradient.square().mean(1, keepdim=True).expand(2, 3)
    for name in ("exp_avg_sq", "max_exp_avg_sq"):
        if name in state:
            torch.testing.assert_close(state[name].float(), rows, rtol=1e-2, atol=0)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_the_rate_is_higher_during_an_update_only(rate: Any) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    rates: list[float] = []
    guard = Guard(H)
    InnerOptimizers([optimizer], H, guard)
    optimizer.register_step_pre_hook(
        lambda *_: rates.append(float(optimizer.param_groups[0]["lr"]))
    )
    for guard.step in range(H, 2 * H):
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] is rate
    assert guard.asked == 1, "the moments start in the first step of a learner"
    assert rates[0] == 0, "the step that creates the state"
    assert rates[1:] == pytest.approx([0.1 / mean_growth(0.9, H)] * H)


@pytest.mark.parametrize(
    ("step", "kind"), [(0, torch.optim.AdamW), (H, torch.optim.SGD), (None, torch.optim.AdamW)]
)
def test_a_plain_update(step: int | None, kind: Any) -> None:
    """In the first outer step, of other optimizers, and where a peer was lost."""
    models = [make_model(), make_model()]
    optimizers = [kind(model.parameters(), lr=0.1) for model in models]
    guard = Guard(0)
    guard.step = step
    InnerOptimizers(optimizers[:1], H, guard)
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight) and not guard.asked


def test_checkpoints_hold_groups_and_numbers_of_the_optimizer() -> None:
    model = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = InnerOptimizers([optimizer], H, Guard(0))
    optimizer.calls = 3
    saved = inner.state_dict()
    optimizer.calls, optimizer.param_groups[0]["lr"] = 5, 0.5
    inner.load_state_dict(saved)
    assert (optimizer.calls, optimizer.param_groups[0]["lr"]) == (3, 0.1)
    assert len(optimizer.param_groups[0]["params"]) == 2
