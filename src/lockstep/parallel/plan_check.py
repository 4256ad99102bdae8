"""Compare a model's split layers with whole ones, in the first step of a start.

Some wrong plans run: where one weight packs query, key and value and is split as one matrix, all
shapes fit. So each region, the smallest module around colwise layers and their rowwise partners,
also runs whole on each worker, on the inputs of the first micro-batch. Both forms get the same
random weights, since initial values such as zeros would hide differences. Outputs and all gradients
must be equal to rounding. Regions of equal layers are compared once.

Weights outside of regions must have the same gradient on all tensor ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from lockstep.errors import UsageError, refuse
from lockstep.parallel.digest import digest_of
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.plans import PARTIAL, WHERE, ParallelPlan, refuse_unsplittable
from lockstep.parallel.tensor_parallel import apply_tensor_parallel
from lockstep.runtime.tensor_bytes import tensors_of
from lockstep.tensor_slice import TensorSlice
from lockstep.units import join_names

HINT = (
    'give a weight that packs three matrices ("colwise", 3); '
    "reshape with the size of a head, view(..., -1, head_dim), not their number; modules "
    f'with whole weights between split layers are "{PARTIAL}"; rehearse=False skips this check'
)


class RegionCall(NamedTuple):
    """The first call of a region: copies of its inputs, its buffers, and autocast."""

    region: str
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    buffers: dict[str, Tensor]
    autocast: torch.autocast

    def run(
        self, module: nn.Module, weights: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Call a form of the region; return its outputs and inputs that have gradients."""
        inputs, named = deepcopy((self.inputs, self.named))
        outputs = functional_call(module.eval(), {**self.buffers, **weights}, inputs, named)
        return [x for x in tensors_of(outputs) if x.requires_grad], [
            x for x in tensors_of([inputs, named]) if x.requires_grad
        ]


