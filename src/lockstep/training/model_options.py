"""The model that Session.prepare returns, and how it runs: precision, compiled blocks, checkpointed
activations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.log import log
from lockstep.parallel.activation_checkpoint import Mode, checkpoint_activations
from lockstep.parallel.deferred_init import move_to
from lockstep.parallel.plans import Patterns, find_units
from lockstep.runtime.numerics import choose_precision
from lockstep.runtime.tensor_bytes import tensors_of
from lockstep.runtime.torch_private import set_recompile_limit
from lockstep.training.loader import MeanSizes, Sizes, map_tensors
from lockstep.units import join_names

if TYPE_CHECKING:
    from lockstep.training.initial_values import InitialValues

Precision = Literal["fp32", "bf16", "auto"]
SHAPES_PER_BLOCK = 512  # that torch.compile specializes for


def resolve_precision(precision: Precision | None, device: torch.device) -> str | None:
    """Return "fp32" or "bf16"; None where the loop decides. UsageError for other words."""
    if precision not in (None, "fp32", "bf16", "auto"):
        raise UsageError(
            f"precision={precision!r}",
            "session.prepare(precision=...)",
            'give "fp32", "bf16" or "auto"; for fp16 use torch.autocast and a GradScaler',
        )
    if precision != "auto":
        return precision
    chosen, reason = choose_precision(device)
    log.info("precision %s: %s", chosen, reason)
    return chosen


def move_model(model: nn.Module, device: torch.device, init: InitialValues | None) -> nn.Module:
    """Move a whole model to the device, from the meta device if it has `init`, in place."""
    if init is None:
        return move_to(model, device)
    from lockstep.training.initial_values import allocate

    return allocate(model, device, init)


def autocast(device: torch.device, precision: str | None) -> AbstractContextManager[None]:
    """Context manager in which a forward pass runs; without a precision the loop's own holds."""
    if precision is None:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def outside_of_autocast(
    loss: Callable[[Any, Any], Tensor], device: torch.device, precision: str | None
) -> Callable[[Any, Any], Tensor]:
    """Return a loss as whole replicas compute it: of the output in float32, outside of autocast."""
    if precision is None:
        return loss

    def loss_of(output: Any, target: Any) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            return loss(in_float32(output), target)

    return loss_of


def in_float32(value: Any) -> Any:
    """Return the output of a forward pass in bf16 with tensors in float32, for a loss outside of
    autocast; containers keep their classes."""
    return map_tensors(value, lambda t: t.float() if t.dtype == torch.bfloat16 else t)


class PreparedModel(nn.Module):
    """A model whose forward pass runs through the ReplicaGroup inside micro-batches. Elsewhere
    (evaluation, no_grad) it is the plain model.

    module            the model that was passed to Session.prepare; its attributes are available
                      here, too
    replicas_in_loop  returns the ReplicaGroup inside a micro-batch; None elsewhere
    precision         of forward passes, whose output is float32: "fp32", "bf16"; None: the caller's
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        replicas_in_loop: Callable[[], Callable[..., Any] | None],
        device: torch.device,
        precision: str | None = None,
    ) -> None:
        super().__init__()
        self.module, self._replicas_in_loop = module, replicas_in_loop
        self._device = device
        self.precision = precision
        self._may_be_bypassed = precision == "bf16"  # until the loop calls this model
        self._sizes, self._inputs = MeanSizes(), Sizes((), 0)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if replicas := self._replicas_in_loop():
            self._may_be_bypassed = False
            self._inputs = Sizes(
                tuple(tuple(tensor.shape) for tensor in tensors_of((inputs, named))), 0
            )
        with autocast(self._device, self.precision):
            output = (replicas or self.module)(*inputs, **named)
        return in_float32(output) if self.precision == "bf16" else output

    def warn_if_bypassed(self) -> None:
        """Warn, once, that the loop has a loss without a call of this model."""
        if self._may_be_bypassed:
            self._may_be_bypassed = False
            log.warning(
                'precision="bf16" has no effect: the loop calls model.module or a part of the '
                "model; call the model that session.prepare returns"
            )

    def samples_of_mean(self) -> int | None:
        """Return the number of samples in the newest inputs, if all tensors have as many rows."""
        inputs, self._inputs = self._inputs, Sizes((), 0)
        return self._sizes.samples(inputs) if inputs.shapes else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, index: Any) -> Any:
        """Return a part of an nn.Sequential or nn.ModuleList, as the plain model does."""
        model: Any = self.module
        return model[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the plain model, for an EMA."""
        return deepcopy(self.module, memo)


def prepare_blocks(
    model: nn.Module,
    units: Patterns,
    *,
    compile: bool,
    activation_checkpoint: Mode,
    counted: Collection[str] = (),
) -> None:
    """Checkpoint the activations of a model's blocks and compile them, in place. Each is compiled
    for itself, as in every layout: a graph of the whole model may have other bits. UsageError
    where the model has no blocks, or a block that cannot be computed twice.

    counted  patterns of the buffers that forward passes change, Session(buffers=...)
    """
    if not compile and activation_checkpoint == "none":
        return
    where = "session.prepare(compile=..., activation_checkpoint=...)"
    if activation_checkpoint not in ("none", "selective", "full"):
        raise UsageError(
            f"activation_checkpoint={activation_checkpoint!r}",
            where,
            'give "none", "selective" or "full"',
        )
    names = find_units(model, units)
    if not names:
        raise UsageError(
            f"{type(model).__name__} has no repeated blocks",
            where,
            'name them: session.prepare(units="layers.*")',
        )
    blocks = [model.get_submodule(name) for name in names]
    if activation_checkpoint != "none":
        refuse_changing_blocks(dict(zip(names, blocks, strict=True)), counted, where)
        checkpoint_activations(blocks, activation_checkpoint)
    if compile:
        set_recompile_limit(SHAPES_PER_BLOCK * len(blocks))
        for block in blocks:
            block.compile(dynamic=False)


def refuse_changing_blocks(
    blocks: Mapping[str, nn.Module], counted: Collection[str], where: str
) -> None:
    """UsageError for blocks that cannot be computed twice: with statistics that each forward pass
    updates, or with a forward() of the instance, which would be lost."""
    hint = "name other blocks: session.prepare(units=...)"
    changing = [
        name
        for name, block in blocks.items()
        if any(getattr(module, "track_running_stats", False) for module in block.modules())
        or any(
            fnmatchcase(f"{name}.{buffer}", pattern)
            for buffer, _ in block.named_buffers()
            for pattern in counted
        )
    ]
    if changing:
        raise UsageError(
            f"blocks with running statistics would update them twice: {join_names(changing)}",
            where,
            hint,
        )
    if patched := [name for name, block in blocks.items() if "forward" in vars(block)]:
        raise UsageError(
            f"blocks whose forward() was replaced cannot be checkpointed: {join_names(patched)}",
            where,
            hint,
        )
