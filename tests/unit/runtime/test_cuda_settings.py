"""What Lockstep sets for GPUs, as far as it shows on a machine without one. The rest: tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from lockstep.runtime import numerics
from lockstep.runtime.numerics import choose_precision, make_deterministic, probe_results


@pytest.fixture
def deterministic_cuda() -> Iterator[None]:
    make_deterministic(torch.device("cuda"))
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_new_tensors_are_not_filled(deterministic_cuda: None) -> None:
    ones = torch.ones(10_000)
    del ones  # the allocator returns its memory
    assert not torch.empty(10_000).isnan().all()


def test_an_operation_without_deterministic_kernel_is_an_error(deterministic_cuda: None) -> None:
    """With warn_only, the backward passes of flash attention would use kernels that add in any order."""
    assert (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


AFTER_CUDA = """
import torch
torch.cuda.is_initialized = lambda: {used}
from lockstep.runtime.numerics import make_deterministic
print(make_deterministic(torch.device("cuda")))
"""


@pytest.mark.parametrize("used", [False, True])
def test_cublas_is_told_its_workspace_before_its_first_product_or_not_at_all(used: bool) -> None:
    environ = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-c", AFTER_CUDA.format(used=used)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if used:
        assert done.returncode and "used CUDA before lockstep was imported" in done.stderr
    else:
        assert done.returncode == 0 and "CUBLAS_WORKSPACE_CONFIG=:4096:8" in done.stdout


@pytest.mark.parametrize(("has_units", "precision"), [(True, "bf16"), (False, "fp32")])
def test_a_gpu_without_bf16_units_trains_in_fp32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, has_units: bool, precision: str
) -> None:
    """V100, P4000 and T4 emulate bf16, slower than fp32: emulation does not count."""
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: has_units or including_emulation,
    )
    chosen, reason = choose_precision(torch.device("cuda"))
    assert chosen == precision
    assert reason == f"this GPU has {'' if has_units else 'no '}bf16 units"


def test_a_probe_without_a_kernel_does_not_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(device: torch.device) -> list[torch.Tensor]:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED when calling cublasGemmEx\nmore")

    bf16 = "matrix products (bfloat16)"
    before = probe_results.__wrapped__("cpu", 1)
    monkeypatch.setitem(numerics.PROBES, bf16, no_kernel)
    after = probe_results.__wrapped__("cpu", 1)
    assert "CUBLAS_STATUS_NOT_SUPPORTED when" in after.pop(f"result of {bf16}")
    assert after == {name: value for name, value in before.items() if bf16 not in name}


def test_a_probe_without_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every other worker would refuse this one, for its kernels."""

    def no_memory(device: torch.device) -> list[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    monkeypatch.setitem(numerics.PROBES, "attention", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        probe_results.__wrapped__("cpu", 1)
