"""Name what a user's loop changes from step to step, uses in later steps, and saves in no
checkpoint.

Two views complement each other. The source of the loop (loop_liveness.py) tells which variables
later steps use, even if they change every hundred steps only. The values (fingerprints.py) tell
what changes inside objects: an environment, a generator, a cache. A value that changes and is used
is named, in one warning, before the first checkpoint.
"""

from __future__ import annotations

import ast
import collections
import linecache
import os
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.log import log
from lockstep.training.fingerprints import (
    Look,
    Unfinished,
    attributes,
    closure_of,
    has_position,
    is_opaque,
    kind_of,
    locals_of,
)
from lockstep.training.loop_files import files_read_and_written
from lockstep.training.loop_forms import find_loop
from lockstep.training.loop_liveness import LoopLiveness, LoopVariables
from lockstep.training.user_functions import UserFunction, UserFunctions, own_nodes
from lockstep.training.user_modules import file_of, is_user_file, user_modules
from lockstep.units import join_names

LOOKS_AT_FIRST = 3  # before the first step, and at the end of the first two
SECONDS_OF_A_LOOK = 0.05
MAX_ATTRIBUTES = 3  # of one object that a warning lists one by one
SHARE = 0.01  # of the time of the loop that looks may take, after those before the first checkpoint
MAX_SOURCES = 60
MAX_SOURCE_BYTES = 1_000_000
TRAINED = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
UPDATES = ("step", "update_parameters")  # methods after which an object has another state


@dataclass(frozen=True)
class ComparedValue:
    """A value that is compared between looks, without the value."""

    variable: str  # its key in the source
    root: str  # the key of the variable that leads to it
    kind: str  # class of the object that has it; "" for a variable
    mark: int
    is_empty: bool  # None or an empty container: filled later by a cache
    always: bool  # weights: named however the source uses them


