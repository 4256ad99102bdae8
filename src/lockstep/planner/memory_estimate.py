"""Estimate the memory that a worker needs for a model's state, and find a layout that fits.

A worker holds weights, gradients and the state of its optimizers, and while it saves a copy of all
but the gradients. Sharded state also has some units whole. Activations depend on the micro-batch,
so a layout counts as fitting if it takes a third.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import nn

from lockstep.config.schema import MemoryOptions, OptimOptions
from lockstep.errors import ConfigError, OutOfMemoryError
from lockstep.files import write_atomic
from lockstep.layout import Layout, LayoutLimits, layout_flags
from lockstep.parallel.plans import plan_of
from lockstep.record.step_timer import peak_resident_bytes
from lockstep.runtime.exit_report import error_summary, is_out_of_memory
from lockstep.runtime.memory import process_memory_limit
from lockstep.runtime.torch_private import dump_memory_snapshot
from lockstep.tasks.optim import make_optimizers, state_bytes
from lockstep.units import format_bytes, format_count

log = logging.getLogger("lockstep")

WEIGHT_BYTES = 4  # of a gathered unit, per parameter
# Of the largest size: one computes, one is prefetched; gradients of three, received rows of one.
GATHERED_UNITS = 6
# Times the state: room for activations, and stacks and arenas of about 20 threads where address
# space is limited.
HEADROOM_FACTOR = 3
MAX_WORKERS = 64  # of a replica that is proposed
ADDRESS_SPACE, RESIDENT = 0, 1  # fields of /proc/self/statm


@dataclass(frozen=True)
class StateSize:
    """Bytes of a model's state; parameters in all and in its largest unit."""

    parameters: int
    unit: int
    weights: int
    gradients: int
    optimizer: int

    @classmethod
    def of(
        cls, model: nn.Module, optim: OptimOptions, memory: MemoryOptions, device: torch.device
    ) -> StateSize:
        """Count a new model on the meta device, which gets the dtype of `memory.weights`. Offloaded
        state takes nothing on a GPU."""
        if memory.weights == "bf16":
            model.bfloat16()
        parameters = list(model.parameters())
        whole = sum(p.numel() for p in parameters)
        modules = map(model.get_submodule, plan_of(model).units)
        units = [sum(p.numel() for p in module.parameters()) for module in modules]
        trained = [p for p in parameters if p.requires_grad]
        each = dict[nn.Parameter, float]()
        if trained and not (memory.offload == "optimizer" and device.type == "cuda"):
            same_state = replace(optim, fused=False)  # the run itself logs what that means
            optimizers = make_optimizers(model, same_state, memory, on_gpu=False)
            each = state_bytes(optimizers, optim.ema_decay)
        return cls(
            whole,
            max([*units, whole - sum(units)]),
            weights=sum(p.nbytes for p in parameters),
            gradients=sum(p.nbytes for p in trained),
            optimizer=int(sum(each_bytes * p.numel() for p, each_bytes in each.items())),
        )

    @property
    def training(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def parts(self, layout: Layout) -> dict[str, int]:
        """Return the bytes of one worker while it saves, by their use."""
        whole = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "copy while saving": self.gradients + self.optimizer,  # of what is trained
        }
        units = GATHERED_UNITS * WEIGHT_BYTES * self.unit // (layout.tensor * layout.pipeline)
        parts = {name: each // layout.workers_per_replica for name, each in whole.items()}
        return parts | {"units gathered at once": units if layout.workers_per_replica > 1 else 0}

    def bytes(self, layout: Layout) -> int:
        return sum(self.parts(layout).values())


def memory_limit(device: torch.device) -> tuple[int, str]:
    """Return (bytes, source) of the memory limit of this process."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.total_memory, properties.name
    return process_memory_limit()


def refuse_too_large(size: StateSize, layout: Layout, device: torch.device) -> None:
    """ConfigError: a worker's weights, gradients and optimizer state exceed its memory limit."""
    need = size.training // layout.workers_per_replica
    limit, source = memory_limit(device)
    if need > limit:
        raise ConfigError(
            f"a model of at least {format_count(size.parameters)} "
            f"parameters takes {format_bytes(need)} per worker, without activations",
            "[model], llama.size, [memory] and [layout] of the run; "
            f"the limit is {format_bytes(limit)}, from {source}",
            "choose a smaller model, "
            f"or shard it over at least {math.ceil(size.training / limit)} workers: layout.shard",
        )


def used_bytes(device: torch.device, field: int = ADDRESS_SPACE) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[field]) * os.sysconf("SC_PAGE_SIZE")


