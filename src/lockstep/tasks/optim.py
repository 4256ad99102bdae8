"""The update of a recipe: optimizers, parameter groups, the learning rate schedule and the EMA.

Pure functions of the summed gradients and the step, so replicas with equal bits stay equal. AdamW,
SGD, Lion and the EMA are elementwise, so the bits do not depend on how tensors are sharded. Muon
and Adafactor update whole parameters in shards, too: see owner_update.py.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.rules import parse_group
from lockstep.config.schema import MemoryOptions, OptimOptions
from lockstep.errors import UsageError
from lockstep.parallel.parallelize import LocalModel
from lockstep.units import join_names

log = logging.getLogger("lockstep")

DEFAULT_MEMORY = MemoryOptions()
# Matrices that Muon leaves to AdamW (Jordan et al., 2024).
NOT_OF_A_LAYER = re.compile(r"embed|(^|\.)(output|lm_head|wte|wpe)\.")
NamedParameters = Iterable[tuple[str, nn.Parameter]]


def make_optimizers(
    model: nn.Module | LocalModel,
    values: OptimOptions,
    memory: MemoryOptions = DEFAULT_MEMORY,
    *,
    on_gpu: bool | None = None,
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the trained parameters, as `optim.kind` names them.

    on_gpu  whether a model on the meta device will be on a GPU; None: the model is where it is

    UsageError when a pattern of `optim.groups` matches no parameter.
    """
    named = trained_parameters(model)
    refuse_unused_patterns(model, named, values)
    if on_gpu is None:
        on_gpu = all(p.device.type == "cuda" for _, p in named)
    rate = values.learning_rate
    groups = parameter_groups(named, values)
    if values.kind == "adamw":
        return [adamw(named, values, memory, on_gpu=on_gpu)]
    if values.kind == "sgd":
        momentum = values.momentum
        return [torch.optim.SGD(groups, rate, momentum, fused=on_gpu, foreach=False)]
    if values.kind == "lion":
        return [Lion(groups, lr=rate, betas=(values.beta1, values.beta2))]
    if values.kind == "adafactor":
        return [torch.optim.Adafactor(groups, lr=rate, foreach=False)]
    matrices = {name: p for name, p in named if p.dim() == 2 and not NOT_OF_A_LAYER.search(name)}
    others = [(name, p) for name, p in named if name not in matrices]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        # With this adjustment an update of Muon is as large as one of AdamW, so both take the same
        # learning rate (Liu et al., 2025).
        groups = parameter_groups(matrices.items(), values)
        muon = torch.optim.Muon(
            groups, rate, momentum=values.momentum, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    if others:
        optimizers.append(adamw(others, values, on_gpu=on_gpu))
    return optimizers


def state_bytes(
    optimizers: Sequence[torch.optim.Optimizer], ema_decay: float = 0.0
) -> dict[nn.Parameter, float]:
    """Return the bytes of state that a step leaves per element of each parameter.

    Each optimizer steps with small parameters in place of the model's, which may have no memory; it
    keeps them.
    """
    samples: dict[nn.Parameter, nn.Parameter] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            small: dict[tuple[int, torch.dtype], nn.Parameter] = {}
            for p in group["params"]:
                kind = (p.dim(), p.dtype)
                if kind not in small:
                    small[kind] = small_parameter(p)
                samples[p] = small[kind]
            group["params"] = list(small.values())
        optimizer.step()
    if ema_decay:
        update_average(optimizers, ema_decay, 1)
    states = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    return {p: bytes_of(states.get(small, {})) / small.numel() for p, small in samples.items()}


def small_parameter(like: nn.Parameter) -> nn.Parameter:
    """Return a parameter with as many dimensions, of about 65,536 elements, and a gradient."""
    side = round(65_536 ** (1 / max(1, like.dim())))
    parameter = nn.Parameter(torch.zeros([side] * like.dim(), dtype=like.dtype))
    parameter.grad = torch.zeros_like(parameter)
    return parameter


def bytes_of(state: Mapping[str, Any]) -> int:
    return sum(v.nbytes for v in state.values() if isinstance(v, Tensor) and v.dim())


def trained_parameters(model: nn.Module | LocalModel) -> list[tuple[str, nn.Parameter]]:
    named = model.named_parameters() if isinstance(model, nn.Module) else model.local_params.items()
    return [(name, p) for name, p in named if p.requires_grad]


def refuse_unused_patterns(
    model: nn.Module | LocalModel, named: NamedParameters, values: OptimOptions
) -> None:
    names = [name for name, _ in named]
    unused = [
        text
        for text in values.groups
        if not any(fnmatchcase(name, parse_group(text)[0]) for name in names)
    ]
    # A stage has only some of the parameters.
    if unused and not (isinstance(model, LocalModel) and model.stage):
        raise UsageError(
            f"optim.groups matches no trained parameter: {', '.join(unused)}",
            "optim.groups",
            f"names are {join_names(names)}",
        )


def parameter_groups(named: NamedParameters, values: OptimOptions) -> list[dict[str, Any]]:
    """Return parameter groups: matrices, parameters without weight decay, and those of
    `optim.groups`.

    `lr_factor` of a group is its share of the learning rate. The first pattern that matches counts.
    """
    patterns = [parse_group(text) for text in values.groups]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {(1.0, 1.0): [], (1.0, 0.0): []}
    for name, p in named:
        own = (1.0, 1.0 if p.dim() >= 2 else 0.0)
        factors = next(
            ((rate, decay) for pattern, rate, decay in patterns if fnmatchcase(name, pattern)), own
        )
        groups.setdefault(factors, []).append(p)
    return [
        {"params": parameters, "weight_decay": values.weight_decay * decay, "lr_factor": rate}
        for (rate, decay), parameters in groups.items()
        if parameters
    ]


def adamw(
    named: NamedParameters,
    values: OptimOptions,
    memory: MemoryOptions = DEFAULT_MEMORY,
    *,
    on_gpu: bool = False,
) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters, with weight decay on matrices only.

    On a GPU always fused: elementwise there, and a third of the memory traffic of foreach. On a CPU
    one parameter after another, which stays in the cache. `LeanAdamW` for a lower-precision or
    offloaded state.
    """
    groups = parameter_groups(named, values)
    rate, betas = values.learning_rate, (values.beta1, values.beta2)
    if memory.saves_optimizer:
        state = torch.bfloat16 if memory.optimizer_state == "bf16" else torch.float32
        offload = memory.offload == "optimizer"
        return LeanAdamW(
            groups, lr=rate, betas=betas, eps=values.epsilon, state_dtype=state, offload=offload
        )
    if values.fused and not on_gpu:
        log.info(
            "fused AdamW: faster with whole replicas; "
            "in shards each parameter is updated by its owner"
        )
    fused = values.fused or on_gpu
    return torch.optim.AdamW(groups, rate, betas, values.epsilon, fused=fused, foreach=False)


class ElementwiseOptimizer(torch.optim.Optimizer):
    """An optimizer that updates one parameter after another, each element by itself."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters. A closure is not called: the loss is evaluated once."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def update(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(ElementwiseOptimizer):
    """Algorithm 2 of Chen et al., 2023: the sign of a mean of gradients. State per parameter:
    exp_avg."""

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean = state["exp_avg"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(mean.lerp(grad, 1 - beta1).sign_(), alpha=-group["lr"])
        mean.lerp_(grad, 1 - beta2)


class LeanAdamW(ElementwiseOptimizer):
    """AdamW with less memory: parameters are updated one after another, widened to float32 for the
    update only.

    state_dtype  dtype of exp_avg and exp_avg_sq; bfloat16 is rounded by `stochastic_round`
    offload      keep state and master weights in CPU memory and update there: gradients are copied
                 to the CPU, weights back

    A parameter that is not float32 gets a float32 master weight, which is trained; the parameter is
    its rounding. State per parameter: step, exp_avg, exp_avg_sq, and master. With float32
    everywhere the bits are those of torch.optim.AdamW.
    """

    adam_moments = True  # its state is that of AdamW

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
        self.state_dtype = state_dtype
        self.offload = offload
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

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
                state[name] = torch.zeros_like(
                    parameter, dtype=self.state_dtype, device=device, requires_grad=False
                )
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

    NaN remains NaN: the addition would carry 0x7fffffff into the sign.

    Rounding to nearest would never let a mean of squares fall: at beta2 = 0.999 a step removes a
    thousandth, and neighbors in bfloat16 are 1/128 to 1/256 apart.
    """
    chance = (
        noise.view(torch.int32)
        .to(torch.int64)
        .bitwise_xor_(step * 0x9E3779B1 % 2**32)
        .mul_(0x5851F42D4C957F2D)
    )
    chance = (chance >> 40).bitwise_and_(0xFFFF).to(torch.int32)
    rounded = ((wide.view(torch.int32) + chance) & -0x10000).view(torch.float32)
    return torch.where(wide.isnan(), wide, rounded).to(torch.bfloat16)


def learning_rate(update: int, values: OptimOptions) -> float:
    """Return the learning rate of update number `update`, from 1: linear warmup to the peak at
    `warmup_steps`, then the decay, never below `floor` times the peak.

    linear, cosine  to the floor at update `decay_steps` + 1: with a floor of 0 the last of
                    `decay_steps` updates still changes the weights
    wsd             the peak, then linear in the last `wsd_decay` of `decay_steps` (Hu et al., 2024)
    inverse_sqrt    peak * sqrt(warmup_steps / update) (Vaswani et al., 2017)
    """
    peak = values.learning_rate
    warmup = values.warmup_steps
    floor = values.floor
    if update < warmup:
        return peak * update / warmup
    if values.schedule == "constant":
        return peak
    if values.schedule == "inverse_sqrt":
        return peak * max(floor, math.sqrt(max(warmup, 1) / max(update, 1)))
    length: float = values.decay_steps + 1 - warmup
    if values.schedule == "wsd":
        length = min(length, values.decay_steps * values.wsd_decay)
    left = min(1.0, max(0.0, (values.decay_steps + 1 - update) / max(1, length)))
    if values.schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    return peak * (floor + (1 - floor) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)


@torch.no_grad()
def update_average(optimizers: Sequence[torch.optim.Optimizer], decay: float, step: int) -> None:
    """Average the weights after `step` updates: `ema` in the state of each parameter, in float32.

    The decay rises to `decay` as (1 + step) / (10 + step), so that the average forgets the initial
    weights of short runs. Master weights of LeanAdamW are averaged in place of their rounding.
    """
    share = 1 - min(decay, (1 + step) / (10 + step))
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            state = optimizer.state[parameter]
            weight = state.get("master", parameter).detach()
            if "ema" in state:
                state["ema"].lerp_(weight.float(), share)
            else:
                state["ema"] = weight.to(torch.float32, copy=True)


@contextmanager
def averaged_weights(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Give the parameters their averages meanwhile, if the run has them. Memory: the weights
    once."""
    averages = [
        (p, state["ema"])
        for optimizer in optimizers
        for p, state in optimizer.state.items()
        if "ema" in state
    ]
    own = [p.detach().clone() for p, _ in averages]
    try:
        for p, average in averages:
            p.detach().copy_(average)
        yield
    finally:
        for (p, _), weight in zip(averages, own, strict=True):
            p.detach().copy_(weight)
