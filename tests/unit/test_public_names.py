"""`import lockstep`: the public names, loaded on first use; and how a user's script is parsed."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.main import split_script
from lockstep.cli.options import build_parser
from lockstep.cli.script import (
    arguments_of,
    call,
    folder_of,
    given_out,
    imports_lockstep,
    module_file,
    session_folder,
    split_at_script,
)
from lockstep.cli.start import read_script_request
from lockstep.config.resolve import parse_flags
from lockstep.errors import ERRORS_BY_NAME, LockstepError, UsageError
from lockstep.runtime.session_start import ERROR_FILE, SessionStart, StartAgainError, ask_for_start
from lockstep.runtime.worker_env import WorkerEnv

SOURCE = Path(lockstep.__file__).parent


def test_every_public_name_exists_and_is_listed() -> None:
    assert sorted(lockstep.__all__) == lockstep.__all__ and set(lockstep.__all__) <= set(
        dir(lockstep)
    )
    for name in lockstep.__all__:
        assert getattr(lockstep, name) is not None
        assert (
            name == "__version__"
            or inspect.getdoc(getattr(lockstep, name))
            or issubclass(getattr(lockstep, name), LockstepError)
        ), name
    assert not hasattr(lockstep, "no_such_name")
    assert {name for name in dir(lockstep) if not name.startswith("_")} == set(lockstep.__all__) - {
        "__version__"
    }


def test_editors_see_the_lazily_loaded_names() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name
        for node in ast.walk(typed)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert (
        seen | {"__version__"} | set(ERRORS_BY_NAME) == set(lockstep.__all__)
        and (SOURCE / "py.typed").exists()
    )


def test_importing_lockstep_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, lockstep; dir(lockstep); lockstep.UsageError; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_there_is_one_version() -> None:
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    assert project.get("version", lockstep.__version__) == lockstep.__version__
    shown = subprocess.run(
        [sys.executable, "-m", "lockstep", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert shown == f"{lockstep.__version__}\n"


@pytest.mark.parametrize(
    ("words", "ours", "script", "arguments"),
    [
        ("loop.py", "", "loop.py", ""),
        ("loop.py --workers 4 --steps 9", "--workers 4", "loop.py", "--steps 9"),
        (
            "--out a --workers=2 loop.py --workers 3 --out b",
            "--out a --workers=2 --workers 3",
            "loop.py",
            "--out b",
        ),
        ("loop.py --nodes 2:4 --out b", "--nodes 2:4", "loop.py", "--out b"),
        ("loop.py -- --workers 4", "", "loop.py", "--workers 4"),
        ("loop.py --lr 1 --workers 4", "", "loop.py", "--lr 1 --workers 4"),
        ("loop.py --help", "", "loop.py", "--help"),
        ("--ssh loop.py data.txt", "--ssh", "loop.py", "data.txt"),
        ("run.toml --steps 4", "run.toml --steps 4", "", ""),
        ("loop.py:main --steps 4", "loop.py:main --steps 4", "", ""),
    ],
)
def test_arguments_after_the_script_belong_to_it(
    words: str, ours: str, script: str, arguments: str
) -> None:
    values = {"--out": 1, "--workers": 1, "--nodes": 1, "--ssh": 0, "--help": 0}
    parts = split_at_script(words.split(), values)
    assert parts == (ours.split(), script, arguments.split())


@pytest.mark.parametrize(
    ("source", "folder"),
    [
        ("lockstep.Session('runs/a', micro_batches=2)", "runs/a"),
        ("def main(out: str = 'runs/b'):\n    with Session(out, micro_batches=2): ...", "runs/b"),
        (
            "def main(*, out=Path('runs/c')):\n    with Session(out=out, micro_batches=2): ...",
            "runs/c",
        ),
        ("def main(steps, out='runs/e'):\n    with Session(out, micro_batches=2): ...", "runs/e"),
        ("OUT = 'runs/d'\ndef main():\n    with Session(OUT, micro_batches=2): ...", "runs/d"),
        ("def main(out):\n    with Session(out, micro_batches=2): ...", "runs/loop"),
        ("self.mode = 'train'\nlockstep.Session('runs/a', micro_batches=2)", "runs/a"),
        ("a, b = 'x', 'y'\nlockstep.Session('runs/a', micro_batches=2)", "runs/a"),
        (
            "def main(out='runs/a'):\n    with Session(out): ...\ndef other(out='runs/b'): ...",
            "runs/a",
        ),
        (
            "def main(out='runs/a'):\n    with Session(out): ...\ndef other():\n    out = f()",
            "runs/a",
        ),
        ("os.environ['HF_HOME'] = '/data/hf'\nwith Session(args.out): ...", "runs/loop"),
        ("cfg.OUT = '/data/x'\nwith Session(OUT): ...", "runs/loop"),
        ("print('no session')", "runs/loop"),
    ],
)
def test_folder_of_a_script_is_that_of_its_session(source: str, folder: str) -> None:
    script = ast.parse(source)
    assert folder_of(Path("code/loop.py"), [script], None, []) == Path(folder)
    assert folder_of(Path("code/loop.py"), [script], None, ["--steps", "3", "--out=given"]) == Path(
        "given"
    )
    assert folder_of(Path("code/loop.py"), [script], Path("ours"), ["--out", "given"]) == Path(
        "ours"
    )
    assert session_folder(script) in (folder, "") and given_out(["--out", "x"]) == "x"


FILES = {
    "train.py": "import loops\nloops.train()",
    "loops.py": "import os, code.deep",
    "code/__init__.py": "",
    "code/deep.py": "from .core import train",
    "code/core.py": "import lockstep, loops\ndef train(): lockstep.Session('runs/deep', micro_batches=2)",
    "plain.py": "from code import order",
    "code/order.py": "from lockstep import UniformOrder",
    "broken.py": "import torn",
    "torn.py": "def",
    "code/__main__.py": "from . import core",
    "names/space/train.py": "from ..space import loops",
    "names/space/loops.py": "from lockstep import ElasticRuntime\nElasticRuntime.join()",
}


@pytest.fixture
def folder_of_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "restart", "folder", "follows"),
    [
        ("run train.py", "one", "runs/deep", True),
        ("run plain.py", "all", "runs/plain", True),
        ("run broken.py", "all", "runs/broken", True),
        ("run -m train", "one", "runs/deep", True),
        ("launch -m code --workers 2", "one", "runs/deep", True),
        ("run -m names.space.train --steps 3", "one", "runs/train", True),
        ("run plain.py --out given", "all", "given", True),
        ("run --out given train.py", "one", "given", False),
        ("run --restart all train.py", "all", "runs/deep", False),
        ("run --restart all --out a --follow-session train.py", "all", "a", True),
    ],
)
def test_a_session_in_an_imported_module_decides_how_workers_restart(
    words: str, restart: str, folder: str, follows: bool, folder_of_scripts: Path
) -> None:
    parser = build_parser()
    ours, script, arguments = split_script(parser, words.split())
    request = read_script_request(parser.parse_args([*ours, script]), script, arguments)
    expected = Path("given") if arguments[:1] == ["--out"] else Path(folder)
    assert (request.restart, request.folder, request.follows_session) == (
        restart,
        expected,
        follows,
    )
    worker = ["run", *request.command_words("auto")[1:]]
    ours, script, again = split_script(parser, worker)
    args = parser.parse_args([*ours, script])
    assert (
        replace(read_script_request(args, script, again), is_folder_given=request.is_folder_given)
        == request
    )


def test_a_missing_module_is_refused(folder_of_scripts: Path) -> None:
    for name in ("trian", "code.missing", "names.space", "code..deep", ""):
        with pytest.raises(UsageError, match=f"there is no module '{name}' to run"):
            module_file(name)
    assert (
        module_file("code.deep") == folder_of_scripts / "code/deep.py"
        and module_file("json.tool").name == "tool.py"
    )


@pytest.mark.parametrize("out", ["/data/runs/my run", ""])
def test_a_session_asks_only_its_own_worker_for_another_start(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_env = WorkerEnv("runs/plain", str(tmp_path), "host", 0, 1, 1, 1, 1, "127.0.0.1")
    start = SessionStart.of_worker(worker_env, "all")
    for elsewhere in ("", str(tmp_path / "0.session-1"), "/tmp/torchelastic/error.json"):
        monkeypatch.setenv(ERROR_FILE, elsewhere)
        ask_for_start(Path(out) if out else None)
    start.check()
    for content in ("", '{"message": "an error that torch recorded"}'):
        start.path.write_text(content)
        start.check()
    monkeypatch.setenv(ERROR_FILE, start.environ()[ERROR_FILE])
    with pytest.raises(SystemExit, match="2"):
        ask_for_start(Path(out) if out else None)
    with pytest.raises(StartAgainError) as caught:
        start.check()
    again = StartAgainError.parse(str(caught.value))
    assert (
        again
        and again.out == out
        and again.options == ("--restart one --out '/data/runs/my run'" if out else "--restart one")
    )
    assert (
        StartAgainError.parse(str(UsageError("a", "b", "give c")))
        is StartAgainError.parse("")
        is None
    )


@pytest.mark.parametrize(
    ("source", "imports"),
    [
        ("import lockstep", True),
        ("from lockstep.session import Session", True),
        ("import torch, lockstepper", False),
        ("from . import x", False),
    ],
)
def test_imports_of_lockstep_are_detected(source: str, imports: bool) -> None:
    assert imports_lockstep(ast.parse(source)) is imports


def test_flags_are_the_arguments_of_main() -> None:
    def main(out: str = "runs/own", steps: int = 200, *, rate: float = 0.1) -> None:
        called.append((out, steps, rate))

    called: list[tuple[str, int, float]] = []
    call(main, ["--steps", "3", "--rate=0.5"])
    call(main, ["--steps", "4"], Path("/runs/x"))
    call(lambda: called.append(("", 0, 0.0)), ["positional", "arguments"])
    assert called == [("runs/own", 3, 0.5), ("/runs/x", 4, 0.1), ("", 0, 0.0)]
    with pytest.raises(UsageError, match="main takes no --stepz"):
        call(main, ["--stepz", "3"])
    with pytest.raises(UsageError, match="--steps 'many': Input should be a valid integer"):
        arguments_of(main, "main", {"steps": "many"})


def plain(augment=True, steps=60, rate=1e-3, name="a", data=None, out="runs/a", *, size):  # type: ignore[no-untyped-def]
    """A main function without annotations."""


def annotated(augment: bool | None = None, verbose: bool = False, name: str = "a") -> None:
    """A main function with annotations."""


@pytest.mark.parametrize(
    ("function", "words", "arguments"),
    [
        (
            plain,
            "--augment false --steps 100 --rate 1 --size 3",
            {"augment": False, "steps": 100, "rate": 1.0, "size": "3"},
        ),
        (
            plain,
            "--no-augment --data d.txt --out b --size=3",
            {"augment": False, "data": "d.txt", "out": "b", "size": "3"},
        ),
        (plain, "--size 3 --augment=yes --name 7", {"size": "3", "augment": True, "name": "7"}),
        (annotated, "--no-augment --no-verbose", {"augment": False, "verbose": False}),
        (plain, "--size 3 --steps many", "--steps 'many': Input should be a valid integer"),
        (plain, "--size 3 --steps 1.5", "--steps '1.5': Input should be a valid integer"),
        (plain, "--size 3 --augment maybe", "--augment 'maybe': Input should be a valid boolean"),
        (plain, "--size 3 --augment", "--augment has no value"),
        (plain, "--size 3 --no-name", "plain takes no --no-name"),
        (annotated, "--no-name", "annotated takes no --no-name"),
    ],
)
def test_type_of_a_flag_follows_the_annotation_or_the_default(
    function: Callable[..., None], words: str, arguments: dict[str, object] | str
) -> None:
    if isinstance(arguments, str):
        with pytest.raises(UsageError, match=arguments):
            arguments_of(function, function.__name__, parse_flags(words.split()))
        return
    given = arguments_of(function, function.__name__, parse_flags(words.split()))
    assert given == arguments and {name: type(value) for name, value in given.items()} == {
        name: type(value) for name, value in arguments.items()
    }
