"""The cost of a module, counted in forward passes on torch's fake tensors: shapes, and the kernels
of a CPU, without data.

Units are what the shard axis gathers (parallel/plans.py). The parts that the tensor axis divides
follow from a second count, of what one of its ranks computes. A user's function makes the module
and the inputs of a micro-batch:

    def make_model():
        return MyModel(), (torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long))

The tensor axis and pipelines need a plan that only the user's loop gives, so neither is planned.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lockstep.config.schema import RunConfig
from lockstep.errors import LockstepError, UsageError
from lockstep.layout import Layout
from lockstep.parallel.activation_checkpoint import SAVED_OPS
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.plans import HasPlan, ParallelPlan, StagedModel, find_units, plan_of
from lockstep.parallel.tensor_parallel import apply_tensor_parallel
from lockstep.planner.model_cost import CHECKPOINT_MODES, Amount, Mode, ModelCost, Unit
from lockstep.runtime.exit_report import error_summary
from lockstep.runtime.sources import load_function
from lockstep.runtime.torch_private import FakeTensorMode, tree_iter
from lockstep.tasks.layout_limits import built_in_model
from lockstep.tasks.optim import make_optimizers, state_bytes
from lockstep.training.model_flops import OperationCounter

PAIR_TOKENS = 24  # of a sentence, where the data is not known
HINT = "return a module and the inputs of one micro-batch: return MyModel(), (inputs, targets)"
MakeModel = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


# -- the model of a run ----------------------------------------------------------------------------


def planned_cost(run: RunConfig) -> ModelCost:
    """Return the cost of the run's model, with rows of an assumed length for sentence pairs.
    UsageError for a model that the planner does not know."""
    build = partial(built_in_model, run, run.tokenizer.vocab_size)
    if run.task == "translate":
        length = min(PAIR_TOKENS, run.data.max_tokens)
        shape = (max(1, run.batch.tokens // length), length)
        return run_cost(run, build, [shape, shape])
    if run.lora.rank or run.llama.backend == "transformers":
        raise UsageError(
            "a plan covers the built-in models, with all parameters trained",
            "lora.rank, llama.backend",
            "plan a function that makes the model, "
            "FILE.py:FUNCTION (docs/planning.md), or plan without them: an upper bound",
        )
    rows = run.batch.tokens // run.batch.seq_len
    return run_cost(run, build, [(rows, run.batch.seq_len)])


def run_cost(
    run: RunConfig, build: Callable[[], StagedModel], shapes: Sequence[Sequence[int]]
) -> ModelCost:
    """Return the cost of a built-in model.

    build   returns it on the meta device
    shapes  of a micro-batch's token ids; the last ones have labels, too
    """

    whole = build()
    plan = plan_of(whole)
    model = shorten(build())
    if run.memory.weights == "bf16":
        model.bfloat16()

    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        ids = [torch.ones(*shape, dtype=torch.int64) for shape in shapes]
        return fake_copy(model), (*ids, ids[-1])

    cost = count_model(make, run)
    counted = dict(zip(plan.within(model).units, cost.blocks, strict=True))
    blocks = [counted.get(name) or counted[re.sub(r"\d+$", "1", name)] for name in plan.units]
    passed = whole.activation_shapes(*(torch.empty(shape, device="meta") for shape in shapes))
    return replace(
        cost,
        name=f"{type(whole).__name__}, {plan.layers} layers of {passed[0][-1]}",
        blocks=tuple(blocks),
        tokens=prod(shapes[-1]),
        vocabulary=len(whole.get_parameter("embedding.weight")),
        passed=sum(map(prod, passed)),
        tied=bool(whole.tied_parameters),
        layers=plan.layers,
        ragged=run.task == "translate",
    )


def shorten(model: nn.Module) -> nn.Module:
    """Remove all but two layers of each list of a built-in model: the others cost as much as the
    second one."""
    for layers in model.children():
        if isinstance(layers, nn.ModuleList):
            del layers[2:]
    return model


def fake_copy(model: nn.Module) -> nn.Module:
    """Return the model, whose parameters are on the meta device, with fake ones on the CPU."""
    copies = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad)
        for p in model.parameters()
    }
    return deepcopy(model, copies)


# -- counting --------------------------------------------------------------------------------------


def count_model(make: MakeModel, run: RunConfig) -> ModelCost:
    """Return the cost of a module, which `make` makes with the inputs of a micro-batch.
    UsageError: it has no output with a gradient."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model, inputs = make()
    plan = ParallelPlan(tuple(find_units(model)))
    if isinstance(model, HasPlan):
        plan = model.parallel_plan().within(model)
    optimizers = make_optimizers(model, replace(run.optim, groups=()), run.memory)
    by_parameter = state_bytes(optimizers, run.optim.ema_decay)
    state = {name: by_parameter.get(p, 0.0) for name, p in model.named_parameters()}
    with fake:
        units = count_units(model, inputs, run, plan, state)
    divisors = range(2, min(plan.widths, default=0) + 1)
    parts = next((n for n in divisors if all(width % n == 0 for width in plan.widths)), 0)
    if parts:
        with fake:
            rank, inputs = make()
            apply_tensor_parallel(rank, plan, ProcessGroups(Layout(tensor=parts)), 0, parts)
            of_rank = count_units(rank, inputs, run, plan, state)
        units = [divided(*pair, parts) for pair in zip(units, of_rank, strict=True)]
    embedding, *blocks, output = units
    return ModelCost(
        type(model).__name__,
        embedding,
        tuple(blocks),
        output,
        tokens=len(next(value for value in inputs if isinstance(value, Tensor))),
        heads=plan.widths,
    )


