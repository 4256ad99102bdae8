"""Measure the GFLOP/s of one core's matrix products in fp32 and bf16, which decide `compute.precision = "auto"`."""

from __future__ import annotations

import time

import torch


def speed(dtype: torch.dtype, m: int, k: int, n: int, seconds: float = 0.5) -> float:
    """GFLOP/s of (m, k) times (k, n), the weight laid out as nn.Linear has it."""
    a, weight = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
    for _ in range(3):
        torch.nn.functional.linear(a, weight)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        torch.nn.functional.linear(a, weight)
        count += 1
    return 2 * m * k * n * count / (time.perf_counter() - begin) / 1e9


if __name__ == "__main__":
    torch.set_num_threads(1)
    for shape in ((2048, 128, 512), (2048, 512, 2048), (2048, 128, 5478)):
        found = {str(dtype): speed(dtype, *shape) for dtype in (torch.float32, torch.bfloat16)}
        print(
            shape,
            "  ".join(
                f"{name.removeprefix('torch.')} {value:.0f} GFLOP/s"
                for name, value in found.items()
            ),
        )
