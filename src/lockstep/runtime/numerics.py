"""What decides the bits besides the run: the versions, the processor, the threads. Compared between processes and at every resume."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from lockstep.runtime.tensor_bytes import bytes_of

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # x86 with tiles, x86 with vectors, Arm
# Variables by which oneDNN, MKL, ATen and cuBLAS choose other kernels.
KERNEL_SETTINGS = (
    "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "ATEN_CPU_CAPABILITY", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip


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


AT_IMPORT = global_generators()  # a user who seeds does so after importing lockstep (docs/loop.md)


def seed_unseeded_generators() -> None:
    """Seed the global generators that the user has not: their unseeded draws are the same on all workers and at every start."""
    seeds: tuple[Callable[[int], object], ...] = (torch.manual_seed, np.random.seed, random.seed)
    for seed, now, before in zip(seeds, global_generators(), AT_IMPORT, strict=True):
        if now == before:
            seed(0)


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
    """Return what decides the bits of this process as text: versions, settings, results of fixed computations.

    Names do not show which kernels the libraries choose, so the results of `PROBES` are compared too.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": str(threads or "any"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **{name: os.environ.get(name, "not set") for name in KERNEL_SETTINGS},
        **probe_results(str(device), threads),
    }


@functools.cache
def probe_results(device: str, threads: int) -> dict[str, str]:
    """Return {"result of NAME": first 12 hex digits of the sha256 of its bytes} for each of PROBES, computed once for a process.

    Cost: 15 to 30 ms on one CPU core. No generator is used, and the mode of the caller (gradients, autocast) does not matter.
    """
    with torch.no_grad(), torch.autocast(torch.device(device).type, enabled=False):
        return {f"result of {name}": sha256_of(probe(torch.device(device))) for name, probe in PROBES.items()}


def pattern(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Fixed float32 numbers between -1 and 1, from integer arithmetic that has the same bits everywhere."""
    numbers = torch.arange(1, math.prod(shape) + 1, dtype=torch.int64, device="cpu") * 2_654_435_761 % 65_521
    return (numbers.float() / 32_768 - 1).reshape(shape).to(device)


def products(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Matrix products: one block, many blocks with a remainder, a transposed operand, a vector, a batch."""
    left, right = pattern((160, 520), device).to(dtype), pattern((520, 200), device).to(dtype)
    small, batch = pattern((8, 24), device).to(dtype), pattern((4, 33, 48), device).to(dtype)
    return [small @ small.T, left @ right, left.T @ left, left @ right[:, 0], batch @ batch.transpose(1, 2)]


def convolutions(device: torch.device) -> list[Tensor]:
    """A convolution and the gradient of its weights, in float32 and bfloat16."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        image, kernel = pattern((2, 8, 17, 17), device).to(dtype), pattern((16, 8, 3, 3), device).to(dtype)
        out = functional.conv2d(image, kernel)
        found += [out, conv2d_weight(image, kernel.shape, out)]
    return found


def attention(device: torch.device) -> list[Tensor]:
    """Causal attention over 40 positions."""
    query = pattern((2, 4, 40, 32), device)
    return [functional.scaled_dot_product_attention(query, query.flip(2), query, is_causal=True)]


def functions(device: torch.device) -> list[Tensor]:
    """Elementwise functions and reductions over more elements than a vector register holds."""
    row, table = 4 * pattern((4099,), device), pattern((37, 1003), device)
    found = [row.exp(), row.tanh(), functional.gelu(row), functional.gelu(row, approximate="tanh"), row.sigmoid(), row.sum(), row.norm()]
    return [*found, table.sum(0), functional.log_softmax(5 * table, -1), functional.layer_norm(table, (1003,))]


PROBES: dict[str, Callable[[torch.device], list[Tensor]]] = {
    "matrix products (float32)": functools.partial(products, dtype=torch.float32),
    "matrix products (bfloat16)": functools.partial(products, dtype=torch.bfloat16),
    "convolutions": convolutions,
    "attention": attention,
    "functions and reductions": functions,
}


def sha256_of(tensors: Iterable[Tensor]) -> str:
    """Return the first 12 hex digits of the sha256 of the tensors' bytes."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(bytes_of(tensor))
    return total.hexdigest()[:12]


def make_deterministic(device: torch.device) -> str:
    """Choose kernels that give the same bits each time, and say what that took. On a CPU with a fixed number of threads they all do."""
    if device.type != "cuda":
        return f"{torch.get_num_threads()} thread(s) a worker: the number of threads changes bits, so it is a value of the run"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    return "deterministic CUDA kernels where torch has them (CUBLAS_WORKSPACE_CONFIG=:4096:8)"
