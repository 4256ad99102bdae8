"""The cost of a user's own module, counted by a forward pass on torch's meta device: shapes
without data.

The user's function makes the module and the inputs of a micro-batch:

    def make_model():
        return MyModel(), (torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long))

Units are what the shard axis would find (parallel/plans.py). The rest of the module counts
as embedding, its operations as output. The tensor axis and pipelines need a plan that only the
user's loop gives, so neither is planned.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config.schema import RunConfig
from lockstep.errors import LockstepError, UsageError
from lockstep.parallel.plans import find_units
from lockstep.planner.model_cost import CHECKPOINT_MODES, Amount, ModelCost, Saved, Unit
from lockstep.planner.step_cost import COPY_S, EXCHANGE_S, MESSAGE_S, Timing
from lockstep.runtime.device import select_device
from lockstep.runtime.exit_report import error_summary
from lockstep.runtime.sources import load_function
from lockstep.tasks.calibration import STEPS, time_messages, time_passes, time_update

HINT = "return a module and the inputs of one micro-batch: return MyModel(), (inputs, targets)"


def make_module(spelled: str, device: torch.device) -> tuple[nn.Module, tuple[Any, ...]]:
    """Call FILE.py:FUNCTION on `device`; return the module in training mode and its inputs.
    UsageError."""
    try:
        with device:
            made = load_function(spelled)()
    except LockstepError:
        raise
    except Exception as error:
        raise UsageError(
            f"{spelled} failed: {described(error)}", line_of(error, spelled), HINT
        ) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(f"{spelled} returned {type(made).__name__}", "lockstep plan", HINT)
    module, inputs = made
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    if not any(isinstance(value, Tensor) for value in inputs) or not any(
        p.requires_grad for p in module.parameters()
    ):
        raise UsageError(
            f"{spelled} returned no tensor as input, or a module without trained parameters",
            "lockstep plan",
            HINT,
        )
    return module.train(), inputs


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error_summary(error)}"


def line_of(error: Exception, spelled: str) -> str:
    """Return FILE:LINE of the innermost code of the user that ran when `error` was raised."""
    folder = str(Path(spelled.rpartition(":")[0]).resolve().parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(folder)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else spelled.rpartition(":")[0]


def own_timing(spelled: str, run: RunConfig) -> Timing:
    """Return the seconds of the module's units on this machine, on the inputs that the function
    returns."""
    torch.set_num_threads(run.compute.num_threads)
    device, _ = select_device(None)
    module, inputs = make_module(spelled, device)
    names, precision = {name: name for name in find_units(module)}, run.compute.precision
    measured = time_passes(
        module, names, lambda given: total(module(*given)), precision, [inputs] * STEPS
    )
    update_s = time_update(module, run) / sum(p.numel() for p in module.parameters())
    passes, source = (
        {(kind, 1): seconds for kind, seconds in measured.items()},
        f"blocks of {spelled} timed on this {device.type}",
    )
    message_s = MESSAGE_S[device.type] if device.type == "cuda" else time_messages()
    return Timing(passes, update_s, COPY_S[device.type], message_s, EXCHANGE_S[device.type], source)


def total(outputs: Any) -> Tensor:
    """Return the sum of all outputs that have a gradient: something to start a backward pass
    from."""
    if isinstance(outputs, Tensor):
        return (
            outputs.float().sum()
            if outputs.requires_grad
            else torch.zeros((), device=outputs.device)
        )
    values = (
        list(outputs.values())
        if isinstance(outputs, Mapping)
        else outputs
        if isinstance(outputs, list | tuple)
        else []
    )
    return sum((total(value) for value in values), torch.zeros(()))


def own_model_cost(spelled: str) -> ModelCost:
    """Return the cost of the module that FILE.py:FUNCTION returns. UsageError: it needs values of
    its inputs."""
    module, inputs = make_module(spelled, torch.device("meta"))
    names = find_units(module)
    saved, running, seen = (
        Counter[str](),
        ["embedding"],
        {p.untyped_storage()._cdata for p in module.parameters()},
    )

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            saved[running[-1]] += storage.nbytes() // 4
        return tensor

    hooks = []
    for name in names:
        unit = module.get_submodule(name)
        hooks.append(unit.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(unit.register_forward_hook(lambda *_: running.append("output")))
    counter = FlopCounterMode(display=False)
    try:
        with counter, saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = module(*inputs)
    except Exception as error:
        where = f"a forward pass of {spelled} on torch's meta device, {line_of(error, spelled)}"
        hint = "operations that depend on values of the inputs cannot be planned; run the function and its module alone to see other errors"
        raise UsageError(described(error), where, hint) from error
    for hook in hooks:
        hook.remove()
    if not total(outputs).requires_grad:
        raise UsageError(
            f"no output of the module of {spelled} has a gradient", "lockstep plan", HINT
        )
    del outputs
    flops, root = counter.get_flop_counts(), type(module).__name__

    def macs(name: str) -> float:
        return sum(flops.get(f"{root}.{name}" if name else "Global", {}).values()) / 2

    def unit_of(name: str, parameters: list[nn.Parameter], passes: float) -> Unit:
        return Unit(
            name,
            tuple(Amount(p.numel()) for p in parameters),
            Amount(passes),
            dict.fromkeys(CHECKPOINT_MODES, Saved(Amount(saved[name]))),
        )

    blocks = tuple(
        unit_of(name, list(module.get_submodule(name).parameters()), macs(name)) for name in names
    )
    in_units = {id(p) for name in names for p in module.get_submodule(name).parameters()}
    others = [p for p in module.parameters() if id(p) not in in_units]
    rest = macs("") - sum(unit.macs.whole for unit in blocks)
    rows = next(len(value) for value in inputs if isinstance(value, Tensor))
    return ModelCost(
        root,
        unit_of("embedding", others, 0.0),
        blocks,
        unit_of("output", [], rest),
        rows,
        0,
        0,
        False,
        (),
        0,
        ragged=False,
    )
