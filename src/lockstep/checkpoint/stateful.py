"""The training state besides tensors by parameter: parameter groups, schedulers, EMA, GradScaler.

A state_dict is stored without pickle, as one JSON text (in a uint8 tensor, so that it is saved,
hashed and sent like any other) and the tensors to which it refers:

    groups:json                  class and parameter group values (lr, betas, ...) of each optimizer
    state.ema:json               {"dict": [["decay", 0.99], ["w", {"tensor": "state.ema.w"}]]}
    state.ema.w                  the tensor

JSON has neither tuples nor keys other than strings, so containers carry their type. A float's
decimals restore its bits.
"""

import gc
import json
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint import safetensors_io
from lockstep.checkpoint.state_dict import Model, named_tensors, spec_of
from lockstep.errors import CheckpointError, UsageError
from lockstep.runtime.tensor_bytes import bytes_of
from lockstep.units import join_names

JSON_SUFFIX = ":json"
GROUPS = "groups"
MAPPINGS: dict[str, type[dict[Any, Any]]] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}

ARRAY_KINDS = (
    np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.float16, np.float32, np.float64, np.complex64,
)  # fmt: skip


class Stateful(Protocol):
    """An object with a state: a scheduler, an EMA, a GradScaler, ..."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def pack(name: str, tree: Any) -> dict[str, Tensor]:
    """Return JSON text and tensors of a state_dict. UsageError for an unsupported value."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(tree, name, tensors)).encode()
    return {name + JSON_SUFFIX: torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors}


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        if value.is_meta:
            hint = "make it when the model has its weights, after session.prepare"
            raise UsageError(f"{path} is on the meta device, without values", "Checkpointer(state=...)", hint)
        name = path
        while name in tensors or name.endswith(JSON_SUFFIX):
            name += "'"
        spec_of(path, value)  # refuses tensors that a file cannot hold
        tensors[name] = value.detach()
        return {"tensor": name}
    if kind is list:
        return [_encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": _encode(list(value), path, tensors)}
    if kind is deque:
        return {"deque": [value.maxlen, _encode(list(value), path, tensors)]}
    if kind is np.ndarray:
        if value.dtype.type not in ARRAY_KINDS:
            what = f"{path} is an array of {value.dtype}, which a checkpoint cannot hold"
            raise UsageError(what, "session.state(...) or Checkpointer(state=...)", "use an array of numbers or bools")
        return {"array": _encode(torch.from_numpy(value.copy()), path, tensors)}
    if MAPPINGS.get(kind.__name__) is kind:
        items = [[_encode(key, f"{path} (a key)", tensors), _encode(item, f"{path}.{key}", tensors)] for key, item in value.items()]
        return {kind.__name__: items}
    raise UsageError(
        f"{path} is a {kind.__name__}, which a checkpoint cannot hold",
        "a state_dict named in Checkpointer(state=...), or a value of an optimizer's parameter groups",
        "return tensors, numbers, strings, bools, None, and lists, tuples and dicts of them from state_dict()",
    )


def unpack(name: str, tensors: Mapping[str, Tensor], current: Mapping[str, Tensor] | None = None) -> Any:
    """Return the state_dict, with tensors copied to device and strides of those in `current`."""

    def tensor(name: str) -> Tensor:
        saved, like = tensors[name], (current or {}).get(name)
        if like is None or like.shape != saved.shape:
            return saved.to("cpu" if like is None else like.device, copy=True)
        return torch.empty_like(like, dtype=saved.dtype, requires_grad=False).copy_(saved)

    return _decode(json.loads(bytes(bytes_of(tensors[name + JSON_SUFFIX]))), tensor)


def _decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, inner)] = value.items()
    if tag == "tensor":
        return tensor(inner)
    if tag == "tuple":
        return tuple(_decode(inner, tensor))
    if tag == "deque":
        return deque(_decode(inner[1], tensor), maxlen=inner[0])
    if tag == "array":
        return _decode(inner, tensor).cpu().numpy()
    return MAPPINGS[tag]({_decode(key, tensor): _decode(item, tensor) for key, item in inner})


