"""A state_dict as one JSON text, in a uint8 tensor, and the tensors to which it refers.

    state.ema:json               {"dict": [["decay", 0.99], ["w", {"tensor": "state.ema.w"}]]}
    state.ema.w                  the tensor

So it is saved, hashed and sent like any other tensor, and nothing is pickled. JSON has neither
tuples nor keys other than strings, so containers carry their type. A float's decimals restore its
bits.
"""

import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint import safetensors_io
from lockstep.checkpoint.safetensors_io import TensorSpec
from lockstep.errors import CheckpointError, UsageError
from lockstep.runtime.tensor_bytes import DTYPES, bytes_of

JSON_SUFFIX = ":json"
MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    kind.__name__: kind for kind in (dict, OrderedDict, Counter)
}
PLAIN = (bool, int, float, str)


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Return what a file stores about a tensor. CheckpointError for a tensor that it cannot
    hold."""
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise CheckpointError(
            f"a checkpoint cannot hold a tensor of {tensor.dtype}, {tensor.layout}", name
        )
    return TensorSpec(name, DTYPES[tensor.dtype], tuple(tensor.shape))


def pack(name: str, tree: Any) -> dict[str, Tensor]:
    """Return JSON text and tensors of a state_dict. UsageError for an unsupported value."""
    tensors: dict[str, Tensor] = {}
    text = text_of(encode(tree, name, tensors))
    return {name + JSON_SUFFIX: text, **tensors}


def text_of(tree: Any) -> Tensor:
    """Return a JSON value as text; `tree_of` is the inverse."""
    return torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON; its tensors are added to `tensors`, by path."""
    kind = type(value)
    if value is None or kind in PLAIN:
        return value
    if isinstance(value, Tensor):
        if value.is_meta:
            raise UsageError(
                f"{path} is on the meta device, without values",
                "session.state(name=object)",
                "make it when the model has its weights, after session.prepare",
            )
        name = path
        while name in tensors or name.endswith(JSON_SUFFIX):
            name += "'"
        spec_of(path, value)  # refuses tensors that a file cannot hold
        tensors[name] = value.detach()
        return {"tensor": name}
    if kind is list:
        return [encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": encode(list(value), path, tensors)}
    if kind is deque:
        return {"deque": [value.maxlen, encode(list(value), path, tensors)]}
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return {"array": encode(torch.from_numpy(value.copy()), path, tensors)}
    if isinstance(value, np.generic) and type(value.item()) in PLAIN:
        return _encode_numpy(value)
    if MAPPINGS.get(kind.__name__) is kind and not any(isinstance(key, Tensor) for key in value):
        items = [
            [encode(key, f"{path} (a key)", tensors), encode(item, f"{path}.{key}", tensors)]
            for key, item in value.items()
        ]
        return {kind.__name__: items}
    by_tensors = " by tensors" if MAPPINGS.get(kind.__name__) is kind else ""
    raise UsageError(
        f"{path} is a {kind.__name__}{by_tensors}, which a checkpoint cannot hold",
        "a state_dict named in session.state(name=object), "
        "or a value of an optimizer's parameter groups",
        "return tensors, numbers, strings, "
        "bools, None, and lists, tuples and dicts of them from state_dict()",
    )


def _encode_numpy(value: np.generic) -> Any:
    """Return the Python value of a NumPy scalar; with its dtype where its arithmetic rounds
    otherwise."""
    plain = value.item()
    if isinstance(value, np.float64 | np.bool_ | np.str_):
        return plain
    return {"numpy": [value.dtype.name, plain]}


def unpack(
    name: str, tensors: Mapping[str, Tensor], current: Mapping[str, Tensor] | None = None
) -> Any:
    """Return the state_dict, with tensors copied to device and strides of those in `current`."""

    def tensor(name: str) -> Tensor:
        saved, like = tensors[name], (current or {}).get(name)
        if like is None or like.shape != saved.shape:
            return saved.to("cpu" if like is None else like.device, copy=True)
        return torch.empty_like(like, dtype=saved.dtype, requires_grad=False).copy_(saved)

    return decode(tree_of(tensors[name + JSON_SUFFIX]), tensor)


def tree_of(text: Tensor) -> Any:
    """Return the JSON value of a text of `pack`."""
    return json.loads(bytes(bytes_of(text)))


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the value that `encode` was given; `tensor` returns the tensor of a name."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    [(tag, inner)] = value.items()
    if tag == "tensor":
        return tensor(inner)
    if tag == "tuple":
        return tuple(decode(inner, tensor))
    if tag == "deque":
        return deque(decode(inner[1], tensor), maxlen=inner[0])
    if tag == "array":
        return decode(inner, tensor).cpu().numpy()
    if tag == "numpy":
        return np.dtype(inner[0]).type(inner[1])
    return MAPPINGS[tag]({decode(key, tensor): decode(item, tensor) for key, item in inner})


def leaves(value: Any, path: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each number, string and tensor, regardless of dict order."""
    if isinstance(value, dict):
        [(tag, inner)] = value.items()
        if tag == "tensor":
            yield (
                path,
                safetensors_io.tensor_fingerprint(
                    spec_of("", tensors[inner]), bytes_of(tensors[inner])
                ),
            )
        elif tag == "numpy":
            yield path, json.dumps(inner)
        nested = [[tag, inner]] if tag in ("tuple", "deque", "array") else []
        for key, item in inner if tag in MAPPINGS else nested:
            yield from leaves(item, f"{path}.{key}", tensors)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}.{i}", tensors)
    else:
        yield path, json.dumps(value)


def differing_paths(
    name: str, first: Mapping[str, Tensor], second: Mapping[str, Tensor]
) -> list[str]:
    """Return the paths at which two states of this name differ."""
    left, right = (
        dict(leaves(tree_of(tensors[name + JSON_SUFFIX]), name, tensors))
        for tensors in (first, second)
    )
    return sorted(path for path in left.keys() | right.keys() if left.get(path) != right.get(path))
