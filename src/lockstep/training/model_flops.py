"""Model FLOPs utilization (MFU) of any loop: the operations of a micro-batch, the peak of a device.

The operations are those of the matrix products, convolutions and attention in the first forward and
backward pass of a start, which the loop runs anyway: torch dispatches them here on their way to the
same kernels. Activations that the backward pass computes again do not count.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.log import log
from lockstep.record.step_timer import peak_flops
from lockstep.runtime.torch_private import (
    ATTENTION_OPS,
    TorchDispatchMode,
    compile_counters,
    is_compiled_in_place,
    is_compiled_wrapper,
)
from lockstep.training.profiler import measure_matmul_flops
from lockstep.units import join_names

WHERE = "Session(mfu=True)"
HINT = (
    "give their number, for each sample or token that backward counts: Session(mfu=6 * parameters)"
)
UNCOUNTED = re.compile(r"attention|attn|rnn|conv(?!ert)|_mm\b|trilinear|fft")  # without a formula


def formulas() -> dict[Any, Callable[..., int]]:
    """Return torch's formulas, with attention's backward pass as twice its forward pass: torch's
    own counts the scores that it computes again, and none on a CPU."""
    kernels = [operation.overloadpacket for operation in ATTENTION_OPS]
    forward = next(flop_registry[kernel] for kernel in kernels if kernel in flop_registry)

    def attention_backward(_: object, *inputs: Any, **named: Any) -> int:
        return 2 * int(forward(*inputs[:3], out_val=None))

    backward = [getattr(torch.ops.aten, f"{kernel.__name__}_backward") for kernel in kernels]
    known = {**flop_registry, **dict.fromkeys(kernels, forward)}
    return known | dict.fromkeys(backward, attention_backward)


class OperationCounter(TorchDispatchMode):
    """Context manager that counts the operations inside."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.formulas = formulas()
        self.flops = 0
        self.uncounted: set[str] = set()  # names of operations without a formula
        self._in_backward = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile would give up on what it meets here, for good

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count a backward pass: what it runs with gradients enabled is recomputed."""
        self._in_backward = True
        try:
            with self:
                yield
        finally:
            self._in_backward = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        output = func(*args, **named)
        if self._in_backward and torch.is_grad_enabled():
            return output
        formula = self.formulas.get(getattr(func, "overloadpacket", None))
        if formula:
            self.flops += int(formula(*args, **named, out_val=output))
        elif UNCOUNTED.search(str(func)):
            self.uncounted.add(str(func))
        return output


class ModelFlops:
    """The operations of a step, and with them its MFU.

    asked   Session(mfu=...): count them (True), or their number for each sample, or token that
            `backward` counts; False: no MFU
    leaves  micro-batches of a step
    """

    def __init__(
        self,
        asked: float | bool,
        leaves: int,
        module: nn.Module,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.leaves = leaves
        self.module = module
        self.device = device
        self.dtype = dtype  # of the products; None: that of the first forward pass
        self.peak = 0.0  # FLOP/s of this device; 0: not measured yet
        self.per_token = 0.0 if isinstance(asked, bool) else float(asked)
        self.per_step = 0.0  # where the micro-batches have no counts
        self._counter = OperationCounter() if asked is True else None

    def forward(self) -> AbstractContextManager[object]:
        """Context manager around a forward pass in the micro-batch loop."""
        if self.dtype is None:
            self.dtype = dtype_of_products(self.module, self.device)
        return self._counter or nullcontext()

    @contextmanager
    def backward(self, count: int | None) -> Iterator[None]:
        """Context manager around a backward pass. count: of the micro-batch, as `backward` gets it.
        UsageError, after the first one, when it has operations that are not counted."""
        if self._counter is None:
            yield
            return
        forward = self._counter.flops
        with self._counter.backward():
            yield
        graphs = "torch._dynamo" in sys.modules and compile_counters()["stats"]["unique_graphs"]
        refuse_uncounted(self._counter.uncounted | ({"compiled functions"} if graphs else set()))
        if not self._counter.flops:
            raise UsageError("the model has no operations that are counted", WHERE, HINT)
        if self._counter.flops == forward or count == 0:  # another worker was lost, or it is empty
            self._counter = OperationCounter()
            return
        counter, self._counter = self._counter, None
        if count is None:
            self.per_step = float(counter.flops * self.leaves)
        else:
            self.per_token = counter.flops / count

    def measure_peak(self) -> None:
        """Find the peak of the device, once there is something to compare with it."""
        if (self.per_step or self.per_token) and self.dtype and not self.peak:
            self.peak = peak_of(self.device, self.dtype)

    def mfu(self, values: Mapping[str, float], unit: str, devices: int) -> dict[str, float]:
        """Return {"mfu": share} of the step with these values of the step timer; {} for none.
        UsageError for a number of operations without a number of samples."""
        if not self.peak:
            return {}
        if unit == "steps" and not self.per_step:
            raise UsageError(
                "the number of samples of a step is not known",
                f"Session(mfu={self.per_token:g})",
                "take a session.loader, or give count to session.backward",
            )
        each = self.per_step / values[unit] if self.per_step else self.per_token
        return {"mfu": values[f"{unit}_per_second"] * each / (self.peak * devices)}


def dtype_of_products(module: nn.Module, device: torch.device) -> torch.dtype:
    """Return the dtype of the active autocast, else that of the parameters."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return next((p.dtype for p in module.parameters()), torch.float32)


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a GPU in PEAKS_TFLOPS; fp16 products are as fast as bf16 there."""
    if device.type != "cuda" or dtype == torch.float64:
        return None
    precision = "fp32" if dtype == torch.float32 else "bf16"
    return peak_flops(torch.cuda.get_device_name(device), precision)


def peak_of(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of a known device, else what its matrix products reach now."""
    if known := known_peak(device, dtype):
        return known
    measured = measure_matmul_flops(device, dtype)
    log.info(
        "the peak of this device is not known; its matrix products reach %.3g TFLOP/s now",
        measured / 1e12,
    )
    return measured


def refuse_counting(mfu: float | bool, layout: Layout, module: nn.Module) -> None:
    """UsageError where the operations of a worker are not those of its micro-batches."""
    if mfu is not True:
        return
    if layout.tensor * layout.pipeline > 1:
        raise UsageError(
            f"the operations of a part of a layer or model are not counted: {layout}", WHERE, HINT
        )
    modules = module.named_modules()
    compiled = {
        f"compiled {name or 'model'}"
        for name, part in modules
        if is_compiled_in_place(part) or is_compiled_wrapper(part)
    }
    refuse_uncounted(compiled)


def refuse_uncounted(names: set[str]) -> None:
    if names:
        listed = join_names(sorted(names))
        raise UsageError(f"the operations of these are not counted: {listed}", WHERE, HINT)
