"""Fixtures and markers of all tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import chdir
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from support import forking, launching

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
}  # else lm-eval retries for half a minute
assert launching.CACHE in os.environ  # of the commands that tests start; the tests have none
os.environ["LOCKSTEP_CACHE"] = "off"
forking.fork_commands()
# Else each process that a test starts compiles the sources that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
settings.register_profile("lockstep", deadline=None)  # a shared machine pauses a test for seconds
settings.load_profile("lockstep")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "long: a chaos test that runs only with LOCKSTEP_CHAOS=1 (make test-chaos)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("LOCKSTEP_CHAOS") != "1":
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="long: set LOCKSTEP_CHAOS=1"))


@pytest.fixture(scope="session", autouse=True)
def working_folder_of_fixtures() -> Iterator[None]:
    """Run the fixtures of sessions and modules in an empty folder, as `working_folder` does for tests."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, chdir(folder):
        yield


@pytest.fixture(autouse=True)
def working_folder() -> Iterator[None]:
    """Run the test in an empty folder: commands read and write runs/ of their working folder, and a
    user may have a run there."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, chdir(folder):
        yield


@pytest.fixture(autouse=True)
def restore_logger() -> Iterator[None]:
    """Restore the logger: a command called in a test leaves a handler on a stderr that is closed."""
    logger = logging.getLogger("lockstep")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate
