"""DiLoCo in a user's loop: learners with a scheduler, clipping, dropout, and a best step.

habit  of a wrong loop; most are in `misbehave`
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from session import disturb
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import lockstep


class Counter(nn.Module):
    """Counts its passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def make_model(habit: str = "", dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(3)
    others = {"batch norm": nn.BatchNorm1d(9), "buffer": Counter()}
    norm = others.get(habit, nn.LayerNorm(9))
    return nn.Sequential(
        nn.Linear(5, 9),
        norm,
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(9, 7),
        nn.GELU(),
        nn.Linear(7, 1),
    )


def make_data() -> TensorDataset:
    x = torch.rand(96, 5, generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, x.square().sum(1, keepdim=True) + 0.1)


def make_inner(model: nn.Module, rate: float, habit: str) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if habit == "muon":
        return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=rate)
    return torch.optim.AdamW(
        parameters[1:] if habit == "a parameter left out" else parameters, rate
    )


def train(
    out: str = "runs/learners",
    steps: int = 12,
    count: int = 3,
    inner_steps: int = 3,
    micro_batches: int = 6,
    clip: float = 0.3,
    dropout: float = 0.1,
    wire: Any = "fp32",
    precision: Any = "fp32",
    own_data: bool = False,
    num_workers: int = 0,
    rate: float = 3e-2,
    save_every: int = 3,
    habit: str = "",
) -> None:
    model = make_model(habit, dropout)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    average = AveragedModel(model)
    with lockstep.Session(
        out, micro_batches=micro_batches, save_every=save_every, wire=wire
    ) as session:
        model, outer = session.prepare(model, outer, precision=precision)
        inner = make_inner(model, rate, habit)
        scheduler = torch.optim.lr_scheduler.LinearLR(inner, 1.0, 0.3, total_iters=12)
        learners = session.learners(
            outer if habit == "outer as inner" else inner, count=count, steps=inner_steps
        )
        saved = session.state(updates=0, average=average, best=lockstep.Best())
        if habit == "scaler":
            session.state(scaler=torch.amp.GradScaler("cpu"))
        if habit != "scheduler left out":
            session.state(scheduler=scheduler)
        if habit == "hidden state":
            session.state(hidden=session.per_micro_batch(torch.zeros(2)))
        loader = session.loader(make_data(), batch_size=24, num_workers=num_workers)
        for step in session.steps(steps):
            for inner_step in learners(step):
                for k in session.micro_batches(inner_step) if own_data else ():
                    x, y = make_data()[k : k + 3 + k % 3]
                    session.forward_backward(x, y, sum_of_squares, count=len(x))
                number = step if habit == "loader(step)" else inner_step
                for x, y in () if own_data else loader(number):
                    disturb(Path(out) / "disturb", session.runtime, inner_step)
                    session.backward(mse_loss(model(x), y))
                    if habit == "break":
                        break
                if clip:
                    session.clip_grad_norm_(clip)
                before = inner.param_groups[0]["lr"]
                if habit != "no update":
                    inner.step()
                assert inner.param_groups[0]["lr"] == before
                scheduler.step()
                saved.updates += 1
                misbehave(habit, session, locals())
            norm = session.clip_grad_norm_(math.inf)
            if habit == "late update":
                inner.step()
            outer.step()
            average.update_parameters(model)
            error = session.evaluate(
                lambda batch: mse_loss(model(batch[0]), batch[1]), make_data(), batch_size=10
            )
            saved.best.update(step, error)
            session.log(step, norm=norm, error=error, updates=saved.updates)
            with open(Path(out) / f"rate-{session.world.rank}", "a") as file:
                file.write(f"{session.step} {inner.param_groups[0]['lr']}\n")


def sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return mse_loss(output, target, reduction="sum")


def misbehave(habit: str, session: lockstep.Session, names: dict[str, Any]) -> None:
    """Do what a step of a learner must not do."""
    actions = {
        "second update": names["inner"].step,
        "outer update": names["outer"].step,
        "second loop": lambda: list(names["loader"](names["inner_step"])),
        "average": lambda: names["average"].update_parameters(names["model"]),
        "log": lambda: session.log(names["inner_step"], x=1.0),
        "evaluate": lambda: session.evaluate(lambda batch: batch[0].mean(), make_data()),
        "backward": lambda: session.backward(names["model"](names["x"]).mean()),
        "value of a learner": lambda: setattr(names["saved"], "updates", float(names["x"].sum())),
    }
    if habit in actions:
        actions[habit]()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
