"""Which tensors, modules and hooks a model has: a start builds it again, without later changes."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from lockstep.checkpoint.state_dict import named_tensors
from lockstep.errors import CheckpointError
from lockstep.log import log
from lockstep.runtime.torch_private import hook_count
from lockstep.units import join_names

FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    type,
)


class ModulePart(NamedTuple):
    """What a module computes with, apart from its tensors and numbers."""

    kind: type
    hooks: int
    functions: Mapping[str, Callable[..., Any]]  # attributes: an activation, another forward

    @classmethod
    def of(cls, module: nn.Module) -> ModulePart:
        functions = {
            name: value for name, value in vars(module).items() if isinstance(value, FUNCTIONS)
        }
        return cls(type(module), hook_count(module), functions)


class ModelForm:
    """Compares `model` with what it was at the start.

    module  whose modules and hooks are compared, too
    """

    def __init__(self, model: nn.Module | Mapping[str, Tensor], module: nn.Module) -> None:
        self.model = model
        self.module = module
        self.names = set(named_tensors(model))
        self.parts: dict[str, ModulePart] | None = None  # of the module, before the first step
        self._warned = False

    def note_modules(self) -> None:
        """Take the modules as they are before the first step."""
        self.parts = self._parts()

    def refuse_other_names(self) -> None:
        """CheckpointError: the model has other tensors than at the start, and no start could load
        them."""
        names = set(named_tensors(self.model))
        if names == self.names:
            return
        changes = {"new": sorted(names - self.names), "gone": sorted(self.names - names)}
        listed = "; ".join(
            f"{kind}: {join_names(changed)}" for kind, changed in changes.items() if changed
        )
        raise CheckpointError(
            f"the model's parameters and buffers changed during the run: {listed}",
            "checkpoints before the change are whole",
            "make all of them before session.prepare",
        )

    def warn_of_other_modules(self) -> None:
        """Warn once when modules or their hooks are others than before the first step."""
        if self.parts is None or self._warned:
            return
        now, before = self._parts(), self.parts
        changed = sorted(
            name for name in now.keys() | before.keys() if now.get(name) != before.get(name)
        )
        if changed:
            self._warned = True
            log.warning(
                "modules, hooks or functions of the model changed during the run: %s. A resume, and a worker that joins, build it "
                "without the change: let it follow from the step, `model.gate = step >= 300`, read in forward()",
                join_names([name or "the model" for name in changed]),
            )

    def _parts(self) -> dict[str, ModulePart]:
        return {name: ModulePart.of(module) for name, module in self.module.named_modules()}
