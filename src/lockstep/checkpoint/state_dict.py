"""Model and optimizer as a flat dictionary of named tensors, and back.

    model.<name of parameter or buffer>                    model.encoder.0.norm.weight
    optim.<name of parameter>.<key>                        optim.encoder.0.norm.weight.exp_avg
    optim.<name of parameter>.<key>:int | :float | :bool   a Python number of the optimizer, as a tensor of no dimension

Names are those of the bare model: what torch.compile and DistributedDataParallel put before them is left out, so that
a state saved compiled on eight devices loads plain on one. A parameter that is used in several places is saved once,
under its first name, and stays tied on loading, since tensors are filled, never replaced.
The values of parameter groups (lr, betas, ...) and everything else that has a state_dict: see statedict.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep.checkpoint import safetensors_io as tensorfile
from lockstep.checkpoint.safetensors_io import Spec
from lockstep.errors import CheckpointError
from lockstep.runtime.tensor_bytes import DTYPES, TORCH_DTYPES, bytes_of
from lockstep.units import shown

NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}

# -- model and optimizer ----------------------------------------------------------------------------------------------


def kind_of(model: Model) -> str:
    """What to call it in messages."""
    return type(bare(model)).__name__ if isinstance(model, nn.Module) else "the pieces of the model"


def everything(name: str) -> bool:
    """That a checkpoint holds every parameter and buffer."""
    return True


def bare(model: nn.Module) -> nn.Module:
    """The user's own module, out of the wrappers of torch.compile and data parallel."""
    while True:
        if isinstance(model, (DistributedDataParallel, DataParallel)):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


