"""Load a user's function by name, and fingerprint the sources that this process runs.

A function is "examples/own_loop.py:train" or "package.module:train". The file is loaded as a module
with its folder first on the search path, as in `python FILE.py`: it can import its neighbors, and
its classes can be pickled for DataLoader workers.

The fingerprints of Lockstep and of the user's training loop are hashes of source files at load
time, independent of later edits and of their folder.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import UsageError

PACKAGE_FOLDER = f"{Path(__file__).resolve().parents[1]}{os.sep}"
INSTALLED = ("site-packages", "dist-packages")
user_code: dict[str, str] = {}  # {"own loop": ...} once a user's function is loaded


def fingerprint() -> dict[str, str]:
    """Return {"lockstep": "0.1.0, sources 3f2a..."}, and "own loop" for a user's function."""
    main = sys.modules.get("__main__")
    if not user_code and main and is_user_code(main):  # torchrun FILE.py
        record_user_code(main)
    return {"lockstep": f"{lockstep_version()}, sources {SOURCES}", **user_code}


@functools.cache
def lockstep_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 30 ms: only when needed

    try:
        return version("lockstep-train")
    except PackageNotFoundError:  # imported from PYTHONPATH
        return "not installed"


def record_user_code(module: ModuleType) -> None:
    """Record a user's loop: its file, and its imports from the same folder or package."""
    file = Path(module.__file__ or "").resolve()
    folder, package = (
        f"{file.parent}{os.sep}",
        (module.__package__ or module.__name__).partition(".")[0],
    )
    names = {str(file): file.name}
    for name, other in list(sys.modules.items()):
        if other is module:  # its __file__ may be relative (runpy)
            continue
        path = getattr(other, "__file__", None) or ""
        beside = path.startswith(folder) and not any(
            f"{os.sep}{part}{os.sep}" in path for part in INSTALLED
        )
        if (
            path.endswith(".py")
            and (beside or name.partition(".")[0] == package)
            and not path.startswith(PACKAGE_FOLDER)
        ):
            names.setdefault(path, path.removeprefix(folder) if beside else name)
    modules = [
        (name, Path(path).read_bytes()) for path, name in names.items() if os.path.isfile(path)
    ]
    more = f" and {len(modules) - 1} modules" if len(modules) > 1 else ""
    user_code["own loop"] = f"{file.name}{more}, sources {sha256_of(modules)}"


def is_user_code(module: ModuleType) -> bool:
    """Return whether the module is a user's program, not of an installed package or of Lockstep."""
    path = Path(getattr(module, "__file__", None) or "").resolve()
    is_lockstep = str(path).startswith(PACKAGE_FOLDER)
    return (
        path.suffix == ".py"
        and path.is_file()
        and not is_lockstep
        and not set(INSTALLED) & set(path.parts)
    )


def python_files_in(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of each Python file in a package folder, except hidden ones of
    editors."""
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder).as_posix()
        if "/." not in f"/{name}":
            yield name, path.read_bytes()


def sha256_of(modules: Iterable[tuple[str, bytes]]) -> str:
    """Return the first 12 hex digits of the sha256 over names and contents, sorted by name."""
    digest = hashlib.sha256()
    for name, content in sorted(modules):
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


SOURCES = sha256_of(python_files_in(Path(PACKAGE_FOLDER)))


def load_function(spelled: str) -> Callable[..., Any]:
    """Load FILE.py:FUNCTION or MODULE:FUNCTION. UsageError with the nearest names if missing."""
    where, _, name = spelled.rpartition(":")
    if not where or not name:
        raise UsageError(
            f"{spelled!r} names no function",
            "command line",
            "give FILE.py:FUNCTION, such as examples/own_loop.py:train",
        )
    module = load_file(Path(where)) if where.endswith(".py") else load_module(where)
    function = getattr(module, name, None)
    if not callable(function) or inspect.isbuiltin(function):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise UsageError(
            f"{where} has no function {name!r}"
            if function is None
            else f"{name!r} in {where} is not a Python function",
            f"command line: {spelled}",
            nearest(name, functions, "it has"),
        )
    if not user_code:
        record_user_code(module)
    loaded: Callable[..., Any] = function
    return loaded


def load_file(path: Path) -> ModuleType:
    if not path.is_file():
        folder = path.parent
        files = [str(file) for file in sorted(folder.glob("*.py"))] if folder.is_dir() else []
        raise UsageError(
            f"there is no file {path}",
            f"command line, in {Path.cwd()}",
            nearest(str(path), files, "there is"),
        )
    name, file = path.stem, path.resolve()
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() != file:
        raise UsageError(
            f"{path} has the name of the module {name!r}, which is already loaded",
            f"loaded from {getattr(known, '__file__', None) or 'Python itself'}",
            "give the file another name",
        )
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
        # A parent package exists but fails to import something.
        if not name.startswith(error.name or "?"):
            raise
        spec = None
    except ValueError:  # not a module name, such as "a..b"
        spec = None
    if spec is None:
        folder = Path.cwd().joinpath(*name.split(".")[:-1])
        prefix = name.rpartition(".")[0] + "." if "." in name else ""
        modules = [
            prefix + file.stem for file in sorted(folder.glob("*.py")) if file.stem != "__init__"
        ]
        raise UsageError(
            f"there is no module {name!r}",
            f"command line, in {Path.cwd()}",
            nearest(name, modules, "there is"),
        )
    return importlib.import_module(name)


def nearest(name: str, candidates: list[str], prefix: str) -> str:
    """Return a hint with the candidates closest to `name`, or with the first few."""
    close = get_close_matches(name, candidates, n=3) or candidates[:8]
    return f"{prefix} {', '.join(close)}" if close else "check the name and the current folder"
