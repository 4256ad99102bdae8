"""Refuse updates whose result depends on more than the gradient of the step and the state."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.parallel.grad_norm import StepGradient


def refuse_closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """UsageError for `optimizer.step(closure)`, given the arguments of a hook before the step."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None:
        raise UsageError(
            f"{type(optimizer).__name__}.step was called with a closure",
            "it would compute a loss and a gradient again, of one worker alone",
            "compute them in the micro-batch loop, and call step() after it",
        )


class UpdateChecks:
    """Refuses updates of `optimizers` that would differ between workers.

    gradient  of the newest committed step
    scaler    that the newest backward pass has received
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.gradient = StepGradient((), None, 1, in_slices=False)
        self.scaler: GradScaler | None = None
        self._hooks = [o.register_step_pre_hook(self._before_update) for o in optimizers]

    def set_scaler(self, scaler: GradScaler | None) -> None:
        self.scaler = scaler

    def set_gradient(self, gradient: StepGradient) -> None:
        self.gradient = gradient

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _before_update(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """UsageError also for another GradScaler than the one that backward has received: the loss
        that it scaled would be recorded with its scale."""
        refuse_closure(optimizer, args, kwargs)
        self.gradient.refuse_noise()
        scaler = updating_scaler()
        if scaler is not None and scaler.is_enabled() and scaler is not self.scaler:
            raise UsageError(
                "GradScaler.step updates with the gradient of a loss that was scaled before session.backward(loss), and recorded so",
                "backward(scaler.scale(loss)), then scaler.step(optimizer)",
                "give the loss without its scale, and the scaler: session.backward(loss, scaler=scaler)",
            )


def updating_scaler() -> GradScaler | None:
    """Return the GradScaler whose `step` is running. Only the stack tells: it calls
    `optimizer.step()` as a loop does. `f_locals` of other frames would keep their tensors alive."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            scaler: GradScaler = frame.f_locals["self"]
            return scaler
        frame = frame.f_back
    return None


def names_by_memory(modules: Mapping[str, nn.Module]) -> set[tuple[str, ...]]:
    """Return the names of parameters that are different tensors on the same memory.

    modules  by the prefix of their names
    """
    parameters: dict[int, tuple[str, nn.Parameter]] = {}  # by id: a tied parameter is one tensor
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            parameters.setdefault(id(parameter), (prefix + name, parameter))
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.values():
        if parameter.numel() and not parameter.is_meta:
            names.setdefault(parameter.data_ptr(), []).append(name)
    return {tuple(together) for together in names.values() if len(together) > 1}


def refuse_new_memory(
    before: set[tuple[str, ...]], modules: Mapping[str, nn.Module], step: int
) -> None:
    """UsageError: other parameters share memory than before the loop."""
    now = names_by_memory(modules)
    if changed := sorted(now ^ before):
        names = " and ".join(changed[0])
        what = f"{names} share memory after step {step}, and did not at the start"
        if changed[0] in before:
            what = f"{names} shared memory at the start, and do not after step {step}"
        raise UsageError(
            what,
            "after a resume, and in a worker that joins, their memory would be that of the start",
            "copy the values: target.data.copy_(source.data), not target.data = source.data",
        )
