"""Fixtures of the chaos tests: trainings, the result of an undisturbed run, hosts."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hosts import Network, Training, Truth, truth_of, undisturbed, why_no_hosts


@pytest.fixture
def start_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Training]]:
    """Start trainings in `tmp_path`; kill what is left of them after the test."""
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    trainings: list[Training] = []

    def start(*args: Any, **values: Any) -> Training:
        trainings.append(Training(tmp_path, *args, **values))
        return trainings[-1]

    yield start
    for training in trainings:
        training.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Truth]:
    """Return the result of an undisturbed run of N steps; pytest-xdist's processes share the runs."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def result(steps: int) -> Truth:
        folder = base / f"undisturbed-{steps}"
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return (
                truth_of(folder / "run")
                if (folder / "run").exists()
                else undisturbed(folder, steps)
            )

    return result


@pytest.fixture(scope="session")
def why_no_network() -> str:
    return why_no_hosts()


@pytest.fixture
def network(why_no_network: str) -> Iterator[Network]:
    """Three hosts in network namespaces; the test is skipped where there can be none."""
    if why_no_network:
        pytest.skip(why_no_network)
    with Network(3) as hosts:
        yield hosts
