"""Name what a user's loop changes from step to step, uses in later steps, and saves in no
checkpoint.

Two views complement each other. The source of the loop (loop_walk.py) tells which variables
later steps use, even if they change every hundred steps only. The values (values.py) tell
what changes inside objects: an environment, a generator, a cache. A value that changes and is used
is named, in one warning, before the first checkpoint.
"""

from __future__ import annotations

import ast
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.log import log
from lockstep.units import join_names
from lockstep.unsaved.loop_forms import files_read_and_written
from lockstep.unsaved.user_loop import TRAINED, UserLoop, user_frame, user_modules
from lockstep.unsaved.values import (
    FUNCTIONS,
    PLAIN,
    Look,
    Unfinished,
    attributes,
    internal_state,
    is_opaque,
    kind_of,
    locals_of,
    parts_of,
)

LOOKS_AT_FIRST = 3  # before the first step, and at the end of the first two
SECONDS_OF_A_LOOK = 0.05
MAX_ATTRIBUTES = 3  # of one object that a warning lists one by one
SHARE = 0.01  # of the time of the loop that looks may take, after those before the first checkpoint
# Methods after which an object has another state, such as the average of torch_ema.
UPDATES = ("step", "update", "update_parameters")


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

    def __init__(self, held: Sequence[Any], others: Sequence[Any] = ()) -> None:
        self.held = held
        self.others = others
        self.loop: UserLoop | None = None
        self.skipped: set[int] = set()  # ids of what checkpoints hold
        self.looks = 0
        self.seconds = 0.0
        self.started = time.perf_counter()
        self.values: dict[str, ComparedValue] = {}  # by path, in the newest look
        self.found: dict[str, str] = {}  # {path: description} for the next warning
        self.named: set[str] = set()
        self.has_saved = False
        with self._guarded():
            self._start()

    def look(self, *, saves: bool) -> None:
        """Look, at the end of a step, at its variables. saves: a checkpoint of this step
        follows."""
        cheap = self.seconds < SHARE * (time.perf_counter() - self.started)
        due = self.looks < LOOKS_AT_FIRST or (saves and (cheap or not self.has_saved))
        if due and self.loop is not None:
            with self._guarded():
                self._look(self.loop, saves)
        self.has_saved |= saves

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except Exception as error:  # the user's loop does not fail for a warning
            log.debug(
                "the variables of the loop were not compared: %s: %s", type(error).__name__, error
            )
        self.seconds += time.perf_counter() - started

    def _start(self) -> None:
        frame = user_frame()
        if frame is None:
            return
        self.skipped = held_ids(self.held)
        modules = user_modules(frame, self.others)
        loop = self.loop = UserLoop(frame, modules, self.others, self._is_held)
        self.values = self._values(loop, locals_of(frame))
        self.looks = 1

    def _look(self, loop: UserLoop, saves: bool) -> None:
        frame = user_frame(loop.code)
        if frame is None:
            return
        names = locals_of(frame)
        now = self._values(loop, names)
        self.looks += 1
        for path, value in now.items():
            before = self.values.get(path)
            if before is None or before.is_empty or before.mark == value.mark:
                continue
            if value.always or loop.is_used(value.variable, value.root):
                self.found[path] = loop.describe(path, value.kind, value.variable)
        self.values = now
        if self.looks >= LOOKS_AT_FIRST or saves:
            self._read_source(loop, names)
            warn_of({path: text for path, text in self.found.items() if path not in self.named})
            self.named |= set(self.found)
            self.found = {}

    def _values(self, loop: UserLoop, names: Mapping[str, Any]) -> dict[str, ComparedValue]:
        look = Look(self.skipped, loop.module_names, SECONDS_OF_A_LOOK)
        values: dict[str, ComparedValue] = {}
        try:
            for path, root, value in loop.roots(names):
                for inner_path, compared in compared_values(look, path, root, value):
                    values.setdefault(inner_path, compared)
        except Unfinished:
            log.debug("not all variables of the loop were compared: %d objects", look.objects)
        return values

    def _read_source(self, loop: UserLoop, names: Mapping[str, Any]) -> None:
        """Add to `found` what the source alone tells, and positions in data."""
        self.found.update(self._changes(loop, names))
        for name, value in names.items():
            key = loop.function.variable(name)
            is_live = key in loop.source.live and not self._is_known(value)
            if is_live and internal_state(value) is not None:
                self.found.setdefault(name, loop.describe(name, kind_of(value), key))
        for path, line in updating_calls(loop.path.loop).items():
            value = value_at(path, names)
            if has_state_dict(value) and not self._is_known(value):
                text = loop.text(path, kind_of(value), loop.function.file, line)
                self.found.setdefault(path, text)
        reached = [function.node for function in loop.source.reached]
        for line in files_read_and_written([loop.path.loop, *reached]):
            self.found[f"file {line}"] = f"a file that the loop writes and reads (line {line})"

    def _changes(self, loop: UserLoop, names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield (path, text) of the variables that statements of the source change."""
        paths = {value.variable: path for path, value in reversed(self.values.items())}
        walked = {value.root for value in self.values.values() if value.variable.startswith(".")}
        for key, change in loop.source.changes.items():
            is_walked = key in walked and "assign" not in change.kinds
            if is_walked or key.removeprefix(".") in loop.functions.memos:
                continue  # the attributes of an object tell more
            root, _, attribute = change.label.partition(".")
            path = change.label
            if key.startswith("."):
                is_here = change.file == loop.function.file and root not in loop.source.targets
                is_here = is_here and attribute in dict(attributes(names.get(root)))
                path = paths.get(key, change.label if is_here else "")
            if path and not self._is_known(loop.value_of(key, root, names)):
                yield path, loop.text(path, "", change.file, change.line)

    def _is_held(self, value: Any) -> bool:
        if isinstance(value, torch.amp.GradScaler) and not value.is_enabled():
            return True  # it has no state
        module = type(value).__module__
        is_own = isinstance(module, str) and module.partition(".")[0] == "lockstep"
        return id(value) in self.skipped or is_own

    def _is_known(self, value: Any) -> bool:
        return value is not None and (self._is_held(value) or is_opaque(type(value)))


def warn_of(found: Mapping[str, str]) -> None:
    if found:
        log.warning(
            "the loop changes what no checkpoint holds: %s. After a resume, and in a worker "
            "that joins, each starts from its value before the loop. Keep it in the checkpoint: "
            "saved = session.state(best=0.0), then saved.best = ...; an object with state_dict "
            "and load_state_dict: session.state(name=object); what each micro-batch changes: "
            "session.per_micro_batch(tensor); or let it follow from the step (docs/loop.md)",
            ", ".join(grouped(found)),
        )


def compared_values(
    look: Look, path: str, root: str, value: Any
) -> Iterator[tuple[str, ComparedValue]]:
    """Yield (path, compared value) of a value, or of each attribute of an object of a user's
    class."""
    if isinstance(value, TRAINED) and id(value) not in look.skipped:
        tensors = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else value
        mark = look.hash_of(tensors)
        yield path, ComparedValue(root, root, kind_of(value), mark, False, True)
    found: Iterable[tuple[str, str, str, Any]] = ()  # path, variable, kind, value
    if look.is_object(value):
        found = look.attributes(path, value)
    elif not isinstance(value, TRAINED):
        is_builtin = type(value) in (*PLAIN, list, dict, set, tuple)
        found = [(path, root, "" if is_builtin else kind_of(value), value)]
    for inner_path, variable, kind, item in found:
        mark, always = look.hash_of(item), isinstance(item, TRAINED)
        yield inner_path, ComparedValue(variable, root, kind, mark, is_empty(item), always)


def updating_calls(loop: ast.AST) -> dict[str, int]:
    """Return {path: line} of the objects whose state a loop updates, though perhaps in a late step
    only. It carries nothing in one that it resets, such as a metric of each validation."""
    functions = [node.func for node in ast.walk(loop) if isinstance(node, ast.Call)]
    methods = [function for function in functions if isinstance(function, ast.Attribute)]
    branches = [{*ast.walk(node)} for node in ast.walk(loop) if isinstance(node, ast.If)]

    def is_reset(update: ast.Attribute) -> bool:
        """Return whether the loop resets the object wherever it updates it."""
        elsewhere = {node for branch in branches if update not in branch for node in branch}
        path = ast.unparse(update.value)
        resets = [method for method in methods if method.attr == "reset"]
        return any(ast.unparse(r.value) == path and r not in elsewhere for r in resets)

    updates = [method for method in methods if method.attr in UPDATES]
    return {ast.unparse(u.value): u.lineno for u in updates if not is_reset(u)}


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


def held_ids(held: Iterable[Any]) -> set[int]:
    """Return the ids of objects that checkpoints hold, and of what they consist of. The plain
    attributes of a module are not in its state_dict."""
    ids = set[int]()
    pending = list(held)
    while pending:
        value = pending.pop()
        is_code = isinstance(value, (type, types.ModuleType, *FUNCTIONS))
        if id(value) in ids or type(value) in PLAIN or is_code:
            continue
        if not isinstance(value, tuple):  # equal constant tuples are one object
            ids.add(id(value))
        if isinstance(value, nn.Module):
            pending += [*value.children(), *value.parameters(), *value.buffers()]
        elif not isinstance(value, torch.Tensor):
            pending += parts_of(value, sys.maxsize)
    return ids


def grouped(found: Mapping[str, str]) -> list[str]:
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
