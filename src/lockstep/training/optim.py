"""The update: AdamW and the learning rate schedule.

Pure functions of the summed gradients and the step, so replicas with equal bits stay equal; and
elementwise, so the bits do not depend on how tensors are sharded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.config.schema import MemoryOptions, OptimOptions

log = logging.getLogger("lockstep")

DEFAULT_MEMORY = MemoryOptions()


class HasParameters(Protocol):
    """A module, or the part of it that one worker holds (parallel/parallelize.py)."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


def adamw(model: HasParameters, values: OptimOptions, memory: MemoryOptions = DEFAULT_MEMORY) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters, with weight decay on matrices only.

    The bits do not depend on how tensors are sharded, except with `fused` on a CPU. On a GPU always
    fused: elementwise there, and a third of the memory traffic of foreach. On a CPU one parameter
    after another, which stays in the cache. `LeanAdamW` for a lower-precision or offloaded state.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": values.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (values.beta1, values.beta2)
    if memory.saves_optimizer:
        state = torch.bfloat16 if memory.optimizer_state == "bf16" else torch.float32
        offload = memory.offload == "optimizer"
        return LeanAdamW(groups, lr=values.learning_rate, betas=betas, eps=values.epsilon, state_dtype=state, offload=offload)
    on_gpu = all(p.device.type == "cuda" for p in trained)
    if values.fused and not on_gpu:
        log.info("fused AdamW: faster; on a CPU its bits depend on how tensors are sharded")
    fused = values.fused or on_gpu
    return torch.optim.AdamW(groups, lr=values.learning_rate, betas=betas, eps=values.epsilon, fused=fused, foreach=False)


class LeanAdamW(torch.optim.Optimizer):
    """AdamW with less memory: parameters are updated one after another, widened to float32 for the
    update only.

    state_dtype  dtype of exp_avg and exp_avg_sq; bfloat16 is rounded by `stochastic_round`
    offload      keep state and master weights in CPU memory and update there: gradients are copied
                 to the CPU, weights back

    A parameter that is not float32 gets a float32 master weight, which is trained; the parameter is
    its rounding. State per parameter: step, exp_avg, exp_avg_sq, and master. With float32
    everywhere the bits are those of torch.optim.AdamW.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: torch.dtype = torch.float32,
        offload: bool = False,
    ) -> None:
        self.state_dtype, self.offload = state_dtype, offload
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters. A closure is not called: AdamW evaluates the loss once."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def update(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        """Apply algorithm 2 of Loshchilov and Hutter, 2019, as torch.optim.AdamW orders it."""
        state = self.state_on_device(parameter)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        gradient = grad.to(mean.device, torch.float32)
        weight = state.get("master", parameter)
        wide_mean = mean.float().lerp_(gradient, 1 - beta1)
        wide_square = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        root = wide_square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        weight.addcdiv_(wide_mean, root, value=-group["lr"] / (1 - beta1**step))
        if self.state_dtype != torch.float32:  # else both were updated in place
            mean.copy_(stochastic_round(wide_mean, gradient, int(step)))
            square.copy_(stochastic_round(wide_square, gradient, int(step) + 1))
        if "master" in state:
            parameter.copy_(weight)

    def state_on_device(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the parameter's state on its device; zeros, or moved there on first use."""
        state: dict[str, Any] = self.state[parameter]
        device = torch.device("cpu") if self.offload else parameter.device
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=self.state_dtype, device=device, requires_grad=False)
            if parameter.dtype != torch.float32 or parameter.device != device:
                state["master"] = parameter.detach().to(device, torch.float32, copy=True)
        for name, value in state.items():
            if name != "step" and value.device != device:
                state[name] = value.to(device)
        return state


def stochastic_round(wide: Tensor, noise: Tensor, step: int) -> Tensor:
    """Round float32 to bfloat16 stochastically (Gupta et al. 2015, section 3.1).

    noise  float32 gradient of the same shape, whose bits with the step seed the rounding: equal
           gradients give equal bits, wherever an element is and however the tensor is sharded

    Rounding to nearest would never let a mean of squares fall: at beta2 = 0.999 a step removes a
    thousandth, and neighbors in bfloat16 are 1/128 to 1/256 apart.
    """
    chance = noise.view(torch.int32).to(torch.int64).bitwise_xor_(step * 0x9E3779B1 % 2**32).mul_(0x5851F42D4C957F2D)
    chance = (chance >> 40).bitwise_and_(0xFFFF).to(torch.int32)
    return ((wide.view(torch.int32) + chance) & -0x10000).view(torch.float32).to(torch.bfloat16)


def learning_rate(update: int, values: OptimOptions) -> float:
    """Return the learning rate of update number `update`, from 1: linear warmup to the peak at
    `warmup_steps`, then the decay.

    linear, cosine  to 0 at update `decay_steps` + 1: the last of `decay_steps` updates still
                    changes the weights
    inverse_sqrt    peak * sqrt(warmup_steps / update) (Vaswani et al., 2017)
    """
    peak, warmup = values.learning_rate, values.warmup_steps
    if update < warmup:
        return peak * update / warmup
    if values.schedule == "constant":
        return peak
    if values.schedule == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / max(update, 1))
    left = min(1.0, max(0.0, (values.decay_steps + 1 - update) / max(1, values.decay_steps + 1 - warmup)))
    return peak * left if values.schedule == "linear" else peak * 0.5 * (1 - math.cos(math.pi * left))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
