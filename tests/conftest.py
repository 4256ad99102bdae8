"""Fixtures and markers of all tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}  # else lm-eval retries for half a minute
settings.register_profile("lockstep", deadline=None)  # a shared machine pauses a test for seconds
settings.load_profile("lockstep")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: a chaos test that runs only with LOCKSTEP_CHAOS=1 (make test-chaos)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("LOCKSTEP_CHAOS") != "1":
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: set LOCKSTEP_CHAOS=1"))


@pytest.fixture(autouse=True)
def restore_logger() -> Iterator[None]:
    """Restore the logger: a command called in a test leaves a handler on a stderr that is closed."""
    logger = logging.getLogger("lockstep")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate
