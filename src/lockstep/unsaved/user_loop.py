"""A user's loop that is running: the modules of its program, what their source tells, and the
values that it reaches by name."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from lockstep.unsaved.loop_forms import find_loop
from lockstep.unsaved.loop_walk import loop_variables
from lockstep.unsaved.user_functions import UserFunctions, imports_of
from lockstep.unsaved.values import (
    PLAIN,
    attributes,
    closure_of,
    is_plain_object,
    kind_of,
    locals_of,
)

PACKAGE = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}{os.sep}"
LIBRARY = f"{os.path.dirname(os.__file__)}{os.sep}"
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
MAX_SOURCES = 60
MAX_SOURCE_BYTES = 1_000_000
TRAINED = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
Root = tuple[str, str, Any]  # path of a value, the key of its variable, the value


class UserLoop:
    """A loop in the program of a user.

    modules  of the program
    others   objects that the loop uses without a name, such as the data sets of its loaders
    is_held  returns whether checkpoints hold a value
    """

    def __init__(
        self,
        frame: types.FrameType,
        modules: Sequence[types.ModuleType],
        others: Sequence[Any],
        is_held: Callable[[Any], bool],
    ) -> None:
        """LookupError without the source of the loop that the frame is in."""
        self.code = frame.f_code
        self.modules = modules
        self.module_names = {module.__name__ for module in modules} | {"__main__"}
        self.others = others
        file = file_of_frame(frame)
        self.functions = UserFunctions(sources_of(modules, file))
        line = 0 if self.code.co_name == "<module>" else self.code.co_firstlineno
        self.function = self.functions.by_line[file, line]
        path = find_loop(self.function.body, frame.f_lineno)
        if path is None:
            raise LookupError(f"no loop in line {frame.f_lineno} of {file}")
        self.path = path
        aliases, fixed = self._names_of_values(frame, is_held)
        self.source = loop_variables(self.functions, self.function, path, aliases, fixed)

    def _names_of_values(
        self, frame: types.FrameType, is_held: Callable[[Any], bool]
    ) -> tuple[dict[str, str], set[str]]:
        """Return the functions that variables hold, and the variables that hold what checkpoints
        have."""
        aliases, fixed = dict[str, str](), set[str]()
        known = {f"global:{name}": value for name, value in list(frame.f_globals.items())}
        known |= {self.function.variable(name): v for name, v in locals_of(frame).items()}
        for key, value in known.items():
            target = value.__func__ if isinstance(value, types.MethodType) else value
            if isinstance(target, types.FunctionType):
                name = target.__code__.co_name
                if not key.endswith(f":{name}"):
                    aliases[key] = name
            if is_held(value):
                fixed.add(key)
            elif is_plain_object(value, self.module_names):
                fixed |= {f".{name}" for name, item in attributes(value) if is_held(item)}
        return aliases, fixed

    def is_used(self, variable: str, root: str) -> bool:
        """Return whether a later step uses a variable; `root` is the one that leads to it."""
        live, attribute = self.source.live, variable.removeprefix(".")
        if variable.startswith("called:"):
            return variable in self.source.places
        if variable == ".environ":
            return bool({".environ", ".getenv", "global:environ", "global:getenv"} & live)
        if variable in live:
            return attribute not in self.functions.memos
        is_unknown = variable != attribute and attribute not in self.functions.attributes
        return is_unknown and root in live

    def value_of(self, key: str, name: str, names: Mapping[str, Any]) -> Any:
        if name in names and (key.startswith(".") or self.function.variable(name) == key):
            return names[name]
        return next((vars(module)[name] for module in self.modules if name in vars(module)), None)

    def describe(self, path: str, kind: str, variable: str) -> str:
        """Return the path with the class of the object, and the line of its first change."""
        return self.text(path, kind, *self.source.places.get(variable, ("", 0)))

    def text(self, path: str, kind: str, file: str, line: int) -> str:
        where = f"line {line}" if file == self.function.file else f"{os.path.basename(file)}:{line}"
        parts = [part for part in (kind, where if line else "") if part]
        return f"{path} ({', '.join(parts)})" if parts else path

    # Values.

    def roots(self, names: Mapping[str, Any]) -> Iterator[Root]:
        """Yield what the loop can reach by name."""
        if self.code.co_name != "<module>":
            for name, value in names.items():
                if name not in self.source.targets:  # an element of what an inner loop walks
                    yield from self._roots_of_value(name, self.function.variable(name), value)
        for value in self.others:
            yield f"the data set {kind_of(value)}", "", value
        yield "os.environ", ".environ", dict(os.environ)
        for module in self.modules:
            prefix = "" if file_of(module) == self.function.file else f"{module.__name__}."
            for name, value in list(vars(module).items()):
                if name.startswith("__"):
                    continue
                if isinstance(value, type) and value.__module__ == module.__name__:
                    yield from roots_of_class(f"{prefix}{name}", value)
                else:
                    yield from self._roots_of_value(f"{prefix}{name}", f"global:{name}", value)

    def _roots_of_value(self, path: str, key: str, value: Any) -> Iterator[Root]:
        """Yield a variable, or what a function of the user's program keeps between its calls."""
        if not isinstance(value, types.FunctionType):
            if self._is_compared(key, value):
                yield path, key, value
            return
        code = value.__code__
        at = os.path.abspath(code.co_filename), code.co_firstlineno
        function = self.functions.by_line.get(at)
        if function is None:
            return
        for name, item in list(value.__dict__.items()):
            yield f"{path}.{name}", f".{name}", item
        if mutable := [item for item in value.__defaults__ or () if type(item) not in PLAIN]:
            yield f"the default arguments of {path}", f"called:{code.co_name}", mutable
        for name, item in closure_of(value):
            key = function.variable(name)
            if not isinstance(item, types.FunctionType) and self._is_compared(key, item):
                yield name, key, item

    def _is_compared(self, key: str, value: Any) -> bool:
        """Return whether values tell more than the source, which knows each change of a plain
        variable."""
        is_static = isinstance(value, type | types.ModuleType)
        if is_static or ":__" in key or type(value).__module__ == "typing":
            return False
        if key not in self.source.assigned or isinstance(value, TRAINED):
            return True
        return key in self.source.live and is_plain_object(value, self.module_names)


def roots_of_class(path: str, kind: type) -> Iterator[Root]:
    """Yield the attributes that the objects of a class of the user's share."""
    for name, value in list(vars(kind).items()):
        is_code = callable(value) or hasattr(type(value), "__get__")
        if not name.startswith("__") and not is_code and not isinstance(value, types.ModuleType):
            yield f"{path}.{name}", f".{name}", value


def user_frame(code: types.CodeType | None = None) -> types.FrameType | None:
    """Return the innermost frame of the user's program that called this, or that runs `code`."""
    for frame in callers(sys._getframe(1)):
        if frame.f_code is code or (code is None and is_user_file(file_of_frame(frame))):
            return frame
    return None


def callers(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield the frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def file_of_frame(frame: types.FrameType) -> str:
    return os.path.abspath(frame.f_code.co_filename)


def sources_of(modules: Sequence[types.ModuleType], first: str) -> dict[str, str]:
    """Return the texts of the user's files, the one of the loop first."""
    texts, size = dict[str, str](), 0
    for file in dict.fromkeys([first, *map(file_of, modules)]):
        text = text_of(file)
        size += len(text)
        if texts and (size > MAX_SOURCE_BYTES or len(texts) >= MAX_SOURCES):
            break
        if text:
            texts[file] = text
    return texts


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
    pending = [*map(file_of_frame, callers(frame)), *map(file_of_value, values)]
    found: dict[str, types.ModuleType] = {}
    for path in pending:  # grows
        if path in loaded and path not in found:
            found[path] = loaded[path]
            pending += [other for name in imported_parts(path) for other in by_stem[name]]
    main = sys.modules["__main__"]
    is_notebook = main not in found.values() and vars(main) is frame.f_globals
    return [main, *found.values()] if is_notebook else [*found.values()]


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


def stem_of(path: str) -> str:
    """Return the name by which a file is imported: of `a/__init__.py` it is `a`."""
    file = PurePath(path)
    return file.parent.name if file.stem == "__init__" else file.stem


def imported_parts(path: str) -> set[str]:
    """Return all parts of the names that a file imports, in functions too."""
    try:
        tree = ast.parse(text_of(path))
    except (SyntaxError, ValueError):
        return set()
    return set[str]().union(*(parts for parts, _, _ in imports_of(tree)))


def text_of(path: str) -> str:
    """Return the source as Python has it: of a notebook's cell, too."""
    return "".join(linecache.getlines(path))
