"""The training state besides tensors by parameter: parameter groups, schedulers, EMA, GradScaler.

groups:json                  class and parameter group values (lr, betas, ...) of each optimizer
state.ema:json               the state_dict of an object, see json_tree.py
state.ema.w                  one of its tensors
"""

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint.json_tree import JSON_SUFFIX, differing_paths, pack, unpack
from lockstep.checkpoint.state_dict import Model, named_tensors
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
            hint = "pass all optimizers: session.prepare(model, first, second)"
            raise UsageError(
                f"state {name!r} is an optimizer ({type(value).__name__})",
                "session.state(name=object)",
                hint,
            )
        if not (
            callable(getattr(value, "state_dict", None))
            and callable(getattr(value, "load_state_dict", None))
        ):
            what = f"state {name!r} is a {type(value).__name__}, which has no state_dict and load_state_dict"
            raise UsageError(
                what,
                "session.state(name=object)",
                "pass the object itself, or an object with these two methods",
            )


def unregistered_schedulers(
    optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any]
) -> list[Any]:
    """Return torch schedulers of these optimizers that session.state(name=object) does not contain."""
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


def describe_groups(
    model: Model, optimizers: Sequence[torch.optim.Optimizer]
) -> list[dict[str, Any]]:
    """Return class and parameter groups of each optimizer, with names in place of parameters."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}

    def values(group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: [names[id(p)] for p in value] if key == "params" else value
            for key, value in group.items()
        }

    return [
        {
            "class": type(optimizer).__name__,
            "groups": [values(group) for group in optimizer.param_groups],
        }
        for optimizer in optimizers
    ]


def pack_extra_state(
    model: Model, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Stateful]
) -> dict[str, Tensor]:
    tensors = pack(GROUPS, describe_groups(model, optimizers))
    for name, value in state.items():
        tensors |= pack(f"state.{name}", value.state_dict())
    return tensors


def extra_state_problems(
    model: Model,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Stateful],
    tensors: Mapping[str, Tensor],
) -> list[str]:
    """Return why loaded tensors do not fit this state, one line per kind of problem."""
    names = {name.removesuffix(JSON_SUFFIX) for name in tensors if name.endswith(JSON_SUFFIX)}
    texts = {name for name in names if name == GROUPS or name.startswith("state.")}
    expected = {GROUPS, *(f"state.{name}" for name in state)}
    lines = []
    if missing := sorted(expected - texts):
        lines.append(f"missing in the checkpoint: {join_names(missing)}")
    if unexpected := sorted(texts - expected):
        lines.append(
            f"in the checkpoint, but not in session.state(name=object): {join_names(unexpected)}"
        )
    if GROUPS not in texts:
        return lines
    saved, current = unpack(GROUPS, tensors), describe_groups(model, optimizers)
    classes, own_classes = (
        ", ".join(optimizer["class"] for optimizer in described) for described in (saved, current)
    )
    parameters, own_parameters = (
        [[group["params"] for group in optimizer["groups"]] for optimizer in described]
        for described in (saved, current)
    )
    if classes != own_classes:
        lines.append(f"the checkpoint's optimizers are {classes}, this run's {own_classes}")
    elif parameters != own_parameters:
        lines.append(
            f"the parameter groups of {classes} hold other parameters than in the checkpoint"
        )
    return lines


def load_extra_state(
    model: Model,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Stateful],
    tensors: Mapping[str, Tensor],
) -> None:
    """Set parameter groups and registered state from loaded tensors without `extra_state_problems`.
    CheckpointError when load_state_dict of an object does not restore the saved state."""
    for optimizer, saved in zip(optimizers, unpack(GROUPS, tensors), strict=True):
        for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
            for key, value in values.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                elif key != "params":
                    group[key] = value
    for name, value in state.items():
        path = f"state.{name}"
        value.load_state_dict(unpack(path, tensors, pack(path, value.state_dict())))
        if wrong := differing_paths(path, pack(path, value.state_dict()), tensors):
            raise CheckpointError(
                f"{path} ({type(value).__name__}) differs from the saved state after load_state_dict: {join_names(wrong)}",
                f"session.state(name=object), {type(value).__name__}.load_state_dict",
                "let load_state_dict restore everything that state_dict returns",
            )