class DetachedCopies(TorchFunctionMode):
    """Let deepcopy copy tensors that have a history, without it."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is not Tensor.__deepcopy__:
            return function(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(
            id(tensor), tensor.detach().clone().requires_grad_(tensor.requires_grad)
        )


class PlanCheck:
    """Made before a model is split; `watch` follows. Used in one step."""

    def __init__(self, model: nn.Module, plan: ParallelPlan, groups: ProcessGroups) -> None:
        self.model = model
        self.plan = plan
        self.groups = groups
        self.key_of = {name: key_of(model, name, plan) for name in regions_of(model, plan)}
        self.whole = {
            key: without_values(model.get_submodule(name)) for name, key in self.key_of.items()
        }
        self.calls: dict[str, RegionCall] = {}
        self.is_due = True

    def watch(self, slices: Mapping[str, TensorSlice]) -> None:
        """Watch the regions of the model, which has been split into `slices`."""
        self.slices = slices
        regions = {name: self.model.get_submodule(name) for name in self.key_of}
        self.split = {key: without_values(regions[name]) for name, key in self.key_of.items()}
        record = torch.compiler.disable(self._record)
        self.hooks = [
            region.register_forward_pre_hook(partial(record, name), with_kwargs=True, prepend=True)
            for name, region in regions.items()
        ]

    def stop(self) -> None:
        """Compare nothing from now on: ranks of another generation would not take part."""
        while self.hooks:
            self.hooks.pop().remove()
        for values in (self.calls, self.key_of, self.whole, self.split):
            values.clear()
        self.is_due = False

    def _record(
        self, name: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        key = self.key_of.get(name)
        if torch.is_grad_enabled() and key is not None and key not in self.calls:
            kind = next(self.model.parameters()).device.type
            autocast = torch.autocast(
                kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
            )
            with DetachedCopies():
                copies = deepcopy((inputs, named))
            self.calls[key] = RegionCall(name, *copies, dict(module.named_buffers()), autocast)

    def compare(self, *, complete: bool = True) -> None:
        """Collective in the tensor group. UsageError, with names, for regions that compute
        something else when they are split. complete: and for regions that were not called."""
        for key, call in self.calls.items():
            self._compare_region(self.whole[key], self.split[key], call)
        if uncalled := [
            name for name, key in self.key_of.items() if complete and key not in self.calls
        ]:
            raise UsageError(
                f"{join_names(uncalled)} did not run in the first micro-batch, "
                "so their plan cannot be verified",
                WHERE,
                "call these modules, not their parts; rehearse=False skips this check",
            )
        if complete:
            self.key_of.clear()
            self.calls.clear()

    def refuse_unequal(self, gradients: Mapping[str, Tensor]) -> None:
        """Collective in the tensor group. UsageError when the gradients of whole weights differ."""
        names = [name for name in gradients if self.slices[name].is_whole]
        names = [name for name in names if not self.plan.is_partial(name)]
        group, device = self.groups.tensor_group, next(iter(gradients.values())).device
        digests = torch.zeros(len(names), self.groups.layout.tensor, dtype=torch.int64)
        own = [digest_of([gradients[name]]) >> 1 for name in names]
        digests[:, 0 if group is None else group.rank()] = torch.tensor(own)
        rows = self.groups.all_reduce(digests.to(device), group).tolist()
        self.groups.raise_failure()
        self.stop()
        refuse(
            [name for name, row in zip(names, rows, strict=True) if len(set(row)) > 1],
            "the gradients of whole weights differ between tensor ranks:",
            WHERE,
            HINT,
        )

    def _compare_region(self, whole: nn.Module, split: nn.Module, call: RegionCall) -> None:
        """Collective in the tensor group."""
        parts = self.groups.layout.tensor
        prefix = f"{call.region}." if call.region else ""
        region = call.region or "the model"
        device = next(self.model.parameters()).device
        weights = random_weights(whole, device)
        slices = {name: self.slices[prefix + name] for name in weights}
        own_weights = {
            name: slices[name].of(weight.detach()).clone().requires_grad_()
            for name, weight in weights.items()
        }
        with call.autocast, torch.enable_grad():
            is_rounded = torch.is_autocast_enabled(call.autocast.device)
            outputs, inputs = call.run(whole, weights)
            try:
                own_outputs, own_inputs = call.run(split, own_weights)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                raise UsageError(
                    f"{region} does not run with its layers split "
                    f"over {parts} tensor ranks: {error}",
                    WHERE,
                    HINT,
                ) from error
            both = zip(outputs, own_outputs, strict=False)
            pairs = [(a, b) for a, b in both if a.shape == b.shape]
            if not pairs:
                raise UsageError(
                    f"{region} returns no tensor of the whole shape when its layers are split",
                    WHERE,
                    HINT,
                )
            wholes, owns = [a for a, _ in pairs], [b for _, b in pairs]
            gradients = gradients_of(wholes, [*inputs, *weights.values()])
            own_gradients = gradients_of(owns, [*own_inputs, *own_weights.values()])
        for i, (name, part) in enumerate(slices.items(), len(inputs)):
            gradients[i] = part.of(gradients[i])
            if self.plan.is_partial(prefix + name):
                own = own_gradients[i].contiguous().clone()
                own_gradients[i] = self.groups.all_reduce(own, self.groups.tensor_group)
        labels = [f"output {i} of {region}" for i in range(len(pairs))]
        labels += [f"the gradient of input {i} of {region}" for i in range(len(inputs))]
        labels += [f"the gradient of {prefix}{name}" for name in slices]
        is_rounded |= any(weight.dtype.itemsize < 4 for weight in weights.values())
        tolerance = 5e-2 if is_rounded else 1e-3
        errors = [*differences(wholes, owns), *differences(gradients, own_gradients)]
        flags = torch.tensor([float(not error <= tolerance) for error in errors], device=device)
        self.groups.all_reduce(flags, self.groups.tensor_group)
        self.groups.raise_failure()
        refuse(
            [label for label, flag in zip(labels, flags.tolist(), strict=True) if flag],
            f"layers split over {parts} tensor ranks compute something else than whole ones:",
            WHERE,
            HINT,
        )


def split_layers(
    model: nn.Module, plan: ParallelPlan, groups: ProcessGroups, part: int, *, verify: bool
) -> tuple[dict[str, TensorSlice], PlanCheck | None]:
    """Split a model in place; return {parameter: its slice}, and the check of layers with
    styles."""
    parts = groups.layout.tensor
    if parts > 1:
        refuse_unsplittable(model, plan.split_styles(), parts)
    check = PlanCheck(model, plan, groups) if verify and plan.styles and parts > 1 else None
    slices = apply_tensor_parallel(model, plan, groups, part, parts)
    if check:
        check.watch(slices)
    return slices, check


def regions_of(model: nn.Module, plan: ParallelPlan) -> list[str]:
    """Return the smallest modules with a forward() that have a layer's partners. A layer with whole
    inputs and outputs is one itself. UsageError for a layer without partners."""
    regions = dict[str, None]()
    for name, style in plan.styles.items():
        region = name
        has_partners = not (style.kind.takes_whole and style.kind.gives_whole)
        needed = {"colwise", "rowwise"} if has_partners else set()
        while not (needed <= styles_within(region, plan) and has_forward(model, region)):
            if not region:
                raise UsageError(
                    f"{name} is {style.name}, "
                    "and the model does not have both colwise and rowwise layers",
                    WHERE,
                    "outputs of colwise layers are inputs of a rowwise layer; "
                    "or name it colwise_gather_output",
                )
            region = region.rpartition(".")[0]
        regions[region] = None
    return list(regions)


def styles_within(region: str, plan: ParallelPlan) -> set[str]:
    prefix = f"{region}." if region else ""
    return {style.name for name, style in plan.styles.items() if name.startswith(prefix)}


def has_forward(model: nn.Module, name: str) -> bool:
    return type(model.get_submodule(name)).forward is not nn.Module.forward


def key_of(model: nn.Module, region: str, plan: ParallelPlan) -> str:
    """Return a text that is equal for equal layers."""
    module, prefix = model.get_submodule(region), f"{region}." if region else ""
    return repr(
        (
            type(module),
            [
                (name, p.shape, plan.style_of(prefix + name))
                for name, p in module.named_parameters()
            ],
        )
    )


def without_values(module: nn.Module) -> nn.Module:
    """Return a copy with its parameters on the meta device."""
    return deepcopy(
        module,
        {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()},
    )


def random_weights(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """Return weights for the parameters on the meta device, equal on all workers."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, p in module.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        value = noise / p[0].numel() ** 0.5 if p.dim() > 1 else 1 + noise / 10
        weights[name] = value.to(device, p.dtype).requires_grad_()
    return weights


def gradients_of(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients of sums of the outputs with random factors, equal on all workers."""
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
    return list(
        torch.autograd.grad(outputs, inputs, factors, allow_unused=True, materialize_grads=True)
    )


def differences(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> list[float]:
    """Return the norms of the differences, relative to those expected or to 1% of the largest."""
    pairs = [
        (a.detach().double().nan_to_num(), b.detach().double().nan_to_num())
        for a, b in zip(expected, actual, strict=True)
    ]
    largest = max((float(a.norm()) for a, _ in pairs), default=0.0)
    return [float((a - b).norm()) / (max(float(a.norm()), 1e-2 * largest) or 1.0) for a, b in pairs]
