"""What Lockstep sets for GPUs, as far as it shows on a machine without one. The rest: tests/gpu."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from lockstep.runtime.numerics import make_deterministic


@pytest.fixture
def deterministic_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    make_deterministic(torch.device("cuda"))
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


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
