"""Refuse updates whose result depends on more than the gradient of the step and the state, and
warn of updates that train nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.log import log
from lockstep.parallel.grad_norm import StepGradient
from lockstep.runtime.torch_private import collectives_of, version_of

if TYPE_CHECKING:
    from lockstep.training.replica_group import ReplicaGroup

HASHED_STEPS = 10  # after a step that may have changed no weight
LOST_UPDATE = (
    "step %d changed no trained weight, and its gradient is lost: "
    "call optimizer.step() once after every micro-batch loop. "
    "A step sums all micro-batches already; to accumulate more raise micro_batches"
)
ZERO_RATES = (
    "the learning rate of all parameter groups is 0 in steps %d and %d, which train nothing: "
    "has the schedule ended before the run? "
    "A scheduler keeps its length (T_max, total_iters) from the checkpoint"
)
OWN_COLLECTIVE = (
    "a collective of torch.distributed ran after the micro-batch loop of step %d: gradients "
    "and losses are those of all %d workers already, and a sum over workers would multiply them. "
    "What the loop collects has one micro-batch more in the first step of a start, and others "
    "after a failure: pass it on with session.per_micro_batch, or as an output of session.evaluate"
)


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
                "GradScaler.step updates with the gradient of a loss "
                "that was scaled before session.backward(loss), and recorded so",
                "backward(scaler.scale(loss)), then scaler.step(optimizer)",
                "give the loss without its scale, and the scaler: "
                "session.backward(loss, scaler=scaler)",
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


def refuse_uneven_skips(
    scaler: GradScaler | None, on_nonfinite: str, state: Mapping[str, Any]
) -> None:
    """UsageError where some shards might skip an update that is not finite, and others not."""
    if scaler is None and on_nonfinite == "ignore":
        raise UsageError(
            "a gradient that is not finite would be ignored by some shards only",
            "Session(on_nonfinite='ignore')",
            "pass the GradScaler: session.backward(loss, scaler=scaler)",
        )
    if scaler is not None and not any(scaler is value for value in state.values()):
        raise UsageError(
            "the GradScaler is not in session.state",
            "session.backward(loss, scaler=...), in shards",
            "add it: session.state(scaler=scaler)",
        )


class StepWatch:
    """Warns, once each, of a step that changes no trained weight, of two steps in a row with a
    learning rate of 0 (a warm-up may start at 0), and of a collective of the loop's own.

    It hashes the weights around the first step, and around the steps after one without an in-place
    change that torch has counted. Some optimizers change `p.data`, which torch does not count.
    """

    def __init__(self, replicas: ReplicaGroup, optimizers: Sequence[Optimizer]) -> None:
        self.replicas = replicas
        self.optimizers = optimizers
        self._warned: set[str] = set()
        self._has_compared = replicas.on_nonfinite == "ignore"  # a GradScaler skips updates
        self._steps_to_hash = 1
        self._before: tuple[float, list[int], int | None] | None = None  # rate, versions, digest
        self._step_without_rate: int | None = None
        self._collectives: int | None = None  # of the group, before those of the loop's own

    def begin(self) -> None:
        """Note the weights before a step."""
        if not self._has_compared:
            digest = self.replicas.replica.digest().read() if self._steps_to_hash else None
            self._before = highest_rate(self.optimizers), self._versions(), digest

    def end_micro_batches(self, step: int) -> None:
        self.expect_no_collectives()
        if ZERO_RATES in self._warned or highest_rate(self.optimizers):
            return
        if self._step_without_rate == step - 1:
            self._warn(ZERO_RATES, step, step + 1)
        self._step_without_rate = step

    def expect_no_collectives(self) -> None:
        """Take further collectives for the loop's own: after its micro-batches or an evaluation."""
        self._collectives = collectives_of(dist.group.WORLD)

    def check_collectives(self, step: int, workers: int) -> None:
        """Warn of collectives of the loop's own, at the end of a step or before an evaluation."""
        if workers > 1 and self._collectives not in (None, collectives_of(dist.group.WORLD)):
            self._warn(OWN_COLLECTIVE, step + 1, workers)
        self._collectives = None

    def end(self, step: int, workers: int) -> None:
        self.check_collectives(step, workers)
        if self._has_compared or self._before is None:
            return
        rate, versions, digest = self._before
        self._steps_to_hash = max(0, self._steps_to_hash - 1)
        if not rate or not highest_rate(self.optimizers) or versions != self._versions():
            return
        if digest is None:
            self._steps_to_hash = HASHED_STEPS
            return
        self._has_compared = True
        if digest == self.replicas.replica.digest().read():
            self._warn(LOST_UPDATE, step + 1)

    def _warn(self, text: str, *values: int) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(text, *values)

    def _versions(self) -> list[int]:
        return [version_of(p) for p in self.replicas.replica.parameters]


def highest_rate(optimizers: Sequence[Optimizer]) -> float:
    """Return the highest learning rate of all groups; 1.0 where an optimizer has none."""
    rates = [group.get("lr", 1.0) for optimizer in optimizers for group in optimizer.param_groups]
    return max((1.0 if rate is None else float(rate) for rate in rates), default=1.0)
