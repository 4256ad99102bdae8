"""Fit a sine on two workers: python examples/sine.py"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def train(out: str = "runs/sine", steps: int = 400) -> None:
    torch.manual_seed(0)
    x = 6 * torch.rand(4096, 1)
    dataset = TensorDataset(x, x.sin())
    model = nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lockstep.Session(out, micro_batches=8, save_every=100) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=64)
        for step in session.steps(steps):
            for inputs, targets in loader(step):
                session.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
