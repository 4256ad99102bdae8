"""Every test and fixture runs in an empty folder: a run in the checkout's runs/ changes no result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
LIST = "import os; print(os.getcwd(), os.listdir())"


def list_working_folder() -> tuple[Path, str]:
    """Return the working folder of a process that a test starts, and the list of its files."""
    shown = subprocess.run(
        [sys.executable, "-c", LIST], capture_output=True, text=True, check=True
    ).stdout
    folder, _, files = shown.strip().partition(" ")
    return Path(folder), files


@pytest.fixture(scope="module")
def folder_of_module() -> Path:
    folder, files = list_working_folder()
    assert files == "[]"
    return folder


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_starts_in_an_empty_folder(turn: int, folder_of_module: Path) -> None:
    folder, files = list_working_folder()
    assert files == "[]", "what the test before it wrote is gone"
    assert CHECKOUT not in (folder, *folder.parents, folder_of_module, *folder_of_module.parents)
    Path("runs").mkdir()
