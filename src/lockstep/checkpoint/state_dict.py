"""Model and optimizer as a flat dictionary of named tensors, and back.

    model.<name of parameter or buffer>                    model.encoder.0.norm.weight
    optim.<name of parameter>.<key>                        optim.encoder.0.norm.weight.exp_avg
    optim.<name of parameter>.<key>:int | :float | :bool   a number of the optimizer, 0-dim
    optim.<name of parameter>.<key>:json                   a list, tuple, dict, ... (json_tree.py)
    optim.<name of parameter>.<key>:json:<path>:<order>    a tensor in it
    optim.<name of parameter>.<key>:strided:<order>        a tensor that is not contiguous
    optimizers:json                                        what an optimizer keeps besides
                                                           (optimizer_state.py)

Names are those of the unwrapped model, without the prefixes of torch.compile and
DistributedDataParallel. A tied parameter is saved once, under its first name; it stays tied on
loading, since tensors are filled in place. Parameter groups and stateful objects: stateful.py.
A "." or ":" in a key is written as %2E or %3A.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep.checkpoint import safetensors_io
from lockstep.checkpoint.json_tree import (
    JSON_SUFFIX,
    decode,
    encode,
    pack,
    spec_of,
    text_of,
    tree_of,
)
from lockstep.checkpoint.optimizer_state import load_own_state, own_state, unsupported_state
from lockstep.checkpoint.safetensors_io import TensorSpec
from lockstep.errors import CheckpointError, UsageError
from lockstep.runtime.tensor_bytes import TORCH_DTYPES, bytes_of
from lockstep.runtime.torch_private import non_persistent_buffers, own_buffers, own_parameters
from lockstep.units import join_names

NUMBER_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
OWN_STATE = "optimizers"
ESCAPES = {"%": "%25", ".": "%2E", ":": "%3A"}

Model = nn.Module | Mapping[str, Tensor]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
OptimizedParameters = dict[str, tuple[Tensor, dict[str, Any], torch.optim.Optimizer]]


def model_name(model: Model) -> str:
    return (
        type(unwrap_model(model)).__name__
        if isinstance(model, nn.Module)
        else "the slices of the model"
    )


def all_names(name: str) -> bool:
    return True


def unwrap_model(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def as_tuple(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    return (
        (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers or ())
    )


def named_tensors(model: Model) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of the unwrapped model by their first names."""
    if isinstance(model, Mapping):
        return dict(model)
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in unwrap_model(model).named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"{type(module).__name__} keeps extra state besides its tensors, "
                "which a checkpoint cannot hold",
                f"module {path or '(the model itself)'}, get_extra_state",
                "register it as buffers",
            )
        non_persistent = non_persistent_buffers(module)
        buffers = [
            (name, tensor)
            for name, tensor in own_buffers(module).items()
            if name not in non_persistent
        ]
        for name, tensor in [*own_parameters(module).items(), *buffers]:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                parts = [part for part in path.split(".") if part and part != "_orig_mod"]
                tensors[".".join([*parts, name])] = tensor
    return tensors


def optimizer_parameters(model: Model, optimizers: Optimizers) -> OptimizedParameters:
    """Return name -> (parameter, its group, its optimizer), in the optimizers' order."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    triples = [
        (p, group, optimizer)
        for optimizer in as_tuple(optimizers)
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    kinds = [type(optimizer).__name__ for optimizer in as_tuple(optimizers)]
    where = " and ".join([*kinds, model_name(model)])
    if unknown := [f"shape {tuple(p.shape)}" for p, _, _ in triples if id(p) not in names]:
        raise CheckpointError(
            f"{len(unknown)} of the optimizer's parameters are not in the model: "
            f"{join_names(unknown)}",
            where,
            "put every trained module into the one model that is saved",
        )
    parameters = {names[id(p)]: (p, group, optimizer) for p, group, optimizer in triples}
    if len(parameters) < len(triples):
        counts = Counter(names[id(p)] for p, _, _ in triples)
        repeated = [name for name, count in counts.items() if count > 1]
        raise CheckpointError(
            f"several optimizers hold the same parameters: {join_names(repeated)}",
            where,
            "give each parameter to one optimizer",
        )
    return parameters


def get_state_dict(
    model: Model, optimizers: Optimizers = None, saved: Callable[[str], bool] = all_names
) -> dict[str, Tensor]:
    """Return the state by name. The tensors share memory with the model and the optimizers.

    saved  filter on the names of parameters and buffers in the model
    CheckpointError when an optimizer's state has more than tensors, numbers, strings, and lists,
    tuples, deques and dicts of them.
    """
    tensors = {
        f"model.{name}": tensor.detach()
        for name, tensor in named_tensors(model).items()
        if saved(name)
    }
    parameters = optimizer_parameters(model, optimizers) if optimizers else {}
    for name, (parameter, _, optimizer) in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            try:
                tensors |= pack_entry(f"optim.{name}", key, value, parameter)
            except (UsageError, CheckpointError) as error:
                raise unsupported_state(
                    f"{type(optimizer).__name__} keeps {key!r} as a {type(value).__name__}",
                    f"state of {name}; {key}{error.what}",
                ) from None
    known = {id(parameter) for parameter, _, _ in parameters.values()}
    own = [own_state(optimizer, known) for optimizer in as_tuple(optimizers)]
    return tensors | pack(OWN_STATE, own) if any(own) else tensors


def pack_entry(prefix: str, key: Any, value: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return one entry of an optimizer's state by name; {} for None."""
    if value is None:
        return {}
    if not isinstance(key, str):
        raise UsageError(f" is a {type(key).__name__}, not a string", prefix, "name it by a string")
    name = f"{prefix}.{escape(key)}"
    if isinstance(value, Tensor):
        order = "" if value.shape == parameter.shape else order_of(value)
        return {f"{name}:strided:{order}" if order else name: value.detach()}
    if type(value) in NUMBER_DTYPES and (type(value) is not int or value.bit_length() < 64):
        return {
            f"{name}:{type(value).__name__}": torch.tensor(value, dtype=NUMBER_DTYPES[type(value)])
        }
    tensors: dict[str, Tensor] = {}
    text = text_of(encode(value, "", tensors))
    named = {
        f"{name}{JSON_SUFFIX}:{escape(path)}:{order_of(tensor)}": tensor
        for path, tensor in tensors.items()
    }
    return {name + JSON_SUFFIX: text} | named


