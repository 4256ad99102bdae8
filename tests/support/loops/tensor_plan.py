"""A loop with a tensor plan, BatchNorm, dropout and an average, with a Session; it kills a worker as
session.py does.
"""

from __future__ import annotations

from pathlib import Path

import torch
from session import disturb
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(9, 14), nn.Linear(14, 9)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.outer(nn.functional.dropout(self.inner(rows).relu(), 0.1, self.training))


def train(out: str = "runs/tensor_plan", steps: int = 24) -> None:
    torch.manual_seed(3)
    points = torch.rand(240, 9)
    model = nn.Sequential(Feedforward(), nn.BatchNorm1d(9), Feedforward())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    with lockstep.Session(out, micro_batches=4, save_every=8) as session:
        model, optimizer = session.prepare(
            model, optimizer, tensor_plan={"*.inner": "colwise", "*.outer": "rowwise"}
        )
        session.state(ema=ema)
        loader = session.loader(points, batch_size=24)
        for step in session.steps(steps):
            for rows in loader(step):
                disturb(Path(out) / "disturb", session.runtime, step)
                session.backward((model(rows) - 1 / (1 + rows)).square().mean())
            norm = session.clip_grad_norm_(0.5)
            optimizer.step()
            ema.update_parameters(model)
            session.log(step, norm=norm)
            if step % 8 == 7:
                session.log(
                    step,
                    error=session.evaluate(
                        lambda rows: (ema(rows) - model(rows)).abs().mean(), points, batch_size=50
                    ),
                )


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
