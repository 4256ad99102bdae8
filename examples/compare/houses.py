"""The data set and the model that all scripts of this folder train."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset


class Houses(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sizes and prices of made-up houses."""

    def __init__(self, count: int = 2048) -> None:
        generator = torch.Generator().manual_seed(7)
        self.sizes = torch.rand(count, 2, generator=generator) * 6
        self.prices = self.sizes @ torch.tensor([0.773, 0.321]) + 0.067

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.sizes[index], self.prices[index]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1), nn.Flatten(0)
    )
