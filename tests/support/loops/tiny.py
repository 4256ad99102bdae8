"""What the loops here share: a model of 49 weights, 48 points, six micro-batches in a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.data.order import UniformOrder

MICRO_BATCHES = 6
ORDER = UniformOrder(48, batch_size=12, micro_batches=MICRO_BATCHES)


def make_model(*more: nn.Module) -> nn.Sequential:
    """Return a model with `more` after its first layer, with the same weights on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *more, nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def make_points() -> tuple[Tensor, Tensor]:
    """Return (inputs (48, 4), targets (48,))."""
    inputs = torch.rand(48, 4, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a micro-batch: its share of the mean over the step."""
    return nn.functional.mse_loss(outputs, targets) / MICRO_BATCHES
