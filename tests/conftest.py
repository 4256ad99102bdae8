"""For all tests: what a command sets up in this process is gone when its test ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_logger_for_the_next_test() -> Iterator[None]:
    """A test that calls the command in this process leaves no handler on a stderr that is closed by then."""
    logger = logging.getLogger("lockstep")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate
