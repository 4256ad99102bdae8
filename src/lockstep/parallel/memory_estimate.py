"""What a worker needs of memory for a model's state, what it may have, and which layout fits.

Of each parameter a worker holds the weight, its gradient and AdamW's two means (16 bytes in float32), and while it saves a copy of all but
the gradient (12 more). Where the state is cut, some units are whole for a while: gathered ones, and gradients on their way. Activations
come on top and depend on the micro-batch, and an allocator leaves gaps: so what is said to fit leaves half free.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lockstep.config.schema import Memory
from lockstep.errors import ConfigError, OutOfMemoryError
from lockstep.layout import Bounds, Layout, flags
from lockstep.parallel.plans import plan_of
from lockstep.runtime.exit_report import is_out_of_memory
from lockstep.units import show_bytes, show_count

TRAINED, SAVED, WEIGHT = 16, 12, 4  # bytes of a parameter
WHOLE = 6  # times the largest unit: one computes, one is ahead; gradients of three, and rows that come in for one
SPARE = 3  # times what the state takes: activations, and the stacks and arenas of about 20 threads where addresses are limited
CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Size:
    """Parameters of a model, and of its largest unit."""

    parameters: int
    unit: int

    @classmethod
    def of(cls, model: nn.Module) -> Size:
        """Of a model, on the meta device too."""
        whole = sum(one.numel() for one in model.parameters())
        units = [sum(one.numel() for one in model.get_submodule(name).parameters()) for name in plan_of(model).units]
        return cls(whole, max([*units, whole - sum(units)]))

    def bytes(self, layout: Layout) -> int:
        """What one worker holds, while it saves."""
        units = WHOLE * WEIGHT * self.unit // (layout.tensor * layout.pipeline) if layout.unit > 1 else 0
        return (TRAINED + SAVED) * self.parameters // layout.unit + units


def limit_bytes(device: torch.device) -> tuple[int, str]:
    """(what this process may have, who says so)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, torch.cuda.get_device_name(device)
    found = [(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine")]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        found.append((soft, "RLIMIT_AS (ulimit -v)"))
    if CGROUP.exists() and (text := CGROUP.read_text().strip()).isdecimal():
        found.append((int(text), "its control group (memory.max)"))
    return min(found)


def refuse_too_large(parameters: int, frozen: bool, memory: Memory, layout: Layout, device: torch.device) -> None:
    """ConfigError when a worker's share of the weights, gradients and optimizer state alone is more than it may have.

    parameters  of the model, at least
    frozen      only adapters are trained
    """
    weight, mean = (2 if one == "bf16" else 4 for one in (memory.weights, memory.optimizer_state))
    state = 2 * mean + (4 if weight == 2 else 0)  # both means, and the masters
    each = weight if frozen else 2 * weight + (0 if memory.offload == "optimizer" and device.type == "cuda" else state)
    need, (limit, source) = each * parameters // layout.unit, limit_bytes(device)
    if need > limit:
        raise ConfigError(
            f"a model of at least {show_count(parameters)} parameters takes {show_bytes(need)} a worker, without activations",
            f"[model], llama.shape, [memory] and [layout] of the run; {show_bytes(limit)} are allowed by {source}",
            f"take a smaller model, or share it between {-(-each * parameters // limit)} workers or more: layout.shard",
        )


def taken_bytes(device: torch.device) -> int:
    """What this process has now, as its limit counts it: addresses on a CPU, memory on a GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def fitting(size: Size, free_bytes: int, bounds: Bounds, most: int = 64) -> Layout | None:
    """The smallest replica whose workers have room, cut by shards first; None when there is none of up to `most` workers."""
    sizes = [1 << power for power in range(most.bit_length())]
    replicas = [Layout(1, shard, tensor) for tensor in sizes for shard in sizes if shard * tensor <= most]
    for layout in sorted(replicas, key=lambda one: (one.unit, one.tensor)):
        if not bounds.why_not(layout) and SPARE * size.bytes(layout) <= free_bytes:
            return layout
    return None


@contextmanager
def told_what_fits(model: nn.Module, layout: Layout, bounds: Bounds, device: torch.device) -> Iterator[None]:
    """Lack of memory inside becomes an OutOfMemoryError, which says which layout would fit.

    model  on the meta device is enough: its parameters are counted
    """
    size, before = Size.of(model), taken_bytes(device)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        limit, source = limit_bytes(device)
        need = size.bytes(layout)
        fit = fitting(size, limit - before, bounds)
        hint = f"try {flags(fit)}: {show_bytes(size.bytes(fit))} a worker" if fit else "take more memory, or a smaller model"
        raise OutOfMemoryError(
            f"no memory left: the state of {show_count(size.parameters)} parameters takes {show_bytes(need)} a worker with {layout}",
            f"{show_bytes(limit)} are allowed by {source}, {show_bytes(before)} were taken before the model was made",
            f"{hint}; smaller micro-batches (batch.tokens) need less for activations",
        ) from error
