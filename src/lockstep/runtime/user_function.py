"""Load a user's function by name: "examples/own_loop.py:train" or "package.module:train".

The file is loaded as a module with its folder first on the search path, as in `python FILE.py`: it
can import its neighbors, and its classes can be pickled for DataLoader workers.
"""

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
    """Load FILE.py:FUNCTION or MODULE:FUNCTION. UsageError with the nearest names if missing."""
    where, _, name = spelled.rpartition(":")
    if not where or not name:
        raise UsageError(f"{spelled!r} names no function", "command line", "give FILE.py:FUNCTION, such as examples/own_loop.py:train")
    module = load_file(Path(where)) if where.endswith(".py") else load_module(where)
    function = getattr(module, name, None)
    if not callable(function) or inspect.isbuiltin(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        what = f"{where} has no function {name!r}" if function is None else f"{name!r} in {where} is not a Python function"
        raise UsageError(what, f"command line: {spelled}", nearest(name, functions, "it has"))
    if not sources.user_code:
        sources.record_user_code(module)
    loaded: Callable[..., Any] = function
    return loaded


def load_file(path: Path) -> ModuleType:
    if not path.is_file():
        folder = path.parent
        files = [str(file) for file in sorted(folder.glob("*.py"))] if folder.is_dir() else []
        raise UsageError(f"there is no file {path}", f"command line, in {Path.cwd()}", nearest(str(path), files, "there is"))
    name, file = path.stem, path.resolve()
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() != file:
        what = f"{path} has the name of the module {name!r}, which is already loaded"
        raise UsageError(what, f"loaded from {getattr(known, '__file__', None) or 'Python itself'}", "give the file another name")
    if known is not None:
        return known
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the file name ends with .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_module(name: str) -> ModuleType:
    """Import the module `name`; the current folder comes first on the search path."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or "?"):  # a parent package exists but fails to import something
            raise
        spec = None
    except ValueError:  # not a module name, such as "a..b"
        spec = None
    if spec is None:
        folder = Path.cwd().joinpath(*name.split(".")[:-1])
        prefix = name.rpartition(".")[0] + "." if "." in name else ""
        modules = [prefix + file.stem for file in sorted(folder.glob("*.py")) if file.stem != "__init__"]
        raise UsageError(f"there is no module {name!r}", f"command line, in {Path.cwd()}", nearest(name, modules, "there is"))
    return importlib.import_module(name)


def nearest(name: str, candidates: list[str], prefix: str) -> str:
    """Return a hint with the candidates closest to `name`, or with the first few."""
    close = get_close_matches(name, candidates, n=3) or candidates[:8]
    return f"{prefix} {', '.join(close)}" if close else "check the name and the current folder"
