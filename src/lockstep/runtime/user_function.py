"""A user's own function by its name: "examples/own_loop.py:train" or "package.module:train".

The file is loaded as an ordinary module, with its folder in front of the search path, as `python FILE.py` has it: its neighbours can be
imported, and its classes can be sent to worker processes of a data loader. What it raises while it loads is the user's own error.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import UsageError
from lockstep.runtime import sources


def load_function(spelled: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION or MODULE:FUNCTION names. UsageError, with the nearest names, when there is none."""
    where, _, name = spelled.rpartition(":")
    if not where or not name:
        raise UsageError(f"{spelled!r} names no function", "command line", "write FILE.py:FUNCTION, such as examples/own_loop.py:train")
    module = load_file(Path(where)) if where.endswith(".py") else load_module(where)
    function = getattr(module, name, None)
    if not callable(function) or inspect.isbuiltin(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        what = f"{where} has no function {name!r}" if function is None else f"{name!r} in {where} is no Python function"
        raise UsageError(what, f"command line: {spelled}", nearest(name, there, "it has"))
    if not sources.own:
        sources.note_own(module)
    loaded: Callable[..., Any] = function
    return loaded


def load_file(path: Path) -> ModuleType:
    """The module in the file at `path`."""
    if not path.is_file():
        folder = path.parent
        there = [str(one) for one in sorted(folder.glob("*.py"))] if folder.is_dir() else []
        raise UsageError(f"there is no file {path}", f"command line, seen from {Path.cwd()}", nearest(str(path), there, "there is"))
    name, file = path.stem, path.resolve()
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() != file:
        what = f"{path} is called like the module {name!r}, which is loaded already"
        raise UsageError(what, f"that one is {getattr(known, '__file__', None) or 'part of Python'}", "give the file another name")
    if known is not None:
        return known
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the name ends with .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_module(name: str) -> ModuleType:
    """The module `name`, looked for in the current folder first."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or "?"):  # a package on the way exists, and misses something itself
            raise
        found = None
    except ValueError:  # no name of a module, such as "a..b"
        found = None
    if found is None:
        folder = Path.cwd().joinpath(*name.split(".")[:-1])
        prefix = name.rpartition(".")[0] + "." if "." in name else ""
        there = [prefix + one.stem for one in sorted(folder.glob("*.py")) if one.stem != "__init__"]
        raise UsageError(f"there is no module {name!r}", f"command line, seen from {Path.cwd()}", nearest(name, there, "there is"))
    return importlib.import_module(name)


def nearest(name: str, there: list[str], begin: str) -> str:
    """A hint: the names like `name`, or all of a few."""
    like = get_close_matches(name, there, n=3) or there[:8]
    return f"{begin} {', '.join(like)}" if like else "is the name right, and is this the right folder?"
