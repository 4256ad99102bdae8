"""A GAN with two optimizers: `plain` and with lockstep.Session (`train`).

Both losses of a micro-batch are computed at the same weights and added, since a step has one
micro-batch loop and one backward pass per micro-batch. Each loss must reach one network only: the
discriminator sees detached samples, and the generator's loss uses the discriminator's weights
detached. To update the networks in turn instead, let `requires_grad_` follow from the step.

Run: python examples/gallery/gan.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def make_circle() -> TensorDataset:
    angles = 6.283 * torch.rand(256, generator=torch.Generator().manual_seed(1))
    return TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses of the discriminator and of the generator."""
        samples = self.generator(torch.randn(len(real), 4, device=real.device))
        loss_d = (
            softplus(-self.discriminator(real)).mean()
            + softplus(self.discriminator(samples.detach())).mean()
        )
        constant = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        return loss_d, softplus(-functional_call(self.discriminator, constant, samples)).mean()


def make_optimizers(gan: Gan) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    first = torch.optim.Adam(gan.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    return first, torch.optim.Adam(gan.generator.parameters(), lr=1e-3, betas=(0.5, 0.99))


def plain(steps: int = 60, loader: Iterable[Any] | None = None) -> nn.Module:
    model, step = Gan(), 0
    optimizer_d, optimizer_g = make_optimizers(model)
    loader = loader or DataLoader(make_circle(), batch_size=48, shuffle=True, drop_last=True)
    while step < steps:
        for (real,) in loader:
            loss_d, loss_g = model(real)
            (loss_d + loss_g).backward()
            optimizer_d.step()
            optimizer_g.step()
            optimizer_d.zero_grad()
            optimizer_g.zero_grad()
            step += 1
    return model


def train(
    out: str = "runs/gan", steps: int = 60, micro_batches: int = 6, save_every: int = 20
) -> None:
    model = Gan()
    optimizers = make_optimizers(model)
    with lockstep.Session(out, micro_batches=micro_batches, save_every=save_every) as session:
        model, optimizer_d, optimizer_g = session.prepare(model, *optimizers)
        loader = session.loader(make_circle(), batch_size=48)
        for step in session.steps(steps):
            for (real,) in loader(step):
                loss_d, loss_g = model(real)
                session.backward(loss_d + loss_g)
            optimizer_d.step()
            optimizer_g.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