Model = nn.Module | Mapping[str, Tensor]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def several(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers as a tuple."""
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers or ())


def named_tensors(model: Model) -> dict[str, Tensor]:
    """Parameters and persistent buffers of the bare model by name, each tensor once, under its first name. A mapping is taken as it is."""
    if isinstance(model, Mapping):
        return dict(model)
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in bare(model).named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise CheckpointError(
                f"{type(module).__name__} keeps extra state besides its tensors, which a checkpoint cannot hold",
                f"module {path or '(the model itself)'}, get_extra_state",
                "register it as buffers",
            )
        fleeting = module._non_persistent_buffers_set
        buffers = [(name, tensor) for name, tensor in module._buffers.items() if name not in fleeting]
        for name, tensor in [*module._parameters.items(), *buffers]:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                parts = [part for part in path.split(".") if part and part != "_orig_mod"]
                found[".".join([*parts, name])] = tensor
    return found


Trained = dict[str, tuple[Tensor, dict[str, Any], torch.optim.Optimizer]]


def optimizer_names(model: Model, optimizers: Optimizers) -> Trained:
    """Name -> (parameter, its group, its optimizer) for every parameter of the optimizers, in their order."""
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    triples = [(p, group, one) for one in several(optimizers) for group in one.param_groups for p in group["params"]]
    who = " and ".join([*(type(one).__name__ for one in several(optimizers)), kind_of(model)])
    unknown = [f"shape {tuple(parameter.shape)}" for parameter, _, _ in triples if id(parameter) not in names]
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} of the optimizer's parameters are not in the model: {shown(unknown)}",
            who,
            "put every trained module into the one model that is saved",
        )
    found = {names[id(parameter)]: (parameter, group, one) for parameter, group, one in triples}
    if len(found) < len(triples):
        counts = Counter(names[id(parameter)] for parameter, _, _ in triples)
        twice = [name for name, count in counts.items() if count > 1]
        raise CheckpointError(f"several optimizers hold the same parameters: {shown(twice)}", who, "give each parameter to one optimizer")
    return found


def capture(model: Model, optimizer: Optimizers = None, saved: Callable[[str], bool] = everything) -> dict[str, Tensor]:
    """The state by name. The tensors are the living ones, not copies: copy or save them before the next step.

    saved  which parameters and buffers belong to it, by their names in the model
    CheckpointError when the state has more than tensors and numbers (LBFGS, say).
    """
    tensors = {f"model.{name}": tensor.detach() for name, tensor in named_tensors(model).items() if saved(name)}
    trained = optimizer_names(model, optimizer) if optimizer else {}
    for name, (parameter, _, one) in trained.items():
        for key, value in one.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and "." not in key:
                tensors[f"optim.{name}.{key}"] = value.detach()
            elif type(value) in NUMBERS and "." not in key:
                tensors[f"optim.{name}.{key}:{type(value).__name__}"] = torch.tensor(value, dtype=NUMBERS[type(value)])
            elif value is not None:
                raise cannot_hold(f"{type(one).__name__} keeps {key!r} as a {type(value).__name__}", f"state of {name}")
    known = {id(parameter) for parameter, _, _ in trained.values()}
    for one in several(optimizer):
        if strange := [key for key, value in one.state.items() if value and id(key) not in known]:
            raise cannot_hold(
                f"{type(one).__name__} keeps state that belongs to no parameter", f"key {str(strange[0])[:40]!r} of its state"
            )
    return tensors


def cannot_hold(what: str, where: str) -> CheckpointError:
    hint = "use an optimizer whose state is tensors and numbers by parameter (AdamW, SGD, ...)"
    return CheckpointError(f"{what}, which a checkpoint cannot hold", where, hint)


@torch.no_grad()
def restore(
    model: Model,
    optimizer: Optimizers,
    tensors: Mapping[str, Tensor],
    saved: Callable[[str], bool] = everything,
    problems: Sequence[str] = (),
) -> None:
    """Fill model and optimizer with a captured state; all or nothing. The optimizer may be new, without any state.

    optimizer  None: the weights alone (to evaluate, to translate)
    saved      as for `capture`: what it leaves out is not in `tensors`, and stays as it is
    problems   further reasons why the state does not fit
    CheckpointError names what is missing, unexpected, or of another shape or dtype. Nothing is cast.
    """
    own = {name: tensor for name, tensor in named_tensors(model).items() if saved(name)}
    there = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    problems = [*problems, *differences(own, there)]
    states: dict[str, dict[str, Tensor]] = {}
    parameters = optimizer_names(model, optimizer) if optimizer else {}
    for name, tensor in tensors.items():
        if optimizer and name.startswith("optim."):
            parameter_name, _, key = name.removeprefix("optim.").rpartition(".")
            states.setdefault(parameter_name, {})[key] = tensor
    problems += state_differences(parameters, states)
    if problems:
        who = " and ".join([kind_of(model), *(type(one).__name__ for one in several(optimizer))])
        hint = "build model and optimizer as in the run that saved it"
        raise CheckpointError(f"the checkpoint does not fit {who}", "\n".join(problems), hint)
    for name, tensor in there.items():
        own[name].copy_(tensor)
    for name, (parameter, group, one) in parameters.items():
        one.state.pop(parameter, None)
        if name in states:
            one.state[parameter] = dict(placed(k, v, parameter, group) for k, v in states[name].items())


def placed(key: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> tuple[str, Tensor | float]:
    """One entry of a parameter's optimizer state as torch keeps it: beside the parameter, the step count on the CPU."""
    key, _, number = key.partition(":")
    if number:
        return key, value.item()
    if key == "step":  # torch/optim/optimizer.py, _process_value_according_to_param_policy
        on_device = group.get("capturable") or group.get("fused")
        return key, value.to(device=parameter.device if on_device else "cpu", copy=True)
    if value.shape == parameter.shape:  # the strides of the parameter too, so that foreach kernels see equal layouts
        return key, torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return key, value.to(parameter.device, copy=True)


def differences(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    """What keeps the saved tensors from filling our own, a line for each kind."""
    lines = []
    if missing := sorted(own.keys() - saved.keys()):
        lines.append(f"missing in the checkpoint: {shown(missing)}")
    if unexpected := sorted(saved.keys() - own.keys()):
        lines.append(f"unexpected in the checkpoint: {shown(unexpected)}")
    wrong = [
        f"{name} is {kind(saved[name])} in the checkpoint, {kind(own[name])} here"
        for name in sorted(own.keys() & saved.keys())
        if kind(own[name]) != kind(saved[name])
    ]
    return lines + ([f"wrong: {shown(wrong)}"] if wrong else [])


def state_differences(parameters: Trained, states: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """What keeps the saved optimizer state from ours.

    Keys and shapes are compared for those parameters that have state in both: a new optimizer has none, and a parameter
    that was never used has none either.
    """
    lines = []
    if unexpected := sorted(f"optim.{name}" for name in states.keys() - parameters.keys()):
        lines.append(f"unexpected in the checkpoint: {shown(unexpected)}")
    own: dict[str, Tensor] = {}
    saved: dict[str, Tensor] = {}
    for name, (parameter, _, one) in parameters.items():
        mine = one.state.get(parameter, {})
        if mine and name in states:
            own |= {f"optim.{name}.{key}": value for key, value in mine.items() if isinstance(value, Tensor)}
            saved |= {f"optim.{name}.{key}": value for key, value in states[name].items() if ":" not in key}
    return lines + differences(own, saved)


def kind(tensor: Tensor) -> str:
    """float32 (128, 64)"""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the floating tensors that hold an infinity or NaN. One sum per tensor; its elements only where that is not finite."""
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    floats = {name: tensor.detach() for name, tensor in tensors.items() if tensor.dtype in kinds and tensor.numel()}
    sums: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in floats.values():
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        sums.setdefault((wide, tensor.device), []).append(tensor.sum(dtype=wide))
    if all(bool(torch.stack(some).isfinite().all()) for some in sums.values()):
        return []
    return [name for name, tensor in floats.items() if not bool(tensor.isfinite().all())]


# -- tensors and bytes ------------------------------------------------------------------------------------------------


def spec_of(name: str, tensor: Tensor) -> Spec:
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
        raise CheckpointError(f"a checkpoint cannot hold a tensor of {tensor.dtype}, {tensor.layout}", name)
    return Spec(name, DTYPES[tensor.dtype], tuple(tensor.shape))


def tensor_of(spec: Spec, data: memoryview) -> Tensor:
    """A tensor over the bytes, which stay shared."""
    if not data.nbytes:
        return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """name -> a line that fixes dtype, shape and bytes. Memory: one tensor at a time, where a copy is needed at all."""
    return {name: tensorfile.fingerprint(spec_of(name, t), bytes_of(t)) for name, t in tensors.items()}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hex sha256 of a state: names, dtypes, shapes and bytes, in the order of the names. Equal for equal states."""
    return tensorfile.digest(fingerprints(tensors))
