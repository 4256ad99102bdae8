"""The arguments of a user's function: the values of its run, which a resume compares."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, UsageError
from lockstep.record.backends import without_secrets

VALUES = "values"  # their name in the facts of a checkpoint
LENGTH = re.compile(r"((n|num|max|total)_)?(steps|epochs|iterations)|patience")
# Arguments of a Session or a loader that may change at a resume.
MAY_CHANGE = {
    "save_every",
    "resume",
    "track",
    "progress",
    "num_workers",
    "shard",
    "tensor",
    "pipeline",
}


@dataclass(frozen=True)
class FunctionValues:
    """The arguments of a user's function, with defaults.

    overrides  names of the arguments in --override
    """

    arguments: Mapping[str, Any]
    overrides: Collection[str] = ()

    def texts(self) -> dict[str, str]:
        """Return the arguments as text, without secrets."""
        return without_secrets({name: text_of(value) for name, value in self.arguments.items()})

    def shared(self) -> dict[str, str]:
        """Return the values that are equal on all workers: each host may have its own paths. The
        names are those of flags, whose text they replace."""
        texts = self.texts().items()
        return {
            f"--{name}": text
            for name, text in texts
            if name != "out" and not isinstance(self.arguments[name], Path)
        }

    def saved(self) -> dict[str, Any]:
        """Return what checkpoints hold. The values replace the flags, whose change is a warning."""
        return {VALUES: self.texts(), "flags": {}} if self.arguments else {}

    def overridden(
        self, out: Path, keep: int, facts: Mapping[str, Any], step: int
    ) -> dict[str, str]:
        """Return the values that --override has changed since the checkpoint of `step`, by name.

        out, keep  of the Session; arguments with these values may change
        CheckpointError when other values have changed.
        """
        saved = facts.get(VALUES, {})
        changed = {
            name: text
            for name, text in self.texts().items()
            if saved.get(name, text) != text and not self._may_change(name, out, keep)
        }
        if refused := [name for name in changed if name not in self.overrides]:
            was = ", ".join(f"{name} = {saved[name]}" for name in refused)
            now = ", ".join(f"{name} = {changed[name]}" for name in refused)
            words = " ".join(f"--override {name}={changed[name]}" for name in refused)
            raise CheckpointError(
                f"the checkpoint of step {step} was trained with {was}, and this start has {now}",
                f"the arguments of the function, and {out / 'checkpoints'}",
                "give the old values, or another folder for a new run\n"
                f"to change them on purpose from step {step} on: {words}",
            )
        return changed

    def refuse_new_run(self) -> None:
        """UsageError for --override in a run that has no checkpoint."""
        if self.overrides:
            words = " ".join(f"--{name} {text_of(self.arguments[name])}" for name in self.overrides)
            raise UsageError(
                "there is no run to override", "--override", f"for a new run give {words}"
            )

    def _may_change(self, name: str, out: Path, keep: int) -> bool:
        value = self.arguments[name]
        is_folder = name == "out" or (isinstance(value, str | Path) and Path(value) == out)
        is_keep = name == "keep" and value == keep
        return is_folder or is_keep or name in MAY_CHANGE or bool(LENGTH.fullmatch(name))


def text_of(value: object) -> str:
    """Return the value as text, the same in each process."""
    if isinstance(value, set | frozenset):
        return repr(sorted(value, key=repr))
    if isinstance(value, str | Path):
        return str(value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


NO_VALUES = FunctionValues({})
_running = ContextVar("values of the function", default=NO_VALUES)


def call_with(function: Callable[..., object], values: FunctionValues) -> None:
    """Call a user's function. A Session that it opens finds the values."""
    token = _running.set(values)
    try:
        function(**values.arguments)
    finally:
        _running.reset(token)


def running() -> FunctionValues:
    """Return the values of the function that is running; none in a script."""
    return _running.get()
