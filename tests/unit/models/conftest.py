"""Fixtures of the tests of models."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute as the workers of a run do: bits depend on the number of threads."""
    torch.set_num_threads(1)
