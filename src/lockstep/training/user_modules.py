"""The modules of a user's program that a training loop may use."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

from lockstep.training.fingerprints import locals_of

PACKAGE = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}{os.sep}"
LIBRARY = f"{os.path.dirname(os.__file__)}{os.sep}"
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def user_modules(frame: types.FrameType, others: Iterable[Any] = ()) -> list[types.ModuleType]:
    """Return the modules that the loop and its callers import, directly or not, and those of the
    classes of its variables; those of the callers first.

    frame   of the loop
    others  objects that the loop uses without a name
    """
    loaded = loaded_modules()
    by_stem: dict[str, list[str]] = defaultdict(list)
    for path in loaded:
        by_stem[stem_of(path)].append(path)
    values = [*frame.f_globals.values(), *locals_of(frame).values(), *others]
    pending = [*files_of_callers(frame), *filter(None, map(file_of_value, values))]
    found: dict[str, types.ModuleType] = {}
    for path in pending:  # grows
        if path in loaded and path not in found:
            found[path] = loaded[path]
            pending += [other for name in imported_parts(path) for other in by_stem[name]]
    return list(found.values())


def loaded_modules() -> dict[str, types.ModuleType]:
    """Return the loaded modules by file, without those of Python, of Lockstep and of installed
    packages."""
    found: dict[str, types.ModuleType] = {}
    for module in list(sys.modules.values()):
        path = file_of(module)
        if path.endswith(".py") and is_user_file(path):
            found.setdefault(path, module)
    return found


def is_user_file(path: str) -> bool:
    """Return whether a file belongs to neither Python, nor Lockstep, nor an installed package."""
    is_installed = any(part in path for part in INSTALLED)
    return not is_installed and not path.startswith((PACKAGE, LIBRARY))


def file_of(module: types.ModuleType) -> str:
    """Return the absolute path of a module's file; "" without one."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return os.path.abspath(file) if isinstance(file, str) else ""


def file_of_value(value: Any) -> str:
    """Return the file of a module, or of the class or function that a value is or has."""
    if isinstance(value, types.ModuleType):
        return file_of(value)
    owner = value if isinstance(value, type | types.FunctionType) else type(value)
    module = sys.modules.get(owner.__module__) if isinstance(owner.__module__, str) else None
    return file_of(module) if module else ""


def files_of_callers(frame: types.FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield os.path.abspath(frame.f_code.co_filename)
        frame = frame.f_back


def stem_of(path: str) -> str:
    """Return the name by which a file is imported: of `a/__init__.py` it is `a`."""
    file = PurePath(path)
    return file.parent.name if file.stem == "__init__" else file.stem


def imported_parts(path: str) -> set[str]:
    """Return all parts of the names that a file imports, in functions too."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return set()
    parts: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            parts.update(part for name in names for part in name.split("."))
    return parts
