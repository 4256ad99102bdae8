"""The loop of docs/questions.md, and what its answers use. Replace lines of `train` by an answer's.

Run: python examples/questions.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import IterableDataset, TensorDataset

import lockstep

Pair = tuple[Tensor, Tensor]
loss_fn = cross_entropy


def make_points(count: int, seed: int) -> TensorDataset:
    """Return points (count, 4) of three classes: 50%, 40% and 10% of them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0, 2]).repeat(count // 10)
    points = torch.randn(count, 4, generator=generator)
    points[torch.arange(count), labels] += 2.0
    return TensorDataset(points, labels)


class Stream(IterableDataset[Pair]):
    def __iter__(self) -> Iterator[Pair]:
        points, labels = make_points(240, seed=1).tensors
        yield from zip(points, labels, strict=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(x))
        return logits


class Embedding(Net):
    """Two views of the same points become unit vectors."""

    def forward(self, x: Tensor) -> Tensor:
        return normalize(super().forward(x))


def contrast(embedded: list[Tensor]) -> Tensor:
    """Return a contrastive loss over all samples of these micro-batches: neighbors are pairs."""
    left, right = torch.cat(embedded).view(-1, 2, 3).unbind(1)
    similar = left @ right.T / 0.1
    return cross_entropy(similar, torch.arange(len(similar), device=similar.device))


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, real: Tensor, *, trains_d: bool) -> Tensor:
        """Return the loss of the network that this step trains."""
        fake = self.generator(torch.randn(len(real), 2, device=real.device))
        if not trains_d:
            return nn.functional.softplus(-self.discriminator(fake)).mean()
        is_real = torch.cat([self.discriminator(real), -self.discriminator(fake)])
        return nn.functional.softplus(-is_real).mean()


class Experts(Net):
    """The second expert sees only samples whose first value is large."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        chosen = x[:, 0] > 2.0
        if chosen.any():
            logits = logits + chosen[:, None] * self.expert(x)
        return logits


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRU(1, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, hidden: Tensor) -> Pair:
        states, hidden = self.cell(x, hidden)
        return self.head(states), hidden


def series(step: int, k: int, length: int = 5) -> Pair:
    """Return the next `length` values (length, 8, 1) of the eight series of micro-batch k, and the
    values after them."""
    starts = torch.arange(8 * k, 8 * k + 8.0)
    times = torch.arange(step * length, (step + 1) * length + 1.0)
    values = torch.sin(starts + 0.3 * times[:, None])[:, :, None]
    return values[:-1], values[1:]


def f1_score(truth: Tensor, predicted: Tensor) -> float:
    """Return the mean over the classes, as scikit-learn's average="macro"."""
    scores = []
    for c in range(3):
        both = ((truth == c) & (predicted == c)).sum()
        either = (truth == c).sum() + (predicted == c).sum()
        scores.append(2 * both / either)
    return float(torch.stack(scores).mean())


def save_picture(rows: Tensor, path: Path) -> None:
    """Write values between 0 and 1 as a gray picture, a PGM file."""
    height, width = rows.shape
    pixels = (255 * rows).to(torch.uint8).flatten().tolist()
    path.write_bytes(b"P5 %d %d 255\n" % (width, height) + bytes(pixels))


def train(out: str = "runs/questions", steps: int = 20, lr: float = 5e-2) -> None:
    dataset = make_points(240, seed=1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with lockstep.Session(out, micro_batches=4, save_every=2) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=32)
        for step in session.steps(steps):
            for x, y in loader(step):
                session.backward(loss_fn(model(x), y))
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
