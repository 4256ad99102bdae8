"""Run a case: on the ranks of a group through Lockstep, and in one process by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.gradient_fuzz.fuzz_cases import CPU, Case, build_model, freeze, llama_of, llama_value
from support.gradient_fuzz.random_models import tokens_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.data.order import splitmix64
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.parallel.build_replica import build_replica
from lockstep.parallel.parallelize import LocalModel, parallelize
from lockstep.parallel.plans import plan_of
from lockstep.runtime.numerics import seed_generators
from lockstep.tensor_slice import TensorSlice
from lockstep.training.replica_group import ReplicaGroup

Arrays = dict[str, np.ndarray]  # values in float64: every dtype of a case fits exactly


@dataclass
class Outcome:
    """Results of a case on one rank, or its error.

    steps         the summed gradients of each step
    losses        of each step, of this rank's micro-batches
    group_losses  of each step of a ReplicaGroup, summed over all replicas
    died          a process ended without an answer; the error is that of all ranks
    """

    steps: list[Arrays] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    group_losses: list[float] = field(default_factory=list)
    error: str = ""
    died: bool = False


@dataclass
class Expected:
    """One step of a case in one process.

    tree       the gradients of all micro-batches, added in tree order in their own dtype
    exact      the same gradients, added in float64
    magnitude  the sum of their absolute values
    wide       the gradient of the model in float64; only in the first step
    roundoff   of the dtype of each parameter
    unused     micro-batch -> trained parameters that get no gradient there
    """

    tree: Arrays
    exact: Arrays
    magnitude: Arrays
    wide: Arrays
    losses: list[float]
    roundoff: dict[str, float]
    unused: dict[int, list[str]]


def inputs_of(case: Case, step: int, k: int) -> tuple[Any, ...]:
    tokens = tokens_of(step, k)
    if case.kinds[0] != "llama":
        return (tokens,)
    return tokens[:, :-1], tokens[:, 1:].contiguous(), (torch.arange(4) > 1).long().expand(2, 4)


def count_of(step: int, k: int) -> int:
    return int(tokens_of(step, k).count_nonzero()) + 1


@contextmanager
def layer_left_out(case: Case, model: nn.Module, step: int, k: int) -> Any:
    """Make the layer that `case.leave_out` names an identity for this micro-batch."""
    if case.leave_out is None or case.leave_out[:2] != (step, k):
        yield
        return
    layer = model.get_submodule(f"layers.{case.leave_out[2]}")
    plain, layer.forward = layer.forward, lambda x, *rest: x
    yield
    layer.forward = plain


def loss_of(case: Case, call: Callable[..., Tensor], step: int, k: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        return call(*inputs_of(case, step, k))


def scaler_of(case: Case) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler("cpu", init_scale=case.scale) if case.scale else None


def as_array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy().copy()


# -- by plain autograd ------------------------------------------------------------------------------------------------


def tree_sum(leaves: list[Tensor]) -> Tensor:
    """Add neighbors until one is left; a last one without a neighbor moves up a level."""
    while len(leaves) > 1:
        leaves = [
            leaves[i] + leaves[i + 1] if i + 1 < len(leaves) else leaves[i]
            for i in range(0, len(leaves), 2)
        ]
    return leaves[0]


def expected_steps(case: Case) -> list[Expected]:
    """Return the steps of the case in one process; the last one is the first with a gap."""
    model, found = build_model(case), []
    for step in range(case.steps):
        freeze(case, model, step)
        wide = deepcopy(model).double() if step == 0 else None
        leaves, losses, unused = gradients_of_step(case, model, step)
        wide_leaves = gradients_of_step(case, wide, step, autocast=False)[0] if wide else {}
        divisor = sum(count_of(step, k) for k in range(case.micro_batches)) if case.group else 1
        complete = {name: one for name, one in leaves.items() if len(one) == case.micro_batches}
        found.append(
            Expected(
                {name: as_array(tree_sum(one).div(divisor)) for name, one in complete.items()},
                {
                    name: as_array(torch.stack([g.double() for g in one]).sum(0)) / divisor
                    for name, one in complete.items()
                },
                {
                    name: as_array(torch.stack([g.double().abs() for g in one]).sum(0)) / divisor
                    for name, one in complete.items()
                },
                {
                    name: as_array(torch.stack(one).sum(0)) / divisor
                    for name, one in wide_leaves.items()
                    if name in complete
                },
                losses,
                {name: torch.finfo(one[0].dtype).eps / 2 for name, one in complete.items()},
                unused,
            )
        )
        if unused:
            break
        shrink_weights(case, model.parameters())
    return found


def gradients_of_step(
    case: Case, model: nn.Module, step: int, *, autocast: bool = True
) -> tuple[dict[str, list[Tensor]], list[float], dict[int, list[str]]]:
    leaves: dict[str, list[Tensor]] = {}
    losses, unused = [], {}
    for k in range(case.micro_batches):
        model.zero_grad()
        seed_generators(splitmix64(case.seed, step, k) >> 1, CPU)
        with layer_left_out(case, model, step, k):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast and case.autocast):
                loss = model(*inputs_of(case, step, k))
            scaler = scaler_of(case)
            (scaler.scale(loss) if scaler else loss).backward()
        losses.append(float(loss.detach()))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
        if missing := [name for name, p in trained.items() if p.grad is None]:
            unused[k] = missing
        for name, p in trained.items():
            if p.grad is not None:
                leaves.setdefault(name, []).append(p.grad.clone())
    return leaves, losses, unused


def shrink_weights(case: Case, parameters: Iterable[nn.Parameter]) -> None:
    """Change the trained weights between two steps, by the same bits for any gradient.

    "moved" may also change their memory format, by which torch chooses kernels.
    """
    with torch.no_grad():
        for p in parameters:
            if p.requires_grad:
                p.mul_(0.9)
            if case.after_step == "moved":
                p.data = p.data.clone(memory_format=torch.contiguous_format)


# -- through Lockstep -------------------------------------------------------------------------------------------------


def checkpoint_blocks(blocks: list[nn.Module]) -> None:
    for block in blocks:
        plain = block.forward
        block.forward = lambda *inputs, plain=plain: checkpoint(plain, *inputs, use_reentrant=False)


def run_cases(runtime: ElasticRuntime, cases: list[Case], plant: str) -> list[Outcome]:
    """Return the outcomes of the cases up to the first error, which breaks a group of several."""
    outcomes = []
    for case in cases:
        outcome = Outcome()
        try:
            run_case(runtime, case, plant, outcome)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcomes.append(outcome)
        if outcome.error and runtime.world.size > 1:
            break
    return outcomes


def run_case(runtime: ElasticRuntime, case: Case, plant: str, outcome: Outcome) -> None:
    """Train the steps of the case. After an error the process exits, so nothing is closed."""
    if case.layout.workers_per_replica > 1:
        run_sharded(runtime, case, plant, outcome)
        return
    model = build_model(case)
    with torch.no_grad():
        for p in model.parameters() if runtime.world.rank else ():
            p.zero_()  # rank 0's values arrive when the replica is built
    freeze(case, model, 0)
    options: dict[str, Any] = {
        "micro_batches": case.micro_batches,
        "seed": case.seed,
        "bucket_bytes": case.bucket_bytes,
    }
    replicas = (
        ReplicaGroup(runtime, model, **options) if case.group else build_replica(model, **options)
    )
    for step in range(case.steps):
        freeze(case, model, step)
        for k in replicas.micro_batches(step):
            with (
                planted(case, plant, model, step, k) as other,
                layer_left_out(case, model, step, k),
            ):
                loss = loss_of(case, model if case.calls_model else replicas, step, other)
                if case.group:
                    replicas.backward(loss, count_of(step, k))
                elif case.scale:
                    replicas.backward(loss, scaler_of(case))
                else:
                    replicas.backward(loss)
        trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
        for name, p in trained.items():
            assert (p.grad.shape, p.grad.dtype, p.grad.device) == (p.shape, p.dtype, p.device), name
        outcome.steps.append({name: as_array(p.grad) for name, p in trained.items() if p.numel()})
        outcome.losses.append([*(replicas.replica if case.group else replicas).losses().values()])
        outcome.group_losses += [replicas.loss] if case.group else []
        shrink_weights(case, model.parameters())
        use_gradients(case, model)
    replicas.__exit__(None)


def use_gradients(case: Case, model: nn.Module) -> None:
    """Treat .grad between two steps as `case.after_step` names it."""
    if case.after_step in ("none", "zeros"):
        model.zero_grad(set_to_none=case.after_step == "none")
    for p in model.parameters() if case.after_step == "replaced" else ():
        p.grad = None if p.grad is None else p.grad * 0.5


def run_sharded(runtime: ElasticRuntime, case: Case, plant: str, outcome: Outcome) -> None:
    model = llama_of(case)
    freeze(case, model, 0)
    if case.checkpointed:
        checkpoint_blocks([model.get_submodule(name) for name in plan_of(model).units])
    local = parallelize(
        model,
        case.layout,
        case.layout.coordinates(runtime.world.rank),
        lambda name, size: llama_value(case, name, size),
        CPU,
        prefetch_units=case.prefetch_units,
        reshard_after_forward=case.reshard,
    )
    replica = build_replica(
        local,
        micro_batches=case.micro_batches,
        seed=case.seed,
        reduce_once_per_step=case.once_per_step,
    )
    for step in range(case.steps):
        for k in replica.micro_batches(step):
            with (
                planted(case, plant, local.module, step, k) as other,
                layer_left_out(case, local.module, step, k),
            ):
                replica.backward(loss_of(case, replica, step, other))
        outcome.steps.append(assemble(local))
        outcome.losses.append([*replica.losses().values()])
        shrink_weights(case, local.local_params.values())
    replica.__exit__(None)


def assemble(local: LocalModel) -> Arrays:
    """Return the whole gradients, from the slices of all workers."""
    own = {
        name: (local.slices[name], p.grad)
        for name, p in local.local_params.items()
        if p.grad is not None
    }
    per_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(per_rank, own)
    whole: dict[str, Tensor] = {}
    for slices in per_rank:
        for name, (piece, gradient) in slices.items():
            target = whole.setdefault(
                name, torch.full(piece.shape, float("nan"), dtype=gradient.dtype)
            )
            piece.copy_to(TensorSlice.whole(piece.shape), gradient, target)
    return {name: as_array(gradient) for name, gradient in whole.items()}


@contextmanager
def planted(case: Case, plant: str, model: nn.Module, step: int, k: int) -> Any:
    """Plant a fault in micro-batch `k`; yield the micro-batch whose inputs are computed instead.

    drop    the last micro-batch contributes nothing to the trained parameter with fewest elements
    order   the first and the last micro-batch change their places in the sum
    """
    last = case.micro_batches - 1
    if plant == "drop" and k == last:
        parameter = min(
            (p for p in model.parameters() if p.requires_grad and p.numel()),
            key=lambda p: p.numel(),
        )
        handle = parameter.register_hook(torch.zeros_like)
        yield k
        handle.remove()
    else:
        yield {0: last, last: 0}.get(k, k) if plant == "order" else k
