"""The device that this process computes on."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.record.step_timer import peak_resident_bytes
from lockstep.runtime.environment import RankInfo, choose_device


def select_device(info: RankInfo | None) -> tuple[torch.device, str]:
    """Return (device of this worker, reason). A GPU becomes the current device."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name, why = choose_device(os.environ, info, gpus)
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device, why


def measure_memory(device: torch.device) -> dict[str, int]:
    """Return metrics: the most memory that this process has used, of the GPU that torch has
    allocated or resident; and how often an allocation on the GPU had to free the cache first."""
    if device.type != "cuda":
        return {"memory_bytes": peak_resident_bytes()}
    # max_memory_allocated flattens all statistics first, a third of a millisecond.
    return memory_metrics(torch.cuda.memory_stats_as_nested_dict(device))


def memory_metrics(stats: Mapping[str, Any]) -> dict[str, int]:
    """Return `measure_memory` of the statistics of a GPU. No retries are no metric."""
    if not stats:
        return {"memory_bytes": 0}
    metrics = {"memory_bytes": int(stats["allocated_bytes"]["all"]["peak"])}
    if retries := int(stats["num_alloc_retries"]):
        metrics["allocator_retries"] = retries
    return metrics
