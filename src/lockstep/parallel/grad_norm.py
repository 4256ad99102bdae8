"""Gradient norm and clipping; the bits of the norm do not depend on how tensors are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lockstep.runtime.torch_private import foreach_mul_


def row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row of (n, ...): (n,). Its bits do not depend on the other rows.

    Measured on one core: (2048, 704) in 148 us, as long as torch's norm of the whole.
    """
    rows = gradient.reshape(len(gradient) if gradient.dim() else 1, -1) if gradient.numel() else gradient.reshape(len(gradient), 1)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


def sum_of_squares(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares, 0-dim float64: summed per row, per gradient, then over all."""
    return torch.stack([row_norms(gradient).double().square().sum() for gradient in gradients]).sum()


def divide_and_clip(
    parameters: Iterable[nn.Parameter], *, divisor: float, clip_norm: float, grad_norm_squared: torch.Tensor | None = None
) -> torch.Tensor:
    """Divide the gradients by `divisor`, then clip their global norm to `clip_norm` (0: never).

    grad_norm_squared  sum of squares of the whole gradient, if these parameters are slices

    Returns the norm before clipping, a 0-dim tensor on the device: the host does not wait for it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = ((sum_of_squares(gradients) if grad_norm_squared is None else grad_norm_squared).sqrt() / divisor).float()
    factor = torch.ones_like(norm) if clip_norm == 0 else torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    foreach_mul_(gradients, factor / divisor)
    return norm
