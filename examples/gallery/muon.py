"""Muon for the matrices and AdamW for the rest: `plain` and with lockstep.Session (`train`).

Muon computes the update of a matrix from the whole matrix. In shards the owner of a matrix receives
its rows, computes the update and returns them, so the bits do not depend on the number of shards.

Run: python examples/gallery/muon.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def make_rows() -> TensorDataset:
    rows = torch.randn(240, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(rows, (rows[:, :3] * rows[:, 3:]).sum(1))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1), nn.Flatten(0)
    )


def make_optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2)


def plain(steps: int = 60, loader: Iterable[Any] | None = None) -> nn.Module:
    model, step = make_model(), 0
    muon, adamw = make_optimizers(model)
    loader = loader or DataLoader(make_rows(), batch_size=48, shuffle=True, drop_last=True)
    while step < steps:
        for rows, targets in loader:
            loss = mse_loss(model(rows), targets)
            loss.backward()
            muon.step()
            adamw.step()
            muon.zero_grad()
            adamw.zero_grad()
            step += 1
    return model


def train(
    out: str = "runs/muon", steps: int = 60, micro_batches: int = 6, save_every: int = 20
) -> None:
    model = make_model()
    optimizers = make_optimizers(model)
    with lockstep.Session(out, micro_batches=micro_batches, save_every=save_every) as session:
        model, muon, adamw = session.prepare(model, *optimizers)
        loader = session.loader(make_rows(), batch_size=48)
        for step in session.steps(steps):
            for rows, targets in loader(step):
                session.backward(mse_loss(model(rows), targets))
            muon.step()
            adamw.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
