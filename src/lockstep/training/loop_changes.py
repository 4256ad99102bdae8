"""Detect changes of the training state in the micro-batch loop.

How many micro-batches a worker computes depends on the number of workers. So weights, a learning
rate, a scheduler or an average that change with each of them get other bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lockstep.checkpoint.json_tree import pack
from lockstep.errors import UsageError
from lockstep.parallel.digest import digest_of
from lockstep.parallel.frozen_state import FrozenState
from lockstep.runtime.torch_private import modules_of, unique_parameters, version_of
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.saved_state import PlainValue
from lockstep.units import join_names

log = logging.getLogger("lockstep")


class LoopChanges:
    """Compares weights and state before the micro-batches of a step with those after.

    In the first step of a start it compares the bytes of the weights, the state objects and the
    numbers that modules keep as attributes; in later steps torch's counters of in-place changes
    of the weights, the parameter groups, and the plain values of session.state.
    """

    def __init__(self, module: nn.Module, checkpointer: Checkpointer | None) -> None:
        self.module = module
        self.checkpointer = checkpointer
        self.first_step = True
        self._modes: list[bool] = []  # of the modules, as their names below were found
        self._evaluating: list[str] = []
        self._parameters: list[nn.Parameter] = []  # the same for the weights
        self._weights: dict[str, nn.Parameter] = {}

    def start(self, frozen_state: FrozenState) -> None:
        self._buffers = frozen_state.buffers()
        modules = modules_of(self.module)
        if self.checkpointer:
            self.checkpointer.follow_eval_mode(self._find_evaluating(modules))
        self._find_weights(modules)
        self._before, self._attributes = self._values(), self._numbers()

    def _find_evaluating(self, modules: Sequence[nn.Module]) -> list[str]:
        """Return the outermost modules in eval mode."""
        modes = [module.training for module in modules]
        if modes != self._modes:
            self._modes = modes
            named = dict(self.module.named_modules())
            evaluating = (name for name, child in named.items() if not child.training)
            self._evaluating = [
                name or "the model"
                for name in evaluating
                if not name or named[name.rpartition(".")[0]].training
            ]
        return self._evaluating

    def _find_weights(self, modules: Sequence[nn.Module]) -> None:
        parameters = unique_parameters(modules)
        if list(map(id, parameters)) != list(map(id, self._parameters)):
            self._parameters = parameters
            self._weights = {name: p for name, p in self.module.named_parameters() if p.numel()}

    def refuse(self, frozen_state: FrozenState, step: int) -> None:
        """UsageError: weights or state have changed. Warn of changed attributes of modules."""
        frozen_state.refuse_changes(self._buffers, step)
        now, attributes = self._values(), self._numbers()
        if changed := sorted(
            name
            for name in self._before.keys() | now.keys()
            if self._before.get(name) != now.get(name)
        ):
            raise UsageError(
                f"{join_names(changed)} changed in the micro-batch loop of step {step + 1}; "
                "no update was made",
                "each worker runs as many micro-batches as the number of workers gives it, "
                "and the first step of a start one more",
                "move optimizer.step(), scheduler.step(), "
                "the update of an average and other changes behind the micro-batch loop",
            )
        if counted := [
            name for name, value in attributes.items() if self._attributes.get(name, value) != value
        ]:
            log.warning(
                "%s changed in the micro-batch loop of step %d: "
                "if forward passes depend on it, bits depend on the number of workers",
                join_names(counted),
                step + 1,
            )
        self.first_step = False

    def _values(self) -> dict[str, Any]:
        values = self._weights_and_state()
        for optimizer in self.checkpointer.optimizers if self.checkpointer else ():
            for i, group in enumerate(optimizer.param_groups):
                where = f"of parameter group {i} of {type(optimizer).__name__}"
                values |= {
                    f"{key} {where}": _comparable(value)
                    for key, value in group.items()
                    if key != "params"
                }
        return values

    def _weights_and_state(self) -> dict[str, Any]:
        mark = digest_of_one if self.first_step else version_of
        values: dict[str, Any] = {name: mark(p) for name, p in self._weights.items()}
        if not self.checkpointer or not self.checkpointer.state:
            return values
        for name, value in self.checkpointer.state.items():
            if self.first_step:
                saved = value.state_dict()
                if isinstance(value, nn.Module) and not saved:
                    saved = self.checkpointer.attributes.of_state(name)
                packed = pack(f"state.{name}", saved)
                values[f"session state {name!r}"] = digest_of(packed.values())
            elif isinstance(value, PlainValue):
                values[f"session state {name!r}"] = value.mark()
        return values

    def _numbers(self) -> dict[str, float]:
        """Return the numbers that modules keep as attributes, in the first step."""
        modules = self.module.named_modules() if self.first_step else ()
        numbers = (
            (path, name, value) for path, child in modules for name, value in vars(child).items()
        )
        return {
            f"{path}.{name}".lstrip("."): value
            for path, name, value in numbers
            if isinstance(value, int | float)
        }


def digest_of_one(tensor: Tensor) -> int:
    return digest_of([tensor])


def _comparable(value: Any) -> Any:
    return (id(value), version_of(value)) if isinstance(value, Tensor) else value
