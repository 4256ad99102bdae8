"""The fingerprint of code: the same wherever it lies, another for every change that can decide bits."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep.runtime import sources
from lockstep.runtime.user_function import load_function


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No own loop is known before or after, and its modules are gone."""
    monkeypatch.setattr(sources, "own", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("fp_"):
            del sys.modules[name]


def fingerprint_of(folder: Path, monkeypatch: pytest.MonkeyPatch, loop: str, layer: str) -> str:
    """The own loop's fingerprint for a file with a module beside it, in a folder."""
    folder.mkdir()
    (folder / "fp_loop.py").write_text(loop)
    (folder / "fp_layers.py").write_text(layer)
    (folder / "fp_unused.py").write_text(str(folder))
    monkeypatch.setattr(sources, "own", {})
    for name in ("fp_loop", "fp_layers"):
        sys.modules.pop(name, None)
    load_function(f"{folder}/fp_loop.py:train")
    sys.path.remove(str(folder))
    return sources.fingerprint()["own loop"]


def test_an_own_loop_is_its_file_and_the_modules_it_imports_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, layer = "import fp_layers\ndef train(): return 1.0\n", "WIDTH = 8\n"
    told = fingerprint_of(tmp_path / "a", monkeypatch, loop, layer)
    assert told.startswith("fp_loop.py and 1 modules, sources ")
    assert fingerprint_of(tmp_path / "b", monkeypatch, loop, layer) == told, "another clone, another unused file"
    assert fingerprint_of(tmp_path / "c", monkeypatch, loop.replace("1.0", "1.001"), layer) != told
    assert fingerprint_of(tmp_path / "d", monkeypatch, loop, layer.replace("8", "9")) != told


def test_a_file_that_changes_after_it_was_loaded_does_not_change_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = fingerprint_of(tmp_path / "a", monkeypatch, "def train(): pass\n", "")
    (tmp_path / "a" / "fp_loop.py").write_text("def train(): return 2\n")
    load_function(f"{tmp_path}/a/fp_loop.py:train")
    assert sources.fingerprint()["own loop"] == told


def test_lockstep_is_every_python_file_of_it_in_a_folder_or_in_a_zip(tmp_path: Path) -> None:
    root = Path(lockstep.__file__).parent
    files = sorted(root.rglob("*.py"))
    with zipfile.ZipFile(tmp_path / "wheel.zip", "w") as wheel:
        for path in files:
            wheel.write(path, f"lockstep/{path.relative_to(root)}")
        wheel.writestr("lockstep/__pycache__/x.pyc", b"other")
    inside = dict(sources.modules_in(zipfile.Path(tmp_path / "wheel.zip", "lockstep/")))
    assert len(inside) == len(files) > 80 and sources.sha256_of(inside.items()) == sources.SOURCES
    inside["runtime/numerics.py"] += b"\n"
    assert sources.sha256_of(inside.items()) != sources.SOURCES
    assert sources.fingerprint()["lockstep"].endswith(f"sources {sources.SOURCES}")
