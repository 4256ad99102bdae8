"""The update: AdamW, the learning rate of a step, the norm of a gradient.

Everything here is a pure function of the summed gradients and the step, so that replicas that hold equal bits go on holding them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from torch import nn

from lockstep.config import Optim

log = logging.getLogger("lockstep")


def adamw(model: nn.Module, values: Optim) -> torch.optim.AdamW:
    """AdamW over the model's parameters, weight decay on matrices only (Loshchilov and Hutter, 2019).

    foreach by default: its bits do not depend on how tensors are cut. The fused one is faster and says so.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": values.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if values.fused:
        log.info("fused AdamW: faster; on a CPU its bits depend on how tensors are cut, so shards may differ from whole tensors")
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=values.learning_rate,
        betas=(values.beta1, values.beta2),
        eps=values.epsilon,
        fused=values.fused,
        foreach=not values.fused,
    )


def learning_rate(update: int, values: Optim) -> float:
    """The learning rate of update number `update`, from 1: a straight rise to its peak at `warmup_steps`, then the decay.

    linear, cosine  to 0 at `decay_steps`
    inverse_sqrt    peak * sqrt(warmup_steps / update) (Vaswani et al., 2017)
    """
    peak, warmup = values.learning_rate, values.warmup_steps
    if update < warmup:
        return peak * update / warmup
    if values.decay == "constant":
        return peak
    if values.decay == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / max(update, 1))
    left = min(1.0, max(0.0, (values.decay_steps + 1 - update) / max(1, values.decay_steps + 1 - warmup)))
    return peak * left if values.decay == "linear" else peak * 0.5 * (1 - math.cos(math.pi * left))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def divide_and_clip(parameters: Iterable[nn.Parameter], *, divisor: float, clip_norm: float) -> torch.Tensor:
    """Divide the gradients by `divisor`, scale them down to `clip_norm` where their global norm is above it (0: never).

    Returns the norm after the division and before the clipping: a 0-dim tensor on the device, so that no host waits for it here.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm: torch.Tensor = torch.stack(torch._foreach_norm(gradients)).norm() / divisor
    factor = torch.ones_like(norm) if clip_norm == 0 else torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(gradients, factor / divisor)
    return norm