class UnsavedVariables:
    """The looks at one loop. held: objects that checkpoints hold, and Lockstep's; others: objects
    that the loop uses without a name, such as the data sets of its loaders."""

    def __init__(
        self, held: Sequence[Any], others: Sequence[Any] = (), *, enabled: bool = True
    ) -> None:
        self.held, self.skipped = held, set[int]()  # ids
        self.others = others
        self.looks, self.seconds, self.started = 0, 0.0, time.perf_counter()
        self.found: dict[str, str] = {}  # {path: description} for the next warning
        self.named: set[str] = set()
        self.slots: dict[str, ComparedValue] = {}
        self.lines: dict[str, str] = {}
        self.source: LoopVariables | None = None
        self.code: types.CodeType | None = None
        self.has_saved = False
        if enabled:
            self._guarded(self._start)

    def look(self, *, saves: bool) -> None:
        """Look, at the end of a step, at its variables. saves: a checkpoint of this step
        follows."""
        cheap = self.seconds < SHARE * (time.perf_counter() - self.started)
        due = self.looks < LOOKS_AT_FIRST or (saves and (cheap or not self.has_saved))
        if due and self.source is not None:
            self._guarded(lambda: self._look(saves))
        self.has_saved |= saves

    def _guarded(self, action: Any) -> None:
        started = time.perf_counter()
        try:
            action()
        except Exception as error:  # the user's loop does not fail for a warning
            log.debug(
                "the variables of the loop were not compared: %s: %s", type(error).__name__, error
            )
        self.seconds += time.perf_counter() - started

    def _start(self) -> None:
        frame = user_frame()
        if frame is None:
            return
        self.code = frame.f_code
        self.skipped = held_ids(self.held)
        self.modules = user_modules(frame, self.others)
        if (main := sys.modules["__main__"]) not in self.modules and vars(main) is frame.f_globals:
            self.modules.insert(0, main)  # a notebook
        self.module_names = {module.__name__ for module in self.modules} | {"__main__"}
        file = os.path.abspath(self.code.co_filename)
        self.functions = UserFunctions(sources_of(self.modules, file))
        line = 0 if self.code.co_name == "<module>" else self.code.co_firstlineno
        self.function = self.functions.by_line.get((file, line))
        if self.function is None or (path := find_loop(self.function.body, frame.f_lineno)) is None:
            return
        names = locals_of(frame)
        aliases, fixed = self._names_of_values(names, self.function)
        self.source = LoopLiveness(self.functions, aliases, fixed).run(
            self.function, frame.f_lineno
        )
        if self.source is None:
            return
        # `helper.factor` reads a global of a module that a function of that module assigns.
        imported = [
            value
            for value in {**frame.f_globals, **names}.values()
            if isinstance(value, types.ModuleType)
        ]
        attributes_of_modules = {
            name for module in imported if module in self.modules for name in vars(module)
        }
        read = {
            f"global:{name}" for name in attributes_of_modules if f".{name}" in self.source.live
        }
        self.of_modules = (read & self.source.assigned) - self.source.live
        self.source.live.update(self.of_modules)
        self.called = {function.name for function in self.source.reached}
        self.files = files_read_and_written(
            [path.loop, *(f.node for f in self.source.reached if f.node)]
        )
        self.updates = updating_calls(path.loop)
        self.slots = self._slots(names)
        self.looks = 1

    def _names_of_values(
        self, names: dict[str, Any], function: UserFunction
    ) -> tuple[dict[str, str], set[str]]:
        """Return the functions that variables hold, and the variables that hold what checkpoints
        have."""
        aliases, fixed = dict[str, str](), set[str]()
        outside = next(
            (vars(module) for module in self.modules if file_of(module) == function.file), {}
        )
        known = {
            f"global:{name}": value for name, value in outside.items() if not name.startswith("__")
        }
        known |= {function.variable(name): value for name, value in names.items()}
        for key, value in known.items():
            target = value.__func__ if isinstance(value, types.MethodType) else value
            if isinstance(target, types.FunctionType) and not key.endswith(
                f":{target.__code__.co_name}"
            ):
                aliases[key] = target.__code__.co_name
            if self._is_held(value):
                fixed.add(key)
            elif is_plain_object(value, self.module_names):
                fixed |= {
                    f".{attribute}" for attribute, item in attributes(value) if self._is_held(item)
                }
        return aliases, fixed

    def _is_held(self, value: Any) -> bool:
        if isinstance(value, torch.amp.GradScaler) and not value.is_enabled():
            return True  # it has no state
        module = type(value).__module__
        return id(value) in self.skipped or (
            isinstance(module, str) and module.partition(".")[0] == "lockstep"
        )

    def _look(self, saves: bool) -> None:
        frame = user_frame(self.code)
        if frame is None:
            return
        names = locals_of(frame)
        now = self._slots(names)
        self.looks += 1
        self.found |= {
            path: self._describe(path, slot)
            for path, slot in now.items()
            if self._has_changed(path, slot)
        }
        self.slots = now
        if self.looks >= LOOKS_AT_FIRST or saves:
            self.found |= self._from_source(names, now)
            self._warn({path: text for path, text in self.found.items() if path not in self.named})
            self.found = {}

    def _has_changed(self, path: str, slot: ComparedValue) -> bool:
        before = self.slots.get(path)
        if before is None or before.is_empty or before.mark == slot.mark:
            return False
        return slot.always or self._is_used(slot)

    def _is_used(self, slot: ComparedValue) -> bool:
        assert self.source is not None
        kind, _, name = slot.variable.partition(":")
        if kind == "called":
            return name in self.called
        if slot.variable == ".environ":
            return bool(
                {".environ", ".getenv", "global:environ", "global:getenv"} & self.source.live
            )
        if slot.variable in self.source.live:
            return slot.variable.removeprefix(".") not in self.functions.memos
        unknown = (
            slot.variable.startswith(".") and slot.variable[1:] not in self.functions.attributes
        )
        return unknown and slot.root in self.source.live

    def _from_source(self, names: dict[str, Any], now: dict[str, ComparedValue]) -> dict[str, str]:
        """Return {path: text} of what the source alone tells, and of positions in data."""
        assert self.source is not None and self.function is not None
        found, paths = {}, {slot.variable: path for path, slot in reversed(now.items())}
        walked = {slot.root for slot in now.values() if slot.variable.startswith(".")}
        for key, change in self.source.changes.items():
            if key.removeprefix(".") in self.functions.memos or (
                key in walked and "assign" not in change.kinds
            ):
                continue  # the attributes of an object tell more
            root, _, attribute = change.label.partition(".")
            path = change.label
            if key.startswith("."):
                here = change.file == self.function.file and root not in self.source.targets
                here = here and attribute in dict(attributes(names.get(root)))
                path = paths.get(key, change.label if here else "")
            value = self._value_of(key, root, names)
            if path and not self._is_known(value):
                found[path] = self._text(path, "", change.file, change.line)
        for name, value in names.items():
            key = self.function.variable(name)
            if key in self.source.live and has_position(value) and not self._is_known(value):
                found.setdefault(
                    name,
                    self._describe(name, ComparedValue(key, key, kind_of(value), 0, False, False)),
                )
        for path, line in self.updates.items():
            value = value_at(path, names)
            if has_state_dict(value) and not self._is_known(value):
                found.setdefault(path, self._text(path, kind_of(value), self.function.file, line))
        return found | {
            f"file {line}": f"a file that the loop writes and reads (line {line})"
            for line in self.files
        }

    def _value_of(self, key: str, name: str, names: dict[str, Any]) -> Any:
        assert self.function is not None
        if name in names and (key.startswith(".") or self.function.variable(name) == key):
            return names[name]
        return next((vars(module)[name] for module in self.modules if name in vars(module)), None)

    def _is_known(self, value: Any) -> bool:
        return value is not None and (self._is_held(value) or is_opaque(type(value)))

    def _describe(self, path: str, slot: ComparedValue) -> str:
        assert self.function is not None
        file, line = first_change(self.functions, self.function, slot.variable)
        return self._text(path, slot.kind, file, line)

    def _text(self, path: str, kind: str, file: str, line: int) -> str:
        assert self.function is not None
        where = f"line {line}" if file == self.function.file else f"{os.path.basename(file)}:{line}"
        parts = [part for part in (kind, where if line else "") if part]
        return f"{path} ({', '.join(parts)})" if parts else path

    def _warn(self, found: dict[str, str]) -> None:
        self.named |= set(found)
        if found:
            texts = grouped(found)
            log.warning(
                "the loop changes what no checkpoint holds: %s. After a resume, and in a worker that joins, "
                "each starts from its value before the loop. Keep it in the checkpoint: saved = session.state(best=0.0), "
                "then saved.best = ...; an object with state_dict and load_state_dict: session.state(name=object); "
                "what each micro-batch changes: session.per_micro_batch(tensor); or let it follow from the step "
                "(docs/loop.md)",
                ", ".join(texts),
            )

    # Values.

    def _slots(self, names: dict[str, Any]) -> dict[str, ComparedValue]:
        look = Look(
            self.skipped,
            lambda kind: kind.__module__ in self.module_names and not is_opaque(kind),
            SECONDS_OF_A_LOOK,
        )
        slots: dict[str, ComparedValue] = {}
        try:
            for path, root, value in self._roots(names):
                for slot_path, slot in slots_of(look, path, root, value):
                    slots.setdefault(slot_path, slot)
        except Unfinished:
            log.debug("not all variables of the loop were compared: %d objects", look.objects)
        return slots

    def _roots(self, names: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Yield (path, key, value) of what the loop can reach by name."""
        assert self.function is not None and self.source is not None
        if self.code and self.code.co_name != "<module>":
            for name, value in names.items():
                key = self.function.variable(name)
                if name in self.source.targets:
                    continue  # an element of what the inner loop walks
                if isinstance(value, types.FunctionType):
                    yield from self._roots_of_function(name, value)
                elif self._is_compared(name, key, value):
                    yield name, key, value
        for value in self.others:
            yield f"the data set {kind_of(value)}", "", value
        yield "os.environ", ".environ", dict(os.environ)
        for module in self.modules:
            yield from self._roots_of_module(module)

    def _roots_of_module(self, module: types.ModuleType) -> Iterator[tuple[str, str, Any]]:
        assert self.function is not None
        is_here = file_of(module) == self.function.file
        prefix = "" if is_here else f"{module.__name__}."
        for name, value in list(vars(module).items()):
            path = f"{prefix}{name}"
            if isinstance(value, types.FunctionType):
                yield from self._roots_of_function(path, value)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                yield from roots_of_class(path, value)
            elif self._is_compared(name, f"global:{name}", value):
                yield path, f"global:{name}", value

    def _roots_of_function(
        self, path: str, value: types.FunctionType
    ) -> Iterator[tuple[str, str, Any]]:
        """Yield what a function of the user's program keeps between its calls."""
        assert self.source is not None
        code = value.__code__
        function = self.functions.by_line.get(
            (os.path.abspath(code.co_filename), code.co_firstlineno)
        )
        if function is None:
            return
        for name, item in list(value.__dict__.items()):
            yield f"{path}.{name}", f".{name}", item
        if mutable := [item for item in value.__defaults__ or () if not is_simple(item)]:
            yield f"the default arguments of {path}", f"called:{code.co_name}", mutable
        for name, item in closure_of(value):
            key = function.variable(name)
            if not isinstance(item, types.FunctionType) and self._is_compared(name, key, item):
                yield name, key, item

    def _is_compared(self, name: str, key: str, value: Any) -> bool:
        """Return whether values tell more than the source, which knows each change of a plain
        variable."""
        assert self.source is not None
        if (
            name.startswith("__")
            or isinstance(value, type | types.ModuleType)
            or type(value).__module__ == "typing"
        ):
            return False
        by_source = key in self.source.assigned - self.of_modules and not isinstance(value, TRAINED)
        return not by_source or (
            key in self.source.live and is_plain_object(value, self.module_names)
        )


def slots_of(look: Look, path: str, root: str, value: Any) -> Iterator[tuple[str, ComparedValue]]:
    """Yield (path, slot) of a value, or of each attribute of an object of a user's class."""
    if isinstance(value, TRAINED) and id(value) not in look.skipped:
        tensors = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else value
        yield (
            path,
            ComparedValue(root, root, kind_of(value), look.fingerprint(tensors), False, True),
        )
    if look.is_object(value):
        for slot_path, attribute, kind, item in look.attributes(path, value):
            yield (
                slot_path,
                ComparedValue(
                    f".{attribute}",
                    root,
                    kind,
                    look.fingerprint(item),
                    is_empty(item),
                    isinstance(item, TRAINED),
                ),
            )
    elif not isinstance(value, TRAINED):
        kind = "" if is_simple(value) or type(value) in (list, dict, set, tuple) else kind_of(value)
        yield path, ComparedValue(root, root, kind, look.fingerprint(value), is_empty(value), False)


def updating_calls(loop: ast.AST) -> dict[str, int]:
    """Return {path: line} of the objects whose state a loop updates, though perhaps in a late step
    only."""
    calls = [node.func for node in ast.walk(loop) if isinstance(node, ast.Call)]
    return {
        ast.unparse(call.value): call.lineno
        for call in calls
        if isinstance(call, ast.Attribute) and call.attr in UPDATES
    }


def has_state_dict(value: Any) -> bool:
    methods = (getattr(type(value), name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods))


def value_at(path: str, names: Mapping[str, Any]) -> Any:
    """Return the value of a path such as `self.ema`; None without one."""
    first, *rest = path.split(".")
    value = names.get(first)
    for name in rest:
        value = dict(attributes(value)).get(name)
    return value


def is_empty(value: Any) -> bool:
    return value is None or (type(value) in (list, dict, set, tuple) and not value)


def roots_of_class(path: str, kind: type) -> Iterator[tuple[str, str, Any]]:
    """Yield the attributes that the objects of a class of the user's share."""
    for name, value in list(vars(kind).items()):
        is_code = (
            callable(value)
            or hasattr(type(value), "__get__")
            or isinstance(value, types.ModuleType)
        )
        if not name.startswith("__") and not is_code:
            yield f"{path}.{name}", f".{name}", value


def user_frame(code: types.CodeType | None = None) -> types.FrameType | None:
    """Return the innermost frame of the user's program that called this, or that runs `code`."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        is_user = is_user_file(os.path.abspath(frame.f_code.co_filename))
        if frame.f_code is code or (code is None and is_user):
            return frame
        frame = frame.f_back
    return None


def sources_of(modules: Sequence[types.ModuleType], first: str) -> dict[str, str]:
    """Return the texts of the user's files, the one of the loop first."""
    files = [first, *(file_of(module) for module in modules)]
    texts, size = dict[str, str](), 0
    for file in dict.fromkeys(files):
        if len(texts) >= MAX_SOURCES:
            break
        text = "".join(linecache.getlines(file))
        if not text:
            continue
        size += len(text)
        if texts and size > MAX_SOURCE_BYTES:
            break
        texts[file] = text
    return texts


def held_ids(held: Iterable[Any]) -> set[int]:
    """Return the ids of objects that checkpoints hold, and of what they consist of. The plain
    attributes of a module are not in its state_dict."""
    ids = set[int]()
    pending = list(held)
    while pending:
        value = pending.pop()
        if (
            id(value) in ids
            or is_simple(value)
            or isinstance(value, type | types.ModuleType | types.FunctionType)
        ):
            continue
        if not isinstance(value, tuple):  # equal constant tuples are one object
            ids.add(id(value))
        if isinstance(value, nn.Module):
            pending += [
                *value.children(),
                *value.parameters(recurse=False),
                *value.buffers(recurse=False),
            ]
        elif isinstance(value, dict):
            pending += dict.values(value)
        elif isinstance(value, list | tuple | set | collections.deque):
            pending += value
        elif not isinstance(value, torch.Tensor):
            pending += [item for _, item in attributes(value)]
    return ids


def is_plain_object(value: Any, modules: set[str]) -> bool:
    """Return whether the attributes of a value are compared one by one."""
    kind = type(value)
    return kind is types.SimpleNamespace or (
        kind.__module__ in modules and hasattr(value, "__dict__") and not isinstance(value, type)
    )


def is_simple(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def first_change(functions: UserFunctions, loop: UserFunction, variable: str) -> tuple[str, int]:
    """Return the file and line of the first change of a variable, or of its first use; "" and 0
    without one."""
    _, _, name = variable.rpartition("." if variable.startswith(".") else ":")
    ranked: list[tuple[tuple[bool, bool, bool], int, str]] = []
    for function in {id(f): f for f in functions.by_line.values()}.values():
        for node in own_nodes(function.body):
            is_attribute = isinstance(node, ast.Attribute) and variable == f".{node.attr}"
            if is_attribute or (
                isinstance(node, ast.Name)
                and node.id == name
                and function.variable(name) == variable
            ):
                assert isinstance(node, ast.Name | ast.Attribute)
                outside = function.name in ("__init__", "<module>") and function is not loop
                changes = isinstance(node.ctx, ast.Store)
                ranked.append(
                    ((outside, not changes, function is not loop), node.lineno, function.file)
                )
    if variable.startswith("called:"):
        found = functions.by_name.get(name, [])
        return (found[0].file, found[0].node.lineno) if found and found[0].node else ("", 0)
    _, line, file = min(ranked, default=(None, 0, ""))
    return file, line


def grouped(found: dict[str, str]) -> list[str]:
    """Return the texts, without attributes of an object that is named itself. Of more than three
    attributes of one object, the object with the number of them."""
    texts: list[str] = []
    owners: dict[str, list[str]] = {}
    for path in found:
        owners.setdefault(path.rpartition(".")[0], []).append(path)
    for owner, paths in owners.items():
        if owner and owner in found:
            continue
        if owner and len(paths) > MAX_ATTRIBUTES:
            names = [path.rpartition(".")[2] for path in paths]
            texts.append(f"{owner} ({join_names(names)})")
        else:
            texts += [found[path] for path in paths]
    return texts
