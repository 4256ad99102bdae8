"""The device that this process computes on."""

import os

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


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has used: of the GPU that torch has allocated, or
    resident."""
    if device.type == "cuda":
        # max_memory_allocated flattens all statistics first, a third of a millisecond.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return int(stats["allocated_bytes"]["all"]["peak"]) if stats else 0
    return peak_resident_bytes()
