"""Your own loop, before and after: a plain PyTorch loop in one process, and the same loop with Lockstep.

    python examples/own_loop.py                                                    the plain loop
    lockstep train examples/own_loop.py:train --out runs/own --workers 2           the same on two processes
    torchrun --nproc-per-node 2 examples/own_loop.py                               the same under torchrun

What the lines that differ buy: any number of processes with the same bits, exact resume after a kill, verified checkpoints, tracking.
The model, the data set, the loss and the optimizer are yours and stay as they are.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from lockstep.data.order import UniformOrder
from lockstep.elastic.world import World
from lockstep.record.tracker import Tracker
from lockstep.training.checkpointer import Keeper
from lockstep.training.replica_group import Team


class Houses(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sizes and prices of made-up houses."""

    def __init__(self, count: int = 2000) -> None:
        noise = torch.Generator().manual_seed(7)
        self.sizes = torch.rand(count, 2, generator=noise) * 6
        self.prices = self.sizes @ torch.tensor([0.773, 0.321]) + 0.067 + 0.01 * torch.randn(count, generator=noise)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.sizes[i], self.prices[i]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1), nn.Flatten(0))


def plain(steps: int = 200) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, houses = make_model().to(device), Houses()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, step = DataLoader(houses, batch_size=64, shuffle=True, drop_last=True), 0
    while step < steps:
        for sizes, prices in loader:
            loss = nn.functional.mse_loss(model(sizes.to(device)), prices.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step}  loss {loss.item():.5f}")


def train(steps: int = 200, out: Path = Path("runs/own")) -> None:
    with World.join() as world:
        device = world.device
        model, houses = make_model().to(device), Houses()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        order = UniformOrder(len(houses), batch=64, micro_batches=8)
        with Keeper(out / "checkpoints", world, model, optimizer, every_steps=50) as keeper:
            step = keeper.resume()
            with Team(world, model, keeper, micro_batches=8) as team, Tracker(out, leader=world.leads, from_step=step) as tracker:
                while step < steps:
                    for k in team.micro_batches(step):
                        sizes, prices = default_collate([houses[i] for i in order.ids(step, k)])
                        loss = nn.functional.mse_loss(team(sizes.to(device)), prices.to(device)) / 8
                        team.backward(loss)
                    optimizer.step()
                    step += 1
                    tracker.step(step, {"loss": team.loss})
                    keeper.save_if_due(step)
                keeper.save(step)


if __name__ == "__main__":
    train() if "RANK" in os.environ else plain()
