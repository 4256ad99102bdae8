"""The script that lockstep.launch writes in a notebook: what it contains, and what it refuses."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.cli import notebook
from lockstep.cli.notebook import script_of
from lockstep.errors import LockstepError, UsageError

LOOP = """
import functools
import math as m
from collections import Counter as Count
from dataclasses import dataclass

FACTOR, NAMES = 3, {"a": [1.5, None]}

def traced(function):
    @functools.wraps(function)
    def call(*words):
        return function(*words)
    return call

@dataclass
class Point:
    x: int = FACTOR

class Base:
    def value(self):
        return even(4) and m.floor(2.5)

class Derived(Base):
    pass

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

@traced
def area(x=FACTOR):
    FILE = x  # local: the open file of this name is not used
    return FILE * Point().x + Derived().value() + len(NAMES["a"]) + Count("aa")["a"]

def main(out="runs/own"):
    unused = lambda: area()
    return unused()

FILE = open(0, closefd=False)
"""


class Cells:
    """A notebook: each cell has a file name that only linecache knows, as in IPython."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__", "In": [""]}

    def run(self, text: str) -> None:
        self.names["In"].append(text)
        file = f"/tmp/ipykernel_{id(self)}/{len(self.names['In'])}.py"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec", dont_inherit=True), self.names)


def run_text(text: str) -> dict[str, Any]:
    """Run a script without its last lines; return its names."""
    names: dict[str, Any] = {"__name__": "script"}
    sys.path, before = list(sys.path), sys.path
    try:
        exec(compile(text, "notebook.py", "exec", dont_inherit=True), names)
    finally:
        sys.path = before
    return names


def test_the_script_defines_main_and_all_that_it_uses() -> None:
    cells = Cells()
    cells.run(LOOP)
    text = script_of(cells.names["main"])
    assert run_text(text)["main"]() == cells.names["main"]() == 9 + 2 + 2 + 2
    assert text.endswith(
        'if __name__ == "__main__":\n    import lockstep\n\n    lockstep.launch(main)\n'
    )
    assert "open(" not in text and str(Path.cwd()) in text


def test_the_script_has_the_newest_definitions() -> None:
    cells = Cells()
    cells.run(
        "SIZE = 1\nclass A:\n    x = 1\ndef f():\n    return 1\ndef main():\n    return SIZE, A.x, f()\n"
    )
    cells.run("class A:\n    x = 2\ndef f():\n    return 2\n")
    cells.run("SIZE = 2\n")
    assert run_text(script_of(cells.names["main"]))["main"]() == (2, 2, 2)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            "log = open(0, closefd=False)\ndef main(): log.write('x')",
            "main uses the global log, of type TextIOWrapper, which a fresh process",
        ),
        (
            "f = lambda x: x\ndef main(): f(1)",
            "main uses the global f, a lambda, which .*\n.*\n  write def f",
        ),
        (
            "def g(): return data\ndef main(): g()\ndata = [object()]",
            "g uses the global data, of type list, .*\n.*\n  create it in g",
        ),
        (
            "def make():\n    y = 1\n    def main(): return y\n    return main\nmain = make()",
            "main, of type function, which",
        ),
        (
            "main = lambda: 1",
            "takes a function that a cell defines with def, not <function <lambda>",
        ),
        (
            "class A: pass\nmain = A()",
            "takes a function that a cell defines with def, not <__main__.A",
        ),
        (
            "exec('def helper(): return 1')\ndef main(): helper()",
            "main uses the global helper, of type function",
        ),
    ],
)
def test_what_a_fresh_process_cannot_recreate_is_refused(cell: str, message: str) -> None:
    cells = Cells()
    cells.run(cell)
    with pytest.raises(UsageError, match=message):
        script_of(cells.names["main"])


def test_the_output_and_the_exit_code_of_the_run_reach_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lockstep.py").write_text(
        "import sys\nprint(sys.argv[1:])\nprint('reason', file=sys.stderr)\nsys.exit(4)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(LockstepError, match="the run ended with exit code 4"):
        notebook.run_script(tmp_path / "run" / "notebook.py", "pass\n", ["--workers", "2"])
    shown = capsys.readouterr().out
    assert "'--workers', '2'" in shown and "reason" in shown
    assert (tmp_path / "run" / "notebook.py").read_text() == "pass\n"


def test_launch_in_a_program_without_a_file_runs_the_written_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.cli.script import launch

    cells, started = Cells(), []
    cells.run("def main(out='runs/own', steps=3): return steps")
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    monkeypatch.setattr(notebook, "run_script", lambda *words: started.append(words))
    launch(cells.names["main"], workers=2)
    assert started == [
        (
            Path("runs/own/notebook.py"),
            script_of(cells.names["main"]),
            ["--workers", "2", "--out", "runs/own"],
        )
    ]
