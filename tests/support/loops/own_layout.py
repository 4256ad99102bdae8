"""A loop of repeated blocks, two optimizers and an average, with a Session, for any layout; it kills
a worker as session.py does.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from session import disturb
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(9), nn.Linear(9, 13), nn.Linear(13, 9)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.outer(
            nn.functional.dropout(self.inner(self.norm(rows)).relu(), 0.1, self.training)
        )


def train(out: str = "runs/own_layout", steps: int = 30, habit: str = "") -> None:
    torch.manual_seed(3)
    points, calls = torch.rand(240, 9), 0
    model = nn.Sequential(*(Block() for _ in range(3)))
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(muon, 7, 0.7)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    with lockstep.Session(out, micro_batches=4, save_every=10) as session:
        model, muon, adamw = session.prepare(model, muon, adamw)
        session.state(scheduler=scheduler, ema=ema)
        loader = session.loader(points, batch_size=24)
        for step in session.steps(steps):
            if habit == "evaluate first":
                session.log(
                    step,
                    error=session.evaluate(
                        lambda rows: model(rows).abs().mean(), points, batch_size=50
                    ),
                )
            for rows in loader(step):
                disturb(Path(out) / "disturb", session.runtime, step)
                calls += habit == "hidden state"
                session.backward((model(rows + calls) - 1 / (1 + rows)).square().mean())
                misbehave(habit, "in the loop", session, model, rows)
            misbehave(habit, "after it", session, model, rows)
            norm = session.clip_grad_norm_(0.5)
            misbehave(habit, "after the clip", session, model, rows)
            muon.step()
            adamw.step()
            scheduler.step()
            ema.update_parameters(model)
            session.log(step, norm=norm)
            if step % 10 == 9:

                def error(rows: Tensor, step: int = step) -> Tensor:
                    disturb(Path(out) / "disturb_evaluation", session.runtime, step)
                    return (ema(rows) - model(rows)).abs().mean()

                session.log(step, error=session.evaluate(error, points, batch_size=50))


def misbehave(
    habit: str, where: str, session: lockstep.Session, model: nn.Module, rows: Tensor
) -> None:
    """Do what a loop in shards must not do: `habit`, after "in the loop: ", "after it: " or "after
    the clip: "."""
    slices = [
        p
        for optimizer in session.checkpointer.optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    habits = {
        "in the loop: backward": lambda: session.backward(model(rows).mean()),
        "in the loop: clip": lambda: session.clip_grad_norm_(0.5),
        "after it: plain clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
        "after it: deep copy": lambda: deepcopy(model),
        "after it: state_dict": model.module.state_dict,
        "after it: forward": lambda: model(rows),
        "after it: a change": lambda: slices[0].grad.add_(0.1),
        "after the clip: noise": lambda: [p.grad.add_(torch.randn_like(p)) for p in slices],
    }
    if habit.startswith(where):
        habits[habit]()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
