"""The model and the optimizers of a Session in shards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from lockstep.config.resolve import environment_variable
from lockstep.elastic.collectives import assert_equal_on_all_ranks
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.parallel.own_model import shard_module
from lockstep.parallel.parallelize import LocalModel
from lockstep.parallel.plans import Patterns
from lockstep.runtime.worker_env import WorkerEnv

SHARD_VARIABLE = environment_variable("layout.shard")  # set by lockstep run --layout.shard
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.ASGD,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip


def choose_shards(given: int, micro_batches: int, worker_env: WorkerEnv | None) -> int:
    """Return the workers per replica: those of the command line, or else `given` to Session.

    UsageError when the expected workers or micro-batches cannot be divided so.
    """
    text = os.environ.get(SHARD_VARIABLE, "")
    where = f"--layout.shard or {SHARD_VARIABLE}" if text else "Session(shard=...)"
    if text and not (text.isdecimal() and int(text)):
        raise UsageError(f"{SHARD_VARIABLE}={text!r} is not a number of workers", "environment", "give 1 or more")
    shards = int(text or given)
    if not 1 <= shards <= micro_batches:
        what = f"{shards} shards share {micro_batches} micro-batches a step"
        raise UsageError(what, f"{where}, Session(micro_batches=...)", f"give 1 to {micro_batches} shards, or more micro-batches")
    if worker_env:
        refuse_incomplete_replicas(worker_env.expected_workers, shards)
    return shards


def refuse_incomplete_replicas(workers: int, shards: int) -> None:
    if workers % shards:
        hint = f"give a multiple: --workers {-(-workers // shards) * shards}"
        raise UsageError(
            f"{workers} workers cannot form replicas of {shards} shards", "--workers; --layout.shard or Session(shard=...)", hint
        )


def shard_session(
    runtime: ElasticRuntime,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    shards: int,
    units: Patterns,
    fingerprint: Mapping[str, str],
) -> LocalModel:
    """Collective. Shard `model` and give this worker's slices to the optimizers.

    fingerprint  of the run, to join workers that train already
    """
    refuse_unshardable_optimizers(optimizers, runtime.world.device)
    if runtime.is_joining:
        runtime.join_running(fingerprint)  # without a rank a worker does not know its slices
    else:
        assert_equal_on_all_ranks(runtime, runtime.fingerprint(fingerprint))
    if runtime.first_generation and runtime.world.size > 1:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                value = tensor.detach().to(runtime.world.device)
                dist.broadcast(value, 0)
                tensor.copy_(value)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    local = shard_module(model, shards, runtime.world.rank % shards, runtime.world.device, units)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [local.local_params[names[id(parameter)]] for parameter in group["params"]]
    return local


def refuse_unshardable_optimizers(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    """UsageError for an optimizer whose update of a slice differs from that of the whole tensor."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not (type(optimizer) in ELEMENTWISE or getattr(optimizer, "elementwise", False)):
            what = f"{name} is not known to update each element by itself"
            hint = (
                "use an elementwise optimizer, or train with whole replicas; elementwise = True in your own optimizer's class declares it"
            )
            raise UsageError(what, "an optimizer in shards", hint)
        if device.type == "cpu" and any(group.get("fused") for group in optimizer.param_groups):
            raise UsageError(f"{name}(fused=True) gives other bits for slices on a CPU", "an optimizer in shards", "use fused=False")
        if any(optimizer.state.values()):
            what = f"{name} has state of whole parameters already"
            raise UsageError(what, "session.prepare, in shards", "prepare before the first optimizer.step() and load_state_dict()")
