"""The update: AdamW, the learning rate of a step, the norm of a gradient.

Everything here is a pure function of the summed gradients and the step, so that replicas that hold equal bits go on holding them; and
element by element, so that the bits do not depend on how tensors are cut into shards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.config.schema import Memory, Optim

log = logging.getLogger("lockstep")

PLAIN = Memory()


class Model(Protocol):
    """What has parameters: a module, or what one worker holds of it (parallel/parallelize.py)."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Each once, in the order of the model."""


def adamw(model: Model, values: Optim, memory: Memory = PLAIN) -> torch.optim.Optimizer:
    """AdamW over the model's parameters, weight decay on matrices only (Loshchilov and Hutter, 2019).

    torch's own, whose bits do not depend on how tensors are cut: on a GPU by foreach, which is fewer kernels; on a CPU one parameter
    after another, whose numbers then stay in the cache (the same bits in half the time: bench/memory.py). The fused one is faster and
    says so. `LeanAdamW` where memory is to be saved.
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
    if values.fused:
        log.info("fused AdamW: faster; on a CPU its bits depend on how tensors are cut, so shards may differ from whole tensors")
    foreach = not values.fused and any(p.device.type != "cpu" for p in trained)
    return torch.optim.AdamW(groups, lr=values.learning_rate, betas=betas, eps=values.epsilon, fused=values.fused, foreach=foreach)


class LeanAdamW(torch.optim.Optimizer):
    """AdamW with less memory: one parameter after another, its numbers widened to float32 for the update alone.

    state_dtype  of both means; bfloat16 is rounded by `round_fairly`
    offload      state and masters live in the CPU's memory, and the update is done there: gradients go down, weights come up

    A parameter that is not float32 itself gets a float32 master, which is what is trained; the parameter is its rounding.
    State by parameter: step, exp_avg, exp_avg_sq, and master where there is one. On equal types the bits are those of torch's AdamW.
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
        """One update from the gradients as they are. A closure is not called: there is nothing here that asks twice."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def update(self, parameter: nn.Parameter, slope: Tensor, group: dict[str, Any]) -> None:
        """Loshchilov and Hutter 2019, algorithm 2, in the order of operations of torch.optim.AdamW."""
        state = self.placed_state(parameter)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        gradient = slope.to(mean.device, torch.float32)
        weight = state.get("master", parameter)
        wide_mean = mean.float().lerp_(gradient, 1 - beta1)
        wide_square = square.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        root = wide_square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        weight.addcdiv_(wide_mean, root, value=-group["lr"] / (1 - beta1**step))
        if self.state_dtype != torch.float32:  # else both were updated in place
            mean.copy_(round_fairly(wide_mean, gradient, int(step)))
            square.copy_(round_fairly(wide_square, gradient, int(step) + 1))
        if "master" in state:
            parameter.copy_(weight)

    def placed_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The parameter's state where it belongs, all zeros at first. One from a checkpoint is moved there when it is used first."""
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


def round_fairly(wide: Tensor, noise: Tensor, step: int) -> Tensor:
    """float32 -> bfloat16, up or down by chance, so that the mean over many steps is right (Gupta et al. 2015, section 3.1).

    To the nearest, a mean of squares would never fall: at beta2 = 0.999 a step takes away a thousandth, and neighbours in bfloat16
    are 1/128 to 1/256 apart. The chance follows from the bits of the gradient and the step, so the same gradient gives the same
    bits, wherever an element stands and however the tensor is cut.
    """
    chance = noise.view(torch.int32).to(torch.int64).bitwise_xor_(step * 0x9E3779B1 % 2**32).mul_(0x5851F42D4C957F2D)
    chance = (chance >> 40).bitwise_and_(0xFFFF).to(torch.int32)
    return ((wide.view(torch.int32) + chance) & -0x10000).view(torch.float32).to(torch.bfloat16)


def learning_rate(update: int, values: Optim) -> float:
    """The learning rate of update number `update`, from 1: a straight rise to its peak at `warmup_steps`, then the decay.

    linear, cosine  to 0 at update `decay_steps` + 1: the last of `decay_steps` updates still changes the weights
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
