"""The data set, the model and the optimizer that the tutorial scripts of this folder train."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset


def load_train_objects() -> tuple[
    Dataset[tuple[torch.Tensor, ...]], nn.Module, torch.optim.Optimizer
]:
    torch.manual_seed(0)
    sources = torch.rand(2048, 20)
    model = nn.Linear(20, 1)
    return (
        TensorDataset(sources, sources.mean(1, keepdim=True)),
        model,
        torch.optim.SGD(model.parameters(), lr=1e-1),
    )