def _leaves(value: Any, path: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each number, string and tensor, regardless of dict order."""
    if isinstance(value, dict):
        [(tag, inner)] = value.items()
        if tag == "tensor":
            yield path, safetensors_io.tensor_fingerprint(spec_of("", tensors[inner]), bytes_of(tensors[inner]))
        for key, item in inner if tag in MAPPINGS else [[tag, inner]] if tag in ("tuple", "deque", "array") else []:
            yield from _leaves(item, f"{path}.{key}", tensors)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}.{i}", tensors)
    else:
        yield path, json.dumps(value)


def differing_paths(name: str, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    left, right = (dict(_leaves(json.loads(bytes(bytes_of(tensors[name + JSON_SUFFIX]))), name, tensors)) for tensors in (first, second))
    return sorted(path for path in left.keys() | right.keys() if left.get(path) != right.get(path))


def refuse_unsupported_state(state: Mapping[str, Any]) -> None:
    """UsageError when a value of Checkpointer(state=...) cannot be saved as state."""
    for name, value in state.items():
        if not re.fullmatch(r"[\w-]+", name):
            raise UsageError(f"{name!r} is not a name for a state", "Checkpointer(state=...)", "use letters, digits, _ and -")
        if isinstance(value, torch.optim.Optimizer):
            hint = "pass all optimizers as the fourth argument: Checkpointer(folder, runtime, model, [first, second])"
            raise UsageError(f"state {name!r} is an optimizer ({type(value).__name__})", "Checkpointer(state=...)", hint)
        if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
            what = f"state {name!r} is a {type(value).__name__}, which has no state_dict and load_state_dict"
            raise UsageError(what, "Checkpointer(state=...)", "pass the object itself, or an object with these two methods")


def unregistered_schedulers(optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any]) -> list[Any]:
    """Return torch schedulers of these optimizers that Checkpointer(state=...) does not contain."""
    level, registered = list(state.values()), set[int]()
    for _ in range(5):  # a user's class may hold a scheduler in a list, a SequentialLR holds several
        registered |= set(map(id, level))
        containers = [value if isinstance(value, dict | list | tuple) else getattr(value, "__dict__", {}) for value in level]
        level = [item for container in containers for item in (container.values() if isinstance(container, dict) else container)]
    optimizer_ids = set(map(id, optimizers))
    schedulers = [value for value in gc.get_objects() if issubclass(type(value), LRScheduler)]  # isinstance would call proxies
    return [value for value in schedulers if id(getattr(value, "optimizer", None)) in optimizer_ids and id(value) not in registered]


def describe_groups(model: Model, optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return class and parameter groups of each optimizer, with names in place of parameters."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}

    def values(group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: [names[id(p)] for p in value] if key == "params" else value for key, value in group.items()}

    return [{"class": type(optimizer).__name__, "groups": [values(group) for group in optimizer.param_groups]} for optimizer in optimizers]


def pack_extra_state(model: Model, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Stateful]) -> dict[str, Tensor]:
    tensors = pack(GROUPS, describe_groups(model, optimizers))
    for name, value in state.items():
        tensors |= pack(f"state.{name}", value.state_dict())
    return tensors


def extra_state_problems(
    model: Model, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Stateful], tensors: Mapping[str, Tensor]
) -> list[str]:
    """Return why loaded tensors do not fit this state, one line per kind of problem."""
    texts = {name.removesuffix(JSON_SUFFIX) for name in tensors if name.endswith(JSON_SUFFIX)}
    expected = {GROUPS, *(f"state.{name}" for name in state)}
    lines = []
    if missing := sorted(expected - texts):
        lines.append(f"missing in the checkpoint: {join_names(missing)}")
    if unexpected := sorted(texts - expected):
        lines.append(f"in the checkpoint, but not in Checkpointer(state=...): {join_names(unexpected)}")
    if GROUPS not in texts:
        return lines
    saved, current = unpack(GROUPS, tensors), describe_groups(model, optimizers)
    classes, own_classes = ([optimizer["class"] for optimizer in described] for described in (saved, current))
    if classes != own_classes:
        lines.append(f"the checkpoint's optimizers are {', '.join(classes)}, this run's {', '.join(own_classes)}")
    elif any(
        [group["params"] for group in saved_optimizer["groups"]] != [group["params"] for group in current_optimizer["groups"]]
        for saved_optimizer, current_optimizer in zip(saved, current, strict=True)
    ):
        lines.append(f"the parameter groups of {', '.join(classes)} hold other parameters than in the checkpoint")
    return lines


def load_extra_state(
    model: Model, optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Stateful], tensors: Mapping[str, Tensor]
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
                f"Checkpointer(state=...), {type(value).__name__}.load_state_dict",
                "let load_state_dict restore everything that state_dict returns",
            )
