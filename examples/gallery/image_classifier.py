"""An image classifier with BatchNorm and augmentation: `plain` and with lockstep.Session (`train`).

Run: python examples/gallery/image_classifier.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, Dataset

import lockstep


class Squares(Dataset[tuple[Tensor, int]]):
    """Images with a bright square, whose size is the class; flipped and shifted at random."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.labels = [i % 3 for i in range(96)]
        self.images = 0.3 * torch.randn(96, 1, 12, 12, generator=generator)
        for image, label in zip(self.images, self.labels, strict=True):
            image[:, 2 : 5 + 2 * label, 2 : 5 + 2 * label] += 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return random_crop(random_flip(self.images[i])), self.labels[i]


def random_flip(image: Tensor) -> Tensor:
    return image.flip(-1) if torch.rand(()) < 0.5 else image


def random_crop(image: Tensor, padding: int = 2) -> Tensor:
    top, left = torch.randint(2 * padding + 1, (2,)).tolist()
    return pad(image, [padding] * 4)[:, top : top + image.shape[1], left : left + image.shape[2]]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 3))


def plain(steps: int = 60, loader: Iterable[Any] | None = None) -> nn.Module:
    model, step = make_model(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    loader = loader or DataLoader(Squares(), batch_size=24, shuffle=True, drop_last=True)
    while step < steps:
        for images, labels in loader:
            loss = cross_entropy(model(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
    return model


def train(
    out: str = "runs/image_classifier",
    steps: int = 60,
    micro_batches: int = 6,
    save_every: int = 20,
) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    with lockstep.Session(out, micro_batches=micro_batches, save_every=save_every) as session:
        model, optimizer = session.prepare(model, optimizer)
        session.state(scheduler=scheduler)
        loader = session.loader(Squares(), batch_size=24)
        for step in session.steps(steps):
            for images, labels in loader(step):
                session.backward(cross_entropy(model(images), labels, label_smoothing=0.1))
            optimizer.step()
            scheduler.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