def order_of(tensor: Tensor) -> str:
    """Return the dimensions from the largest stride to the smallest, "1,0"; "" for a contiguous
    tensor. The bits of a product depend on it."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])
    dense = tensor.layout == torch.strided and tensor.permute(order).is_contiguous()
    return ",".join(map(str, order)) if dense and not tensor.is_contiguous() else ""


def in_order(tensor: Tensor, order: str) -> Tensor:
    """Return the tensor with the strides of this order of dimensions."""
    dims = [int(dim) for dim in order.split(",")] if order else list(range(tensor.dim()))
    return tensor.permute(dims).contiguous().permute([dims.index(dim) for dim in range(len(dims))])


def escape(key: str) -> str:
    """Return `key` without "." and ":", which separate the parts of a name."""
    return re.sub("%(?=25|2E|3A)|[.:]", lambda match: ESCAPES[match[0]], key)


def unescape(key: str) -> str:
    return re.sub("%(25|2E|3A)", lambda match: chr(int(match[1], 16)), key)


@torch.no_grad()
def set_state_dict(
    model: Model,
    optimizers: Optimizers,
    tensors: Mapping[str, Tensor],
    saved: Callable[[str], bool] = all_names,
    problems: Sequence[str] = (),
) -> None:
    """Fill model and optimizers, which may have no state yet, from the result of `get_state_dict`.

    optimizers  None: load the weights only (to evaluate, to translate)
    tensors     `items` is used once, after the check; before that only names, shapes and dtypes
    saved       as for `get_state_dict`: excluded tensors are not in `tensors` and stay unchanged
    problems    further reasons why the state does not fit
    CheckpointError, before any change, names what is missing, unexpected, or of another shape or
    dtype. Nothing is cast.
    """
    own = {name: tensor for name, tensor in named_tensors(model).items() if saved(name)}
    loaded = {
        name.removeprefix("model."): tensors[name] for name in tensors if name.startswith("model.")
    }
    problems = [*problems, *tensor_differences(own, loaded)]
    states: dict[str, dict[str, Tensor]] = {}
    parameters = optimizer_parameters(model, optimizers) if optimizers else {}
    for name in tensors:
        if optimizers and name.startswith("optim."):
            parameter_name, _, key = name.removeprefix("optim.").rpartition(".")
            states.setdefault(parameter_name, {})[key] = tensors[name]
    problems += optimizer_differences(parameters, states)
    if problems:
        target = " and ".join(
            [model_name(model), *(type(optimizer).__name__ for optimizer in as_tuple(optimizers))]
        )
        raise CheckpointError(
            f"the checkpoint does not fit {target}",
            "\n".join(problems),
            "build model and optimizer as in the run that saved it, or start a new run in another "
            "folder",
        )
    for name, (parameter, _, optimizer) in parameters.items():
        # No earlier entry may stay: the optimizer would continue from it.
        optimizer.state.pop(parameter, None)
        if name in states:
            optimizer.state[parameter] = {}
    fill(own, parameters, tensors)
    if optimizers:
        set_own_states(as_tuple(optimizers), parameters, tensors)


def fill(
    own: Mapping[str, Tensor], parameters: OptimizedParameters, tensors: Mapping[str, Tensor]
) -> None:
    """Fill the model's tensors `own`, and the state of the optimized parameters, if any."""
    # Of a parameter and key: the text as "", tensors by path.
    trees: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            own[rest].copy_(tensor)
        elif kind == "optim" and parameters:
            parameter_name, _, entry = rest.rpartition(".")
            parameter, group, optimizer = parameters[parameter_name]
            # KEY, KEY:FORM, KEY:FORM:PATH or KEY:FORM:PATH:ORDER, as listed above.
            key, form, path, order = (*map(unescape, entry.split(":")), "", "", "")[:4]
            state = optimizer.state[parameter]
            if form == "json":
                moved = tensor.to(parameter.device, copy=True) if path else tensor.clone()
                trees.setdefault((parameter_name, key), {})[path] = in_order(moved, order)
            elif form == "strided":
                state[key] = in_order(tensor.to(parameter.device, copy=True), path)
            elif form:
                state[key] = tensor.item()
            else:
                state[key] = place_like_torch(key, tensor, parameter, group)
    for (parameter_name, key), parts in trees.items():
        parameter, _, optimizer = parameters[parameter_name]
        optimizer.state[parameter][key] = decode(tree_of(parts[""]), parts.__getitem__)


