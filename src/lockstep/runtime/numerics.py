"""Versions, processor and threads, which decide bits like the run's config; compared at each
resume."""

import functools
import hashlib
import math
import os
import random
import re
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from lockstep.errors import UsageError
from lockstep.runtime.environment import bf16_flag
from lockstep.runtime.exit_report import error_summary
from lockstep.runtime.tensor_bytes import bytes_of

CUBLAS_SETTING = "CUBLAS_WORKSPACE_CONFIG"
# Variables that make oneDNN, MKL, ATen and cuBLAS choose other kernels.
KERNEL_SETTINGS = (
    "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "ATEN_CPU_CAPABILITY", "NVIDIA_TF32_OVERRIDE", CUBLAS_SETTING,
)  # fmt: skip
# In the errors of torch for an operation that a device cannot do.
NO_KERNEL = r"not[ _](supported|implemented)|no kernel image"


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of torch (CPU and `device`), NumPy and Python.
    Same numbers as torch.manual_seed, which takes 20 times as long: it formats the stack."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def generator_states(device: torch.device) -> tuple[object, ...]:
    """Return what changes when a number is drawn from a generator that `seed_generators` seeds."""
    on_device = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
    numpy_state = np.random.get_state(legacy=False)["state"]
    states = (numpy_state["pos"], numpy_state["key"].tobytes(), random.getstate())
    return torch.default_generator.get_state().numpy().tobytes(), on_device, *states


def pack_generators(device: torch.device) -> Tensor:
    """Return the states of torch's generators, on the CPU and `device`, as bytes."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.default_generator.get_state(), *on_device])


def restore_generators(packed: Tensor, device: torch.device) -> None:
    """Set the states that `pack_generators` has returned."""
    size = torch.default_generator.get_state().numel()
    torch.default_generator.set_state(packed[:size].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(packed[size:].clone(), device)


def global_generators() -> tuple[int, bytes, int]:
    """Return the seed of torch's generator and the states of NumPy's and Python's."""
    return (
        torch.initial_seed(),
        np.random.get_state(legacy=False)["state"]["key"].tobytes(),
        hash(random.getstate()),
    )


AT_IMPORT = [*global_generators()]  # users seed after importing lockstep (docs/loop.md)


def note_python_seed() -> None:
    """In a forked process, whose generator Python has seeded at random: not the user's seed."""
    AT_IMPORT[2] = global_generators()[2]


os.register_at_fork(after_in_child=note_python_seed)


def seed_unseeded_generators() -> None:
    """Seed the global generators that the user has not: equal draws on all ranks at each start."""
    seeds: tuple[Callable[[int], object], ...] = (torch.manual_seed, np.random.seed, random.seed)
    for seed, now, before in zip(seeds, global_generators(), AT_IMPORT, strict=True):
        if now == before:
            seed(0)


def choose_precision(device: torch.device) -> tuple[Literal["bf16", "fp32"], str]:
    """Return (precision, the reason): bf16 if the device has bf16 units, else fp32. On one core:
    without bf16 units 25 GFLOP/s in bf16, 119 in fp32; with AMX tiles over 700 and 30."""
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return (
            ("bf16", "this GPU has bf16 units")
            if supported
            else ("fp32", "this GPU has no bf16 units")
        )
    if flag := bf16_flag():
        return "bf16", f"this processor has bf16 units ({flag})"
    return "fp32", "this processor has no bf16 units: bf16 products are slower than fp32 products"


def fingerprint(device: torch.device) -> dict[str, str]:
    """Return versions, settings, and digests of fixed computations, which show the chosen
    kernels."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": str(threads or "any"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "deterministic": (
            f"{torch.are_deterministic_algorithms_enabled()}{', warn_only' * warn_only}"
        ),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **kernel_settings(device),
        **probe_results(str(device), threads),
    }


def kernel_settings(device: torch.device) -> dict[str, str]:
    settings = {name: os.environ.get(name, "not set") for name in KERNEL_SETTINGS}
    if device.type != "cuda":
        settings[CUBLAS_SETTING] = "not set"  # lockstep sets it in every process
    return settings


@functools.cache
def probe_results(device: str, threads: int) -> dict[str, str]:
    """Return {"result of NAME": start of the sha256 of its bytes} for each of PROBES, in 15 to 30
    ms. Independent of generators and of the caller's grad and autocast modes."""
    place = torch.device(device)
    with torch.no_grad(), torch.autocast(place.type, enabled=False):
        return {f"result of {name}": result_of(probe, place) for name, probe in PROBES.items()}


