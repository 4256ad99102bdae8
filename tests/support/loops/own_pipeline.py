"""A loop of an nn.Sequential with a Session, for pipelines and other layouts; it kills a worker as
session.py does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from own_layout import Block
from session import disturb
from torch import Tensor, nn

import lockstep


class Odd(nn.Module):
    """A block that a pipeline refuses."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit, self.unused = habit, nn.Linear(9, 9)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: Tensor) -> Any:
        if self.habit == "buffer":
            self.calls += 1
        if self.habit == "unused output":
            return rows, self.unused(rows)
        if self.habit != "unused parameters":
            rows = rows + self.unused(rows)
        if self.habit == "numpy":
            rows = rows * (1 + np.random.rand())
        return {"rows": rows} if self.habit == "dict" else rows


class First(nn.Module):
    def forward(self, received: tuple[Tensor, Tensor]) -> Tensor:
        return received[0]


def make_model(habit: str) -> nn.Module:
    blocks: list[nn.Module] = [
        *(Block() for _ in range(3)),
        nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Linear(8, 9)),
    ]
    if habit in ("buffer", "unused output", "numpy", "dict", "unused parameters"):
        blocks[1:1] = [Odd(habit), *([nn.Linear(9, 9)] if habit == "unused output" else [])]
    if habit == "unused output":
        blocks[2] = First()
    return nn.Sequential(*blocks)


def train(
    out: str = "runs/own_pipeline", steps: int = 30, habit: str = "", split: str = ""
) -> None:
    torch.manual_seed(3)
    points, calls = torch.rand(240, 9), 0
    model = make_model(habit)
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(muon, 7, 0.7)

    def error(output: Tensor, target: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters()) if habit == "penalty" else 0.0
        return (output - target + 0.01 * torch.rand_like(output)).square().mean() + penalty

    with lockstep.Session(out, micro_batches=4, save_every=10) as session:
        model, muon, adamw = session.prepare(model, muon, adamw, split_points=split.split())
        session.state(scheduler=scheduler)
        if habit == "average":
            session.state(ema=torch.optim.swa_utils.AveragedModel(model.module))
        loader = session.loader(points, batch_size=24, num_workers=1)
        for step in session.steps(steps):
            for rows in loader(step):
                disturb(Path(out) / "disturb", session.runtime, step)
                calls += habit == "hidden state"
                if habit == "backward":
                    session.backward(rows.mean())
                noisy = (
                    rows
                    + 0.1 * torch.rand_like(rows)
                    + (session.world.rank if habit == "rank" else 0)
                )
                session.forward_backward(noisy, 1 / (1 + rows) + calls, error)
                if habit == "twice":
                    session.forward_backward(noisy, 1 / (1 + rows), error)
                if habit == "call":
                    model(rows)
            norm = session.clip_grad_norm_(0.5)
            muon.step()
            adamw.step()
            scheduler.step()
            session.log(step, norm=norm)
            if step % 10 == 9:
                session.log(
                    step,
                    error=session.evaluate(
                        lambda rows: (model(rows) - 1 / (1 + rows)).abs().mean(),
                        points,
                        batch_size=50,
                    ),
                )


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