def smallest_fitting_layout(
    size: StateSize, free_bytes: int, bounds: LayoutLimits, more_than: int = 0
) -> Layout | None:
    """Return the smallest replica of more than `more_than` workers that fits, sharded first.

    None: no replica of up to MAX_WORKERS workers fits.
    """
    sizes = [1 << power for power in range(MAX_WORKERS.bit_length())]
    for workers, tensor in product(sizes, repeat=2):
        layout = Layout(1, workers // tensor, tensor)
        if not (more_than < workers and tensor <= workers) or bounds.problem_with(layout):
            continue
        if HEADROOM_FACTOR * size.bytes(layout) <= free_bytes:
            return layout
    return None


def write_memory_report(
    path: Path, size: StateSize, layout: Layout, device: torch.device, error: BaseException
) -> str:
    """Write to `path` what this process uses and what the estimate expects, and on a GPU torch's
    snapshot beside it; return a sentence that names the files, "" if they cannot be written."""
    is_cuda = device.type == "cuda"
    limit, source = memory_limit(device)
    rows = {f"limit, from {source}": limit}
    if is_cuda:
        rows["allocated"] = used_bytes(device)
        rows["peak allocated"] = torch.cuda.max_memory_allocated(device)
        rows["reserved"] = torch.cuda.memory_reserved(device)
    else:
        rows["address space"] = used_bytes(device)
        rows["resident"] = used_bytes(device, RESIDENT)
        rows["peak resident"] = peak_resident_bytes()
    rows |= {f"estimated: {name}": number for name, number in size.parts(layout).items()}
    lines = [error_summary(error), f"{format_count(size.parameters)} parameters, {layout}"]
    lines += [f"{format_bytes(number):>10}  {name}" for name, number in rows.items()]
    snapshot = path.with_suffix(".pickle")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "\n".join([*lines, ""]))
        if is_cuda:
            dump_memory_snapshot(str(snapshot))
    except (OSError, MemoryError, RuntimeError) as problem:  # nothing may hide the error
        log.warning("%s was not written: %s", path, problem)
        return ""
    more = f" and {snapshot}, for https://docs.pytorch.org/memory_viz" if is_cuda else ""
    return f"; memory in use: {path}{more}"


@contextmanager
def explain_out_of_memory(
    size: StateSize,
    layout: Layout,
    bounds: LayoutLimits,
    device: torch.device,
    report: Callable[[], Path] | None = None,
) -> Iterator[None]:
    """Turn out-of-memory errors into an OutOfMemoryError that names a larger layout that fits.

    report  returns the file to write what uses the memory to; None: no file
    """
    before = used_bytes(device)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        written = write_memory_report(report(), size, layout, device, error) if report else ""
        limit, source = memory_limit(device)
        need = size.bytes(layout)
        fit = smallest_fitting_layout(size, limit - before, bounds, layout.workers_per_replica)
        hint = "give it more memory, or choose a smaller model"
        if fit:
            hint = f"try {layout_flags(fit)}: {format_bytes(size.bytes(fit))} per worker"
        raise OutOfMemoryError(
            f"out of memory: the state of {format_count(size.parameters)} "
            f"parameters takes {format_bytes(need)} per worker with {layout}",
            f"the limit is {format_bytes(limit)}, from {source}; "
            f"{format_bytes(before)} were in use before the model was built{written}",
            f"{hint}; smaller micro-batches (batch.tokens) take less for activations",
        ) from error