def divided(whole: Unit, rank: Unit, parts: int) -> Unit:
    """Return a unit with what the tensor axis divides, given one rank's part of it."""

    def divide(whole: Amount, rank: Amount) -> Amount:
        split = (whole.whole - rank.whole) * parts / (parts - 1)
        return Amount(whole.whole - split, split)

    return replace(
        whole,
        parameters=tuple(map(divide, whole.parameters, rank.parameters)),
        state=divide(whole.state, rank.state),
        macs=divide(whole.macs, rank.macs),
        saved={mode: divide(saved, rank.saved[mode]) for mode, saved in whole.saved.items()},
    )


class PassCounter(OperationCounter):
    """What each unit of a module takes in two forward passes: one without gradients while this is
    entered, and one that `save` watches. Before the end of the last unit the rest of the module is
    "embedding", after it "output".

    macs      multiply-adds
    products  bytes of results that selective checkpoints keep
    inputs    bytes of a unit's first input
    saved     bytes that are kept for the backward pass, each storage once
    sums      elements of each sum over the tensor axis, in a forward and a backward pass
    """

    def __init__(self, model: nn.Module, units: Sequence[str], regions: Sequence[str]) -> None:
        super().__init__()
        self.macs = Counter[str]()
        self.products = Counter[str]()
        self.inputs = Counter[str]()
        self.saved = Counter[str]()
        self.sums = defaultdict[str, tuple[list[float], list[float]]](lambda: ([], []))
        self._seen = {p.untyped_storage()._cdata for p in model.parameters()}
        self._shared = set[int]()  # storages of inputs beside the first one
        self._last = units[-1] if units else ""
        self._running = ""
        model.register_forward_pre_hook(partial(self._leave, ""))
        for name in units:
            unit = model.get_submodule(name)
            unit.register_forward_pre_hook(partial(self._enter, name))
            unit.register_forward_hook(partial(self._leave, name))
        for name in regions:
            model.get_submodule(name).register_forward_hook(self._add_sums)

    def _enter(self, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._running = name
        self.inputs[name] = sum(value.nbytes for value in tensors_in(inputs[:1]))
        if torch.is_grad_enabled():  # else memory that is free before the other pass
            self._shared |= {value.untyped_storage()._cdata for value in tensors_in(inputs[1:])}

    def _leave(self, name: str, *_: object) -> None:
        self._running = "output" if name == self._last else "embedding"

    def _add_sums(self, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            forward, backward = self.sums[self._running]
            forward.append(output.numel())
            backward += [value.numel() for value in tensors_in(inputs) if value.requires_grad]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = self.flops
        output = super().__torch_dispatch__(func, types, args, kwargs)
        self.macs[self._running] += (self.flops - before) // 2
        if func in SAVED_OPS:
            self.products[self._running] += sum(value.nbytes for value in tensors_in(output))
        return output

    def save(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd keeps. What units share is no unit's."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            name = "embedding" if storage._cdata in self._shared else self._running
            self.saved[name] += storage.nbytes()
        return tensor

    def saved_in(self, name: str, is_block: bool) -> dict[Mode, Amount]:
        saved = dict.fromkeys(CHECKPOINT_MODES, Amount(self.saved[name]))
        if is_block:
            saved["selective"] = Amount(self.inputs[name] + self.products[name])
            saved["full"] = Amount(self.inputs[name])
        return saved


def count_units(
    model: nn.Module,
    inputs: tuple[Any, ...],
    run: RunConfig,
    plan: ParallelPlan,
    state: Mapping[str, float],
) -> list[Unit]:
    """Return the embedding, the units in forward order and the output, as one rank has them.

    state  bytes of the optimizer per element of each parameter
    """
    blocks = find_units(model)  # whose activations can be computed again
    names = plan.units
    counter = PassCounter(model, names, plan.regions)

    def forward() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=run.compute.precision == "bf16"):
            return model(*inputs)

    with torch.no_grad(), counter:
        forward()
    with saved_tensors_hooks(counter.save, lambda tensor: tensor):
        outputs = forward()
    if not any(output.requires_grad for output in tensors_in(outputs)):
        raise UsageError(
            f"no output of the module {type(model).__name__} has a gradient", "lockstep plan", HINT
        )
    parameters = parameters_by_unit(model, names)
    layers = model.layer_names() if isinstance(model, StagedModel) else names

    def unit(name: str) -> Unit:
        return Unit(
            kind_of(model, name),
            tuple(Amount(p.numel()) for p in parameters[name].values()),
            Amount(sum(state[path] * p.numel() for path, p in parameters[name].items())),
            Amount(counter.macs[name]),
            counter.saved_in(name, name in blocks),
            counter.sums[name],
            is_layer=name in layers,
        )

    return [unit(name) for name in ("embedding", *names, "output")]


def kind_of(model: nn.Module, unit: str) -> str:
    """Return the name of units that take the same time."""
    return unit.split(".")[0].removesuffix("s") if isinstance(model, StagedModel) else unit


def parameters_by_unit(
    model: nn.Module, units: Sequence[str]
) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters of each unit, of the "embedding" and of the "output". A
    model without stages has all parameters outside of units in its embedding."""
    outer = {name.partition(".")[0] for name, _ in model.named_parameters()}
    if isinstance(model, StagedModel):
        outer = set(model.outer_modules((), first=True, last=False))
    found: dict[str, dict[str, nn.Parameter]]
    found = {name: {} for name in ("embedding", *units, "output")}
    for name, parameter in model.named_parameters():
        rest = "embedding" if name.partition(".")[0] in outer else "output"
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), rest)
        found[unit][name] = parameter
    return found


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested collections and dataclasses."""
    found = list[Tensor]()
    for value in tree_iter(values):
        if isinstance(value, Tensor):
            found.append(value)
        elif is_dataclass(value):
            found += tensors_in(vars(value))
    return found


# -- a user's own module ---------------------------------------------------------------------------


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


def own_model_cost(spelled: str, run: RunConfig) -> ModelCost:
    """Return the cost of the module that FILE.py:FUNCTION returns. UsageError: it needs values of
    its inputs."""
    try:
        return count_model(lambda: make_module(spelled, torch.device("cpu")), run)
    except LockstepError:
        raise
    except Exception as error:
        raise UsageError(
            described(error),
            f"a forward pass of {spelled} on torch's fake tensors, {line_of(error, spelled)}",
            "operations that depend on values of the inputs cannot be planned; "
            "run the function and its module alone to see other errors",
        ) from error


def total(outputs: Any) -> Tensor:
    """Return the sum of all outputs that have a gradient: something to start a backward pass
    from."""
    sums = [value.float().sum() for value in tensors_in(outputs) if value.requires_grad]
    return sum(sums, torch.zeros(()))
