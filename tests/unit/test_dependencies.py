"""The versions of dependencies."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path


def test_torch_has_a_tested_version() -> None:
    """Lockstep uses private names of torch, so each new version must be tested before it is allowed."""
    needed = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    (bound,) = [line.partition("<")[2] for line in needed if line.startswith("torch")]
    assert bound and tuple(map(int, version("torch").split(".")[:2])) < tuple(
        map(int, bound.split("."))
    )