def result_of(probe: Callable[[torch.device], list[Tensor]], device: torch.device) -> str:
    """Return the start of the sha256 of a probe's bytes; the error where the device lacks a kernel:
    old GPUs have none for bf16 products, which an fp32 run does not need."""
    try:
        return sha256_of(probe(device))
    except RuntimeError as error:
        if not re.search(NO_KERNEL, str(error), re.IGNORECASE):
            raise
        return f"none: {error_summary(error)}"


def pattern(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return fixed float32 numbers in [-1, 1], from integer arithmetic: same bits everywhere."""
    numbers = (
        torch.arange(1, math.prod(shape) + 1, dtype=torch.int64, device="cpu")
        * 2_654_435_761
        % 65_521
    )
    return (numbers.float() / 32_768 - 1).reshape(shape).to(device)


def products(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Matrix products: one block, many with a remainder, transposed operand, vector, batch."""
    left, right = pattern((160, 520), device).to(dtype), pattern((520, 200), device).to(dtype)
    small, batch = pattern((8, 24), device).to(dtype), pattern((4, 33, 48), device).to(dtype)
    return [
        small @ small.T,
        left @ right,
        left.T @ left,
        left @ right[:, 0],
        batch @ batch.transpose(1, 2),
    ]


def convolutions(device: torch.device) -> list[Tensor]:
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        image, kernel = (
            pattern((2, 8, 17, 17), device).to(dtype),
            pattern((16, 8, 3, 3), device).to(dtype),
        )
        out = functional.conv2d(image, kernel)
        results += [out, conv2d_weight(image, kernel.shape, out)]
    return results


def attention(device: torch.device) -> list[Tensor]:
    query = pattern((2, 4, 40, 32), device)
    return [functional.scaled_dot_product_attention(query, query.flip(2), query, is_causal=True)]


def functions(device: torch.device) -> list[Tensor]:
    """Elementwise functions and reductions over more elements than fit a vector register."""
    row, table = 4 * pattern((4099,), device), pattern((37, 1003), device)
    results = [
        row.exp(),
        row.tanh(),
        functional.gelu(row),
        functional.gelu(row, approximate="tanh"),
        row.sigmoid(),
        row.sum(),
        row.norm(),
    ]
    return [
        *results,
        table.sum(0),
        functional.log_softmax(5 * table, -1),
        functional.layer_norm(table, (1003,)),
    ]


PROBES: dict[str, Callable[[torch.device], list[Tensor]]] = {
    "matrix products (float32)": functools.partial(products, dtype=torch.float32),
    "matrix products (bfloat16)": functools.partial(products, dtype=torch.bfloat16),
    "convolutions": convolutions,
    "attention": attention,
    "functions and reductions": functions,
}


def sha256_of(tensors: Iterable[Tensor]) -> str:
    """Return the first 12 hex digits of the sha256 of the tensors' bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes_of(tensor))
    return digest.hexdigest()[:12]


def make_deterministic(device: torch.device) -> str:
    """Select deterministic kernels; return a description. A CPU needs only fixed threads.
    On a GPU an operation without a deterministic kernel raises an error. A warning would not do:
    the backward passes of fused attention then add in any order (attention_backward.cu).
    UsageError: CUDA was used before cuBLAS had its workspace."""
    if device.type != "cuda":
        return (
            f"{torch.get_num_threads()} thread(s) per worker: "
            "the number of threads changes bits, so it is part of the run"
        )
    if CUBLAS_SETTING not in os.environ:
        raise UsageError(
            f"this process has used CUDA before lockstep was imported, without {CUBLAS_SETTING}: "
            "matrix products may have other bits than on other workers",
            "import lockstep",
            f"import lockstep before the first tensor on a GPU, or set {CUBLAS_SETTING}=:4096:8",
        )
    torch.use_deterministic_algorithms(True)
    # Else each torch.empty is filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    return f"deterministic CUDA kernels only ({CUBLAS_SETTING}={os.environ[CUBLAS_SETTING]})"
