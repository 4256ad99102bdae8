"""Source fingerprints: independent of the folder, different for every change of the code."""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep.runtime import sources
from lockstep.runtime.sources import load_function


@pytest.fixture(autouse=True)
def reset_user_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the user code and unload its modules."""
    monkeypatch.setattr(sources, "user_code", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("fp_"):
            del sys.modules[name]


def fingerprint_of(folder: Path, monkeypatch: pytest.MonkeyPatch, loop: str, layer: str) -> str:
    """Return the fingerprint of a loop with an imported and an unused module in `folder`."""
    folder.mkdir()
    (folder / "fp_loop.py").write_text(loop)
    (folder / "fp_layers.py").write_text(layer)
    (folder / "fp_unused.py").write_text(str(folder))
    monkeypatch.setattr(sources, "user_code", {})
    for name in ("fp_loop", "fp_layers"):
        sys.modules.pop(name, None)
    load_function(f"{folder}/fp_loop.py:train")
    sys.path.remove(str(folder))
    return sources.fingerprint()["own loop"]


def test_user_code_is_its_file_and_its_imports_from_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, layer = "import fp_layers\ndef train(): return 1.0\n", "WIDTH = 8\n"
    expected = fingerprint_of(tmp_path / "a", monkeypatch, loop, layer)
    assert expected.startswith("fp_loop.py and 1 modules, sources ")
    assert fingerprint_of(tmp_path / "b", monkeypatch, loop, layer) == expected, (
        "another clone, another unused file"
    )
    assert (
        fingerprint_of(tmp_path / "c", monkeypatch, loop.replace("1.0", "1.001"), layer) != expected
    )
    assert fingerprint_of(tmp_path / "d", monkeypatch, loop, layer.replace("8", "9")) != expected


def test_a_script_has_the_same_fingerprint_under_every_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(
        "from lockstep.runtime.sources import fingerprint\nresult = fingerprint()['own loop']\n"
    )
    monkeypatch.chdir(tmp_path)
    by_lockstep_run = runpy.run_path("train.py", run_name="__main__")["result"]
    monkeypatch.setattr(sources, "user_code", {})
    by_python = runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")["result"]
    assert by_lockstep_run == by_python and by_python.startswith("train.py, sources ")


def test_editing_a_loaded_file_does_not_change_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fingerprint_of(tmp_path / "a", monkeypatch, "def train(): pass\n", "")
    (tmp_path / "a" / "fp_loop.py").write_text("def train(): return 2\n")
    load_function(f"{tmp_path}/a/fp_loop.py:train")
    assert sources.fingerprint()["own loop"] == expected


def test_lockstep_fingerprint_covers_all_files_except_those_of_editors(tmp_path: Path) -> None:
    root = Path(lockstep.__file__).parent
    files = sorted(root.rglob("*.py"))
    shutil.copytree(root, tmp_path / "copy")
    (tmp_path / "copy" / ".checkpoints").mkdir()
    for name in ("runtime/.#numerics.py", ".checkpoints/numerics.py"):
        (tmp_path / "copy" / name).write_bytes(b"other")
    inside = dict(sources.python_files_in(tmp_path / "copy"))
    assert len(inside) == len(files) > 80 and sources.sha256_of(inside.items()) == sources.SOURCES
    inside["runtime/numerics.py"] += b"\n"
    assert sources.sha256_of(inside.items()) != sources.SOURCES
    assert sources.fingerprint()["lockstep"].endswith(f"sources {sources.SOURCES}")
