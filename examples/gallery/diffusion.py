"""A diffusion model with an average of its weights (EMA): `plain` and with lockstep.Session (`train`).

Run: python examples/gallery/diffusion.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def make_spiral() -> TensorDataset:
    turns = torch.rand(240, generator=torch.Generator().manual_seed(1)).sqrt()
    return TensorDataset(torch.stack([turns * (9 * turns).cos(), turns * (9 * turns).sin()], 1))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
        )

    def forward(self, points: Tensor) -> Tensor:
        """Return the loss of predicting the noise that is added to the points."""
        time, noise = torch.rand(len(points), 1, device=points.device), torch.randn_like(points)
        noisy = (1 - time).sqrt() * points + time.sqrt() * noise
        return mse_loss(self.layers(torch.cat([noisy, time], 1)), noise)


def plain(steps: int = 60, loader: Iterable[Any] | None = None) -> nn.Module:
    model, step = Denoiser(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    loader = loader or DataLoader(make_spiral(), batch_size=48, shuffle=True, drop_last=True)
    while step < steps:
        for (points,) in loader:
            loss = model(points)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
            step += 1
    return model


def train(
    out: str = "runs/diffusion", steps: int = 60, micro_batches: int = 6, save_every: int = 20
) -> None:
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with lockstep.Session(out, micro_batches=micro_batches, save_every=save_every) as session:
        model, optimizer = session.prepare(model, optimizer)
        ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.95))
        session.state(ema=ema)
        loader = session.loader(make_spiral(), batch_size=48)
        for step in session.steps(steps):
            for (points,) in loader(step):
                session.backward(model(points))
            optimizer.step()
            ema.update_parameters(model.module)


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
