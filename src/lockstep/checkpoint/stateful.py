"""The training state besides tensors by parameter: parameter groups, schedulers, EMA, GradScaler.

groups:json                  class and parameter group values (lr, betas, ...) of each optimizer
state.ema:json               the state_dict of an object, see json_tree.py
state.ema.w                  one of its tensors
"""

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint.json_tree import JSON_SUFFIX, differing_paths, pack, unpack
from lockstep.checkpoint.state_dict import (
    Model,
    OptimizedParameters,
    named_tensors,
    optimizer_parameters,
)
from lockstep.errors import CheckpointError, UsageError
from lockstep.units import join_names

GROUPS = "groups"
MOVING = ("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial")
LONG = 100  # items of a list that holds data rather than constants


class Stateful(Protocol):
    """An object with a state: a scheduler, an EMA, a GradScaler, ..."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def refuse_unsupported_state(state: Mapping[str, Any]) -> None:
    """UsageError when a value of session.state(name=object) cannot be saved as state."""
    for name, value in state.items():
        if not re.fullmatch(r"[\w-]+", name):
            raise UsageError(
                f"{name!r} is not a name for a state",
                "session.state(name=object)",
                "use letters, digits, _ and -",
            )
        if isinstance(value, torch.optim.Optimizer):
            raise UsageError(
                f"state {name!r} is an optimizer ({type(value).__name__})",
                "session.state(name=object)",
                "pass all optimizers: session.prepare(model, first, second)",
            )
        if not (
            callable(getattr(value, "state_dict", None))
            and callable(getattr(value, "load_state_dict", None))
        ):
            raise UsageError(
                f"state {name!r} is a {type(value).__name__}, "
                "which has no state_dict and load_state_dict",
                "session.state(name=object)",
                "pass the object itself, or an object with these two methods",
            )


def unregistered_schedulers(
    optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any]
) -> list[Any]:
    """Return torch schedulers of these optimizers that session.state(name=object) lacks."""
    level, registered = list(state.values()), set[int]()
    for _ in range(5):  # a class may hold a scheduler in a list, a SequentialLR holds several
        registered |= set(map(id, level))
        inner: list[Any] = []
        for value in level:
            if not isinstance(value, dict | list | tuple):
                value = getattr(value, "__dict__", {})
            inner += value.values() if isinstance(value, dict) else value
        level = inner
    optimizer_ids = set(map(id, optimizers))
    return [
        value
        for value in gc.get_objects()
        if issubclass(type(value), LRScheduler)  # isinstance would call proxies
        and id(getattr(value, "optimizer", None)) in optimizer_ids
        and id(value) not in registered
    ]


def plain_values(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the numbers and strings in a state_dict, without the values
    that every scheduler of torch changes, and without long lists."""
    if isinstance(tree, bool | int | float | str):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple) and len(tree) <= LONG:
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            if key not in MOVING:
                yield from plain_values(value, f"{path}.{key}".lstrip("."))


@dataclass(frozen=True)
class Trained:
    """What training changes: a model, its optimizers, and other objects by name."""

    model: Model
    optimizers: Sequence[torch.optim.Optimizer]
    state: Mapping[str, Stateful]

    def parameters(self) -> OptimizedParameters:
        """Return the parameters of the optimizers. CheckpointError for those of another model."""
        return optimizer_parameters(self.model, self.optimizers)

    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def trained_names(self) -> list[str]:
        named = named_tensors(self.model).items()
        return [name for name, tensor in named if tensor.requires_grad]

    def describe_groups(self) -> list[dict[str, Any]]:
        """Return class and parameter groups of each optimizer, with names in place of
        parameters."""
        names = {id(tensor): name for name, tensor in named_tensors(self.model).items()}

        def values(group: dict[str, Any]) -> dict[str, Any]:
            return group | {"params": [names[id(p)] for p in group["params"]]}

        return [
            {
                "class": type(optimizer).__name__,
                "groups": [values(group) for group in optimizer.param_groups],
            }
            for optimizer in self.optimizers
        ]

    def pack(self) -> dict[str, Tensor]:
        """Return the parameter groups and the registered state as tensors."""
        tensors = pack(GROUPS, self.describe_groups())
        for name, value in self.state.items():
            tensors |= pack(f"state.{name}", value.state_dict())
        return tensors

    def problems(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return why loaded tensors do not fit, one line per kind of problem."""
        names = {name.removesuffix(JSON_SUFFIX) for name in tensors if name.endswith(JSON_SUFFIX)}
        texts = {name for name in names if name == GROUPS or name.startswith("state.")}
        expected = {GROUPS, *(f"state.{name}" for name in self.state)}
        lines = []
        if missing := sorted(expected - texts):
            lines.append(f"missing in the checkpoint: {join_names(missing)}")
        if unexpected := sorted(texts - expected):
            listed = join_names(unexpected)
            lines.append(f"in the checkpoint, but not in session.state(name=object): {listed}")
        if GROUPS not in texts:
            return lines
        described = unpack(GROUPS, tensors), self.describe_groups()
        classes, own_classes = (", ".join(o["class"] for o in listed) for listed in described)
        parameters, own_parameters = (
            [[group["params"] for group in optimizer["groups"]] for optimizer in listed]
            for listed in described
        )
        if classes != own_classes:
            lines.append(f"the checkpoint's optimizers are {classes}, this run's {own_classes}")
        elif parameters != own_parameters:
            lines.append(
                f"the parameter groups of {classes} hold other parameters than in the checkpoint"
            )
        return lines

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set parameter groups and registered state from loaded tensors without `problems`.
        CheckpointError when load_state_dict of an object does not restore the saved state."""
        saved = (group for optimizer in unpack(GROUPS, tensors) for group in optimizer["groups"])
        for group, values in zip(self.param_groups(), saved, strict=True):
            for key, value in values.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                elif key != "params":
                    group[key] = value
        for name, value in self.state.items():
            path = f"state.{name}"
            value.load_state_dict(unpack(path, tensors, pack(path, value.state_dict())))
            if wrong := differing_paths(path, pack(path, value.state_dict()), tensors):
                raise CheckpointError(
                    f"{path} ({type(value).__name__}) differs "
                    f"from the saved state after load_state_dict: {join_names(wrong)}",
                    f"session.state(name=object), {type(value).__name__}.load_state_dict",
                    "let load_state_dict restore everything that state_dict returns",
                )
