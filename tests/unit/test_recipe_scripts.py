"""The scripts of `lockstep train` are short, and use public names only: a copy runs by itself."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep import recipes
from lockstep.cli.main import main
from lockstep.cli.recipes import SCRIPTS, script_path
from lockstep.recipes.script import SCRIPTS as SCRIPTS_BY_TASK

MODULES = {"lockstep": lockstep.__all__, "recipes": recipes.__all__}


def foreign_names(source: str) -> list[str]:
    """Return the imports and names of Lockstep in a script that are not public."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "lockstep":
            names = ["lockstep" if alias.name == "recipes" else alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            public = MODULES.get(node.value.id, [node.attr])
            found += [] if node.attr in public else [f"{node.value.id}.{node.attr}"]
            continue
        else:
            continue
        standard = sys.stdlib_module_names | {"lockstep", "torch"}
        found += [name for name in names if name not in standard]
    return found


def test_each_task_has_a_script() -> None:
    assert {*SCRIPTS_BY_TASK.values(), "diloco"} == {*SCRIPTS}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_public(name: str) -> None:
    source = script_path(name).read_text()
    assert len(source.splitlines()) <= 150
    assert foreign_names(source) == []


def test_other_imports_are_found() -> None:
    source = "import lockstep\nfrom lockstep.session import Session\nlockstep.session.Session\n"
    assert foreign_names(source) == ["lockstep.session", "lockstep.session"]
    assert foreign_names("from lockstep import recipes\nrecipes.run.Run") == ["recipes.run"]


def test_recipes_copy_writes_a_script_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.py"
    assert main(["recipes", "copy", "translate", str(file)]) == 0
    assert file.read_text() == script_path("translate").read_text()
    assert f"lockstep run --workers 2 {file} --steps 40" in capsys.readouterr().out
    wrong = {
        ("translate", str(file)): "was not written: File exists",
        ("nothing", str(tmp_path / "other.py")): "there is no script 'nothing'",
        ("translate", str(tmp_path / "other.txt")): "does not end in .py",
        ("translate",): "copy takes a script and a file",
    }
    for words, message in wrong.items():
        assert main(["recipes", "copy", *words]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]
