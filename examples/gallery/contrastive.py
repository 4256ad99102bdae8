"""A contrastive loss over the whole batch (CLIP, SimCLR): `plain` and with lockstep.Session (`train`).

Each sample is compared with all others of the batch. Within a micro-batch alone that is another
objective, with fewer negatives, which depends on the number of micro-batches. Here every worker
first embeds all micro-batches of the step without gradients. Then micro-batch k computes the loss
of the whole batch, in which only its own embeddings have gradients. Every weight acts through
embeddings alone, the temperature too, so these gradients add up to that of the plain loss.

Run: python examples/gallery/contrastive.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

import lockstep

BATCH = 48


def make_pairs() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    meanings = torch.randn(240, 4, generator=generator)
    mixing = torch.randn(4, 6, generator=generator)
    return TensorDataset(meanings.tanh(), meanings @ mixing)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.log_scale = nn.Parameter(torch.ones(1))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings (samples, 8) of both sides, the left ones divided by the temperature."""
        return normalize(self.left(left)) * self.log_scale.exp(), normalize(self.right(right))


def loss_of(embedded: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the contrastive loss over the samples of all these micro-batches."""
    left, right = (torch.cat(parts) for parts in zip(*embedded, strict=True))
    similar = left @ right.T  # (samples, samples)
    labels = torch.arange(len(similar), device=similar.device)
    return (cross_entropy(similar, labels) + cross_entropy(similar.T, labels)) / 2


def plain(steps: int = 60, loader: Iterable[Any] | None = None) -> nn.Module:
    model, step = Towers(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = loader or DataLoader(make_pairs(), batch_size=BATCH, shuffle=True, drop_last=True)
    while step < steps:
        for left, right in loader:
            loss_of([model(left, right)]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return model


def train(
    out: str = "runs/contrastive", steps: int = 60, micro_batches: int = 6, save_every: int = 20
) -> None:
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with lockstep.Session(out, micro_batches=micro_batches, save_every=save_every) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(make_pairs(), batch_size=BATCH)
        for step in session.steps(steps):
            with torch.no_grad():
                embedded = [model(*loader.batch(step, k)) for k in range(micro_batches)]
            for k in session.micro_batches(step):
                own = [model(*loader.batch(step, k))]
                loss = loss_of(embedded[:k] + own + embedded[k + 1 :])
                # The mean over the micro-batches divides their sum; the recorded loss stays as it is.
                session.backward(loss + (micro_batches - 1) * (loss - loss.detach()))
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
