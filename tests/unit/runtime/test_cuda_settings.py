"""What Lockstep sets for GPUs, as far as it shows on a machine without one. The rest: tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from lockstep.runtime.numerics import make_deterministic


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
