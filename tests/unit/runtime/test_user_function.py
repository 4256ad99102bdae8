"""Loading a user's function by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.cli.worker import run_function
from lockstep.errors import UsageError
from lockstep.runtime.sources import load_function


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_file_can_import_its_neighbors(folder: Path) -> None:
    (folder / "loops").mkdir()
    (folder / "loops/my_parts.py").write_text("ANSWER = 42\n")
    (folder / "loops/my_loop.py").write_text(
        "from my_parts import ANSWER\ndef train(): return ANSWER\n"
    )
    function = load_function("loops/my_loop.py:train")
    assert function() == 42
    assert sys.modules[function.__module__].train is function  # so that it can be pickled
    assert load_function(str(folder / "loops/my_loop.py") + ":train") is function


def test_module_in_the_current_folder_is_found(folder: Path) -> None:
    (folder / "my_package").mkdir()
    (folder / "my_package/__init__.py").touch()
    (folder / "my_package/loop.py").write_text("def train(): return 7\n")
    assert load_function("my_package.loop:train")() == 7


@pytest.mark.parametrize(
    ("spelled", "says"),
    [
        ("my_loop.py", "names no function"),
        ("my_loop.py:", "names no function"),
        ("my_lop.py:train", "there is my_loop.py"),
        ("my_loop.py:trian", "it has train"),
        ("my_loop.py:NUMBER", "is not a Python function"),
        ("my_lop:train", "there is my_loop"),
        ("no.such.module:train", "no module 'no.such.module'"),
        ("a..b:train", "no module"),
        ("nowhere/at_all.py:train", "no file"),
    ],
)
def test_unknown_name_is_an_error_with_the_nearest_names(
    folder: Path, spelled: str, says: str
) -> None:
    (folder / "my_loop.py").write_text("NUMBER = 1\ndef train(): ...\ndef evaluate(): ...\n")
    with pytest.raises(UsageError, match=says):
        load_function(spelled)


def test_file_named_like_a_loaded_module_is_rejected(folder: Path) -> None:
    (folder / "json.py").write_text("def train(): ...\n")
    with pytest.raises(UsageError, match="another name"):
        load_function("json.py:train")


def test_errors_while_loading_pass_through(folder: Path) -> None:
    (folder / "broken_loop.py").write_text("import there_is_no_such_module\n")
    for spelled in ("broken_loop.py:train", "broken_loop:train"):
        with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
            load_function(spelled)
    assert "broken_loop" not in sys.modules


@pytest.mark.parametrize(
    ("function", "flags", "says"),
    [
        (
            "shaped",
            {"shape": "wide"},
            "--shape 'wide': Input should be a dictionary or an instance of Shape",
        ),
        ("several", {"options": "1"}, "takes no --options"),
        ("several", {"numbers": "1"}, "takes no --numbers"),
        ("positional", {"first": "1"}, "takes no --first"),
    ],
)
def test_flags_that_do_not_fit_the_function_are_rejected(
    folder: Path, function: str, flags: dict[str, str], says: str
) -> None:
    (folder / "odd.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Shape:\n    width: int = 1\n"
        "def shaped(shape: Shape = Shape()): ...\ndef several(*numbers: int, **options: int): ...\ndef positional(first: int = 1, /): ...\n"
    )
    with pytest.raises(UsageError, match=says):
        run_function(f"odd.py:{function}", folder / "run", flags)


@pytest.mark.parametrize("command", ["train", "launch", "drill"])
def test_zero_workers_are_rejected(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "odd.py:train", "--workers", "0"]) == 2
    assert "argument --workers: '0' is not an integer from 1 to" in capsys.readouterr().err
