"""The layout of a Session, and its model and optimizers in slices."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.checkpoint.shards import slice_of
from lockstep.checkpoint.state_dict import place_like_torch
from lockstep.elastic.collectives import assert_equal_on_all_ranks
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.layout import Layout, choose_layout
from lockstep.log import log
from lockstep.parallel.build_replica import take_weights_of_rank_0
from lockstep.parallel.deferred_init import Recording, recording_of
from lockstep.parallel.gradient_watch import Unused
from lockstep.parallel.own_model import find_copy, shard_average, shard_module
from lockstep.parallel.parallelize import DEFAULT_SPLITS, InitParam, LocalModel, SplitOptions
from lockstep.parallel.plans import HasPlan
from lockstep.runtime.variables import LAYOUT
from lockstep.runtime.worker_env import WorkerEnv
from lockstep.training.owner_update import apply_owner_rule

# Errors of torch for a sharded parameter outside of the model's passes.
OF_SLICES = (
    "mixed torch.Tensor and DTensor|No backend type associated"
    "|FSDP does not support deepcopy|a sharding strategy registered"
)

if TYPE_CHECKING:
    from lockstep.training.initial_values import InitialValues


def choose_replica_layout(
    given: Layout,
    micro_batches: int,
    worker_env: WorkerEnv | None,
    environ: Mapping[str, str] = os.environ,
) -> Layout:
    """Return the layout of a replica: each axis of the command line, or else as `given` to Session.

    environ  with the axes of the command line

    UsageError when the expected workers or micro-batches cannot be divided so.
    """
    layout = given
    for axis, variable in LAYOUT.items():
        where = f"Session({axis}=...)"
        if text := environ.get(variable, ""):  # set by lockstep run --layout.AXIS
            if not (text.isdecimal() and int(text)):
                raise UsageError(
                    f"{variable}={text!r} is not a number of workers",
                    "environment",
                    "give 1 or more",
                )
            where = f"--layout.{axis} or {variable}"
            layout = replace(layout, **{axis: int(text)})
        size = getattr(layout, axis)
        if axis == "shard" and not 1 <= size <= micro_batches:
            raise UsageError(
                f"{size} shards share {micro_batches} micro-batches a step",
                f"{where}, Session(micro_batches=...)",
                f"give 1 to {micro_batches} shards, or more micro-batches",
            )
        if size < 1:
            raise UsageError(f"{axis}={size} is not a number of workers", where, "give 1 or more")
    if worker_env:
        refuse_incomplete_replicas(worker_env.expected_workers, layout)
    return layout


def refuse_incomplete_replicas(workers: int, layout: Layout) -> None:
    if workers % (size := layout.workers_per_replica):
        raise UsageError(
            f"{workers} workers cannot form replicas of {size} workers ({layout})",
            "--workers; --layout or Session(...)",
            f"give a multiple: --workers {-(-workers // size) * size}",
        )


def refuse_other_replicas(workers: int, layout: Layout) -> None:
    if workers != (size := layout.workers_per_replica):
        raise UsageError(
            f"the runtime has replicas of {workers} workers, and those of the layout have {size}",
            "Session(runtime=...)",
            f"lockstep.ElasticRuntime.join(limits=lockstep.ElasticLimits(replica_size={size}))",
        )


def shard_session(  # 9 parameters: what Session and Session.prepare were given
    runtime: ElasticRuntime,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    layout: Layout,
    facts: Mapping[str, str],
    state: Mapping[str, Any],
    *,
    splits: SplitOptions = DEFAULT_SPLITS,
    init: InitialValues | None = None,
    unused: Unused = "raise",
) -> LocalModel:
    """Collective. Shard `model` and its averages in `state`; give the optimizers their slices.

    facts   that are equal on all workers, also on a worker that joins others
    init    of a model on the meta device; None: it has its values, or those of deferred_init
    unused  see ReplicaGroup; with "zero" the shards gather the model at once
    """
    if unused == "zero" and splits.units is None:
        splits = replace(splits, units=())
    if runtime.is_joining:
        runtime.join_running(facts)  # without a rank a worker does not know its slices
    else:
        assert_equal_on_all_ranks(runtime, runtime.fingerprint(facts))
    if isinstance(model, HasPlan):
        limits = model.parallel_plan().layout_limits(int(facts["micro_batches"]))
        asked = replace(layout, replicate=0)
        layout = choose_layout(asked, runtime.world.size, limits, "[layout] of the run")
    averages = {
        f"state.{name}.": (value, copy)
        for name, value in state.items()
        if (copy := find_copy(value, model))
    }
    is_scaled = any(isinstance(value, torch.amp.GradScaler) for value in state.values())
    has_more = bool(averages) or is_scaled or "buffers" in facts
    recording = recording_of(model)
    refuse_unsupported_splits(model, layout, has_more=has_more, is_deferred=recording is not None)
    init_param = deferred_values(runtime, model, init, recording)
    modules = [average for average, _ in averages.values()] + [model] * (init_param is None)
    if runtime.first_generation and not init:
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        tensors = [tensor for tensor in tensors if not tensor.is_meta]
        take_weights_of_rank_0(tensors, runtime.world.device, runtime.group.wait)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    position = layout.coordinates(runtime.world.rank)
    if not runtime.first_generation:  # ranks that are training would not take part
        splits = replace(splits, verify=False)
    local = shard_module(
        model, layout, position, runtime.world.device, init_param=init_param, splits=splits
    )
    for prefix, (average, copy) in averages.items():
        shard_average(prefix, average, copy, local, position, init_param)
    for optimizer in optimizers:
        give_slices(optimizer, local, names)
        if is_scaled:
            refuse_shard_without_rows(optimizer, local)
        apply_owner_rule(optimizer, local, runtime)
    return local


def refuse_unsupported_splits(
    model: nn.Module, layout: Layout, *, has_more: bool, is_deferred: bool
) -> None:
    """UsageError where a model cannot be split so.

    has_more     averages, a GradScaler or declared buffers
    is_deferred  made by deferred_init
    """
    if layout.tensor > 1 and layout.pipeline > 1 and not isinstance(model, HasPlan):
        raise UsageError(
            f"tensor {layout.tensor} with pipeline {layout.pipeline} "
            "is not supported for own models",
            "layout",
            "give one of them",
        )
    if layout.pipeline > 1 and has_more:
        raise UsageError(
            "averages of the model, GradScalers "
            "and declared buffers are not supported in a pipeline",
            f"session.state(...) and Session(buffers=...), layout {layout}",
            "use layout.shard; bf16 instead of fp16",
        )
    if is_deferred and layout.workers_per_replica > layout.shard:
        raise UsageError(
            "a model of deferred_init is not supported in a pipeline or with tensor",
            f"layout {layout}",
            "construct the model itself, or give layout.shard only",
        )


def deferred_values(
    runtime: ElasticRuntime,
    model: nn.Module,
    init: InitialValues | None,
    recording: Recording | None,
) -> InitParam | None:
    """Return what computes the initial values of the model; None: it has them."""
    if init:
        from lockstep.training.initial_values import until_drawn

        return until_drawn(init, model)
    if recording is None:
        return None

    def value_of_rank_0(name: str, _: torch.Size) -> Tensor:
        value: Tensor = recording.value(name).detach().to(runtime.world.device, copy=True)
        if runtime.first_generation:
            dist.broadcast(value, 0)
        return value

    return value_of_rank_0


def refuse_shard_without_rows(optimizer: torch.optim.Optimizer, local: LocalModel) -> None:
    """UsageError: a GradScaler would find no gradient on the last shard."""
    shards = local.layout.shard
    wholes = [local.tensor_slices[name] for name in local.updated_together[-1]]
    if not any(whole.split_rows(shards - 1, shards).rows for whole in wholes):
        name = type(optimizer).__name__
        raise UsageError(
            f"the last of {shards} shards "
            f"has no rows of the parameters of {name}, and a GradScaler needs some",
            "session.state(scaler=...), in shards",
            "use fewer shards, or one optimizer for all parameters",
        )


def give_slices(
    optimizer: torch.optim.Optimizer, local: LocalModel, names: Mapping[int, str]
) -> None:
    """Replace whole parameters and their state by this worker's slices. names: by id of a
    parameter."""
    together: list[str] = []
    local.updated_together.append(together)
    for group in optimizer.param_groups:
        for i, parameter in enumerate(group["params"]):
            name = names[id(parameter)]
            together.append(name)
            group["params"][i] = own = (local.local_params | local.placeholders)[name]
            state = optimizer.state.pop(parameter, {})
            if name in local.placeholders:
                continue
            for key, value in state.items():
                if isinstance(value, Tensor):
                    part = slice_of(f"optim.{name}.{key}", tuple(value.shape), local.slices)
                    state[key] = place_like_torch(key, part.of(value), own, group)
            if state:
                optimizer.state[own] = state


def warn_of_other_bits(facts: Mapping[str, Any], layout: Layout) -> None:
    """Warn when the checkpoint with these facts was saved with another size of the tensor axis."""
    if facts and (before := facts.get("tensor", 1)) != layout.tensor:
        log.warning(
            "tensor is %d, it was %d: from here on other bits, equal to rounding",
            layout.tensor,
            before,
        )


def refuse_use_of_slices(error: BaseException | None) -> None:
    """UsageError in place of torch's for a sharded parameter outside of the model's passes."""
    if isinstance(error, RuntimeError | AssertionError) and (
        found := re.search(OF_SLICES, str(error))
    ):
        raise UsageError(
            "an operation needs whole weights or gradients, "
            f"and this worker has slices of them ({found[0]})",
            "the training loop, in shards",
            "clip with session.clip_grad_norm_, compare outputs in session.evaluate, "
            "or train with whole replicas (docs/parallelism.md)",
        ).with_traceback(error.__traceback__) from None
