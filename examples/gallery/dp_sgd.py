"""DP-SGD, differentially private training: `plain` and with lockstep.Session (`train`).

The gradient of each sample is scaled to a norm of at most CLIP: a loss that is weighted by
min(1, CLIP / norm) has the sum of these as its gradient. Noise is added to the gradient by the
loss, too: the gradient of (noise * weight).sum() is the noise. So it follows from the step and the
micro-batch, as dropout does, and is exact on any number of replicas and shards.

Run: python examples/gallery/dp_sgd.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import lockstep

BATCH, CLIP = 48, 0.5


def make_rows() -> TensorDataset:
    rows = torch.randn(240, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(rows, (rows.sum(1) > 0).float())


class Private(nn.Module):
    def __init__(self, noise: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.noise, self.layers = (
            noise,
            nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0)),
        )

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of the samples' losses, each weighted by min(1, CLIP / norm of its
        gradient), plus the noise of these samples' share of BATCH."""

        def loss_of(weights: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
            return binary_cross_entropy_with_logits(
                functional_call(self.layers, weights, row[None]), label[None]
            )

        weights = {name: p.detach() for name, p in self.layers.named_parameters()}
        gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, rows, labels)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        losses = binary_cross_entropy_with_logits(self.layers(rows), labels, reduction="none")
        deviation = (
            self.noise * CLIP / (len(rows) * BATCH) ** 0.5
        )  # noise * CLIP / BATCH in the mean over the micro-batches
        noise = torch.stack(
            [(p * torch.randn_like(p)).sum() for p in self.layers.parameters()]
        ).sum()
        loss: Tensor = (losses * (CLIP / norms).clamp(max=1.0)).mean() + deviation * noise
        return loss


def plain(steps: int = 60, loader: Iterable[Any] | None = None, noise: float = 0.8) -> nn.Module:
    model, step = Private(noise), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = loader or DataLoader(make_rows(), batch_size=BATCH, shuffle=True, drop_last=True)
    while step < steps:
        for rows, labels in loader:
            loss = model(rows, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return model


def train(
    out: str = "runs/dp_sgd",
    steps: int = 60,
    micro_batches: int = 6,
    save_every: int = 20,
    noise: float = 0.8,
) -> None:
    model = Private(noise)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with lockstep.Session(out, micro_batches=micro_batches, save_every=save_every) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(make_rows(), batch_size=BATCH)
        for step in session.steps(steps):
            for rows, labels in loader(step):
                session.backward(model(rows, labels))
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