def set_own_states(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: OptimizedParameters,
    tensors: Mapping[str, Tensor],
) -> None:
    """Restore what the optimizers keep besides their state by parameter."""
    known = {id(parameter) for parameter, _, _ in parameters.values()}
    device = next(
        (parameter.device for parameter, _, _ in parameters.values()), torch.device("cpu")
    )

    def place(name: str) -> Tensor:  # counters on the host, as torch places steps
        return tensors[name].to("cpu" if tensors[name].numel() == 1 else device, copy=True)

    text = tensors.get(OWN_STATE + JSON_SUFFIX)
    states = [{} for _ in optimizers] if text is None else decode(tree_of(text), place)
    for optimizer, state in zip(optimizers, states, strict=True):
        load_own_state(optimizer, state, known)


def place_like_torch(
    key: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]
) -> Tensor:
    """Place a tensor of optimizer state as torch does: with the parameter, steps on the CPU."""
    if key == "step":  # torch/optim/optimizer.py, _process_value_according_to_param_policy
        on_device = group.get("capturable") or group.get("fused")
        return value.to(device=parameter.device if on_device else "cpu", copy=True)
    # With the strides of the parameter, so that foreach kernels see equal layouts.
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(parameter.device, copy=True)


def tensor_differences(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    """Return why the saved tensors cannot fill our own, one line per kind of problem."""
    lines = []
    if missing := sorted(own.keys() - saved.keys()):
        lines.append(f"missing in the checkpoint: {join_names(missing)}")
    if unexpected := sorted(saved.keys() - own.keys()):
        lines.append(f"unexpected in the checkpoint: {join_names(unexpected)}")
    wrong = [
        f"{name} is {dtype_and_shape(saved[name])} in the checkpoint, "
        f"{dtype_and_shape(own[name])} here"
        for name in sorted(own.keys() & saved.keys())
        if dtype_and_shape(own[name]) != dtype_and_shape(saved[name])
    ]
    return lines + ([f"wrong: {join_names(wrong)}"] if wrong else [])


def optimizer_differences(
    parameters: OptimizedParameters, states: Mapping[str, Mapping[str, Tensor]]
) -> list[str]:
    """Return why the saved optimizer state cannot replace the current one. Parameters without state
    on one side are not compared: a new optimizer has none, and neither has an unused parameter;
    some optimizers create one entry when they are constructed, and the others in their first
    step."""
    lines = []
    if unexpected := sorted(f"optim.{name}" for name in states.keys() - parameters.keys()):
        lines.append(f"unexpected in the checkpoint: {join_names(unexpected)}")
    own: dict[str, Tensor] = {}
    saved: dict[str, Tensor] = {}
    for name, (parameter, _, optimizer) in parameters.items():
        state = optimizer.state.get(parameter, {})
        if state and name in states:
            own |= {
                f"optim.{name}.{escape(key)}": value
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
            saved |= {
                f"optim.{name}.{key}": value
                for key, value in states[name].items()
                if key in map(escape, state)
            }
    return lines + tensor_differences(own, saved)


def dtype_and_shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def nonfinite_tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return names of tensors with an infinity or NaN; elements are read if a sum has one."""
    floating = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    floats = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if tensor.dtype in floating and tensor.numel()
    }
    sums: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in floats.values():
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        sums.setdefault((wide, tensor.device), []).append(tensor.sum(dtype=wide))
    if all(bool(torch.stack(device_sums).isfinite().all()) for device_sums in sums.values()):
        return []
    return [name for name, tensor in floats.items() if not bool(tensor.isfinite().all())]


def tensor_from_bytes(spec: TensorSpec, data: memoryview) -> Tensor:
    """Return a tensor that shares memory with `data`."""
    if not data.nbytes:
        return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: safetensors_io.tensor_fingerprint(spec_of(name, tensor), bytes_of(tensor))
        for name, tensor in tensors.items()
    }


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the hex sha256 of names, dtypes, shapes and bytes, sorted by name."""
    return safetensors_io.digest_of_fingerprints(fingerprints(tensors))
