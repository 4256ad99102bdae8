"""What decides the bits besides the run: the versions, the processor, the threads. Compared between processes and at every resume."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Literal

import numpy as np
import torch

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # x86 with tiles, x86 with vectors, Arm


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of `device`, NumPy's and Python's.

    torch draws what it would draw after torch.manual_seed(seed), which costs 20 times as much: it formats the stack for every device type.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def global_generators() -> tuple[int, bytes, int]:
    """The seed of torch's generator, and the states of NumPy's and Python's."""
    return torch.initial_seed(), np.random.get_state(legacy=False)["state"]["key"].tobytes(), hash(random.getstate())


AT_IMPORT = global_generators()


def seed_unseeded_generators() -> None:
    """Seed the global generators that the user has not: their unseeded draws are the same on all workers and at every start."""
    torch_too, numpy_too, python_too = (now == before for now, before in zip(global_generators(), AT_IMPORT, strict=True))
    if torch_too:
        torch.manual_seed(0)
    if numpy_too:
        np.random.seed(0)
    if python_too:
        random.seed(0)


def choose_precision(device: torch.device, cpu_flags: str | None = None) -> tuple[Literal["bf16", "fp32"], str]:
    """bf16 where the device has units for it, else fp32, and why.

    cpu_flags  the processor's flags as Linux lists them; None: those of this machine
    Measured a core, 2048 x 512 x 2048: without such units (AVX-512, 2.5 GHz) bf16 at 25 GFLOP/s and fp32 at 119 (bench/products.py);
    with tiles (AMX) 700 to 1,080 against 30 to 83.
    """
    if device.type == "cuda":
        good = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "this GPU has bf16 units") if good else ("fp32", "this GPU has no bf16 units")
    words = (cpu_flags if cpu_flags is not None else Path("/proc/cpuinfo").read_text()).split()
    found = next((flag for flag in BF16_FLAGS if flag in words), None)
    if found:
        return "bf16", f"this processor has bf16 units ({found})"
    return "fp32", "this processor has no bf16 units, and computes bf16 products more slowly than fp32 ones"


def fingerprint(device: torch.device) -> dict[str, str]:
    """The parts of this process's surroundings that change bits, as text."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "any",
        "gpu": gpu,
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }


def make_deterministic(device: torch.device) -> str:
    """Choose kernels that give the same bits each time, and say what that took. On a CPU with a fixed number of threads they all do."""
    if device.type != "cuda":
        return f"{torch.get_num_threads()} thread(s) a worker: the number of threads changes bits, so it is a value of the run"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    return "deterministic CUDA kernels where torch has them (CUBLAS_WORKSPACE_CONFIG=:4096:8)"


def changed(begun: dict[str, str], now: dict[str, str]) -> list[str]:
    """One sentence for each part that is not as it was."""
    return [f"{key} was {begun[key]}, is {now[key]}" for key in now if key in begun and begun[key] != now[key]]
