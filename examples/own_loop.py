"""A training loop in one process (`plain`), and the same loop with lockstep.Session (`train`).

    python examples/own_loop.py                          two workers on this machine
    lockstep run examples/own_loop.py --workers 4        four; --steps 300 is an argument of train
    torchrun --nproc-per-node 2 examples/own_loop.py     the workers of torchrun

The changed lines add: the same bits on any number of workers, exact resume after a kill, lost
workers replaced while the others train, verified checkpoints, metrics, and the device.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep


class Houses(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sizes and prices of made-up houses."""

    def __init__(self, count: int = 2000) -> None:
        noise = torch.Generator().manual_seed(7)
        self.sizes = torch.rand(count, 2, generator=noise) * 6
        self.prices = (
            self.sizes @ torch.tensor([0.773, 0.321])
            + 0.067
            + 0.01 * torch.randn(count, generator=noise)
        )

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.sizes[i], self.prices[i]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1), nn.Flatten(0)
    )


def plain(steps: int = 200) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset, model = Houses(), make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, step = DataLoader(dataset, batch_size=64, shuffle=True, drop_last=True), 0
    while step < steps:
        for sizes, prices in loader:
            loss = nn.functional.mse_loss(model(sizes.to(device)), prices.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step}  loss {loss.item():.5f}")


def train(out: str = "runs/own", steps: int = 200) -> None:
    dataset, model = Houses(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lockstep.Session(out, micro_batches=8, save_every=50) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=64)
        for step in session.steps(steps):
            for sizes, prices in loader(step):
                session.backward(nn.functional.mse_loss(model(sizes), prices))
            optimizer.step()
            session.log(step, loss=session.loss)


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
