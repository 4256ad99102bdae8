"""The changes of variables in the source of a user's loop, and which of them carry nothing."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lockstep.training import loop_forms
from lockstep.training.loop_names import Names


@dataclass
class Change:
    """Where the body of the loop changes a variable.

    kinds   "assign", "augment", "append", "mutate"; "lazy": only in its first use
    values  (reads a clock, variables) of each value
    """

    label: str
    file: str
    line: int
    kinds: set[str] = field(default_factory=set)
    values: list[tuple[bool, set[str]]] = field(default_factory=list)


class Changes:
    """The changes that a walk through the loop has met, by key of the variable."""

    def __init__(self) -> None:
        self.by_key: dict[str, Change] = {}
        self.extremes: set[str] = set()  # keys: `best = max(best, score)`
        self.targets: set[str] = set()  # keys: of `for` loops
        self.lazy: set[int] = set()  # ids of targets that are assigned once, in their first use

    def record(
        self, names: Names, target: ast.expr, kind: str, value: ast.expr | None = None
    ) -> None:
        key = names.key(target)
        if not key or key in loop_forms.GRADIENTS:
            return
        if loop_forms.is_extreme(target, value):
            self.extremes.add(key)
        kind = "lazy" if id(target) in self.lazy else kind
        while isinstance(target, ast.Subscript | ast.Starred):
            target = target.value
        file = names.function.file
        change = self.by_key.setdefault(key, Change(ast.unparse(target), file, target.lineno))
        if change.file == file and target.lineno < change.line:
            change = self.by_key[key] = replace(change, line=target.lineno)
        change.kinds.add(kind)
        nodes = [*ast.walk(value)] if value else []
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        reads_clock = any(loop_forms.last_name(call.func) in loop_forms.CLOCKS for call in calls)
        keys = {names.key(node) for node in nodes if loop_forms.last_name(node)}
        change.values.append((reads_clock, keys))

    def record_branch(self, names: Names, statement: ast.If) -> None:
        """Note `if score > best: best = score`."""
        self.extremes |= set(map(names.key, loop_forms.extremes(statement)))

    def carrying(self, live: set[str], fixed: set[str], body: Sequence[ast.stmt]) -> set[str]:
        """Return the keys of the live variables that may carry a value to the next step."""
        return {
            key
            for key, change in self.by_key.items()
            if key in live
            and not self._is_clock(key)
            and not self._is_lazy(change, fixed)
            and not loop_forms.ends_constant(body, change.label)
        }

    def _is_clock(self, key: str, seen: frozenset[str] = frozenset()) -> bool:
        """Return whether all values of a variable come from a clock."""
        if key not in self.by_key or key in seen:
            return False
        for reads_clock, inputs in self.by_key[key].values:
            others = inputs & self.by_key.keys() - {key}
            is_derived = others and all(self._is_clock(other, seen | {key}) for other in others)
            if not reads_clock and not is_derived:
                return False
        return True

    def _is_lazy(self, change: Change, fixed: set[str]) -> bool:
        """Return whether a variable is only filled once, with values that no step changes."""
        inputs = set[str]().union(*(keys for _, keys in change.values))
        moving = self.by_key.keys() | fixed | self.targets
        return change.kinds == {"lazy"} and not inputs & moving
