"""Refuse, before the first step, a loop that session.learners cannot train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint.stateful import unregistered_schedulers
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.parallel.running_statistics import BATCH_NORMS
from lockstep.training.inner_optimizers import INNER_OPTIMIZERS
from lockstep.training.owner_update import couples_elements
from lockstep.training.replica_group import ReplicaOptions
from lockstep.training.session_checks import refuse_unprepared
from lockstep.training.session_parts import Declared
from lockstep.units import join_names

if TYPE_CHECKING:
    from lockstep.training.learners import Learners

WHERE = "session.learners(...)"


def refuse_wrong_learners(
    declared: Declared,
    layout: Layout,
    inner: Sequence[Any],
    count: int,
    steps: int,
) -> None:
    """UsageError for arguments of session.learners that do not fit the Session."""
    if declared.model is None or INNER_OPTIMIZERS in declared.state:
        raise UsageError(
            "session.learners before session.prepare"
            if declared.model is None
            else "a second session.learners",
            WHERE,
            "call it once, after model, outer = session.prepare(model, outer)",
        )
    if not inner or count < 1 or steps < 1:
        raise UsageError(
            f"{len(inner)} optimizers, count={count}, steps={steps}",
            WHERE,
            "learners = session.learners(inner, count=4, steps=50)",
        )
    refuse_unprepared(declared.model, inner)
    if any(optimizer is outer for optimizer in inner for outer in declared.optimizers):
        raise UsageError(
            "an optimizer is both inner and outer",
            "session.prepare(model, outer), session.learners(inner, ...)",
            "make two: the outer one, often SGD, goes to prepare",
        )
    if declared.micro_batches % count:
        raise UsageError(
            f"micro_batches={declared.micro_batches} is not a multiple of {count} learners",
            "Session(micro_batches=...), session.learners(count=...)",
            f"give micro_batches={-(-declared.micro_batches // count) * count}, or another count",
        )
    if declared.save_every % steps:
        raise UsageError(
            f"save_every={declared.save_every} is not a multiple of {steps} steps of a learner, "
            "and a common state exists after outer steps only",
            "Session(save_every=...), session.learners(steps=...)",
            f"give save_every={max(1, round(declared.save_every / steps)) * steps}",
        )
    _refuse_layout(layout, declared.micro_batches // count, inner)
    _refuse_options(declared.options)


def _refuse_layout(layout: Layout, micro_batches: int, inner: Sequence[Optimizer]) -> None:
    """micro_batches: of a learner's step."""
    if layout.tensor * layout.pipeline > 1:
        raise UsageError(
            "session.learners is not supported with tensor or pipeline",
            str(layout),
            "train whole replicas, or shards",
        )
    if layout.shard > micro_batches:
        raise UsageError(
            f"{layout.shard} shards share {micro_batches} micro-batches of a learner's step",
            f"layout {layout}, Session(micro_batches=...), session.learners(count=...)",
            "each shard needs one: give more micro-batches, or fewer shards or learners",
        )
    coupled = [type(optimizer).__name__ for optimizer in inner if couples_elements(optimizer)]
    if layout.shard > 1 and coupled:
        raise UsageError(
            f"{', '.join(coupled)} needs whole tensors, which shards of a learner have not",
            f"layout {layout}, {WHERE}",
            "use an optimizer that updates each element by itself, such as AdamW without fused, or "
            "train whole replicas",
        )


def _refuse_options(options: ReplicaOptions) -> None:
    wrong = {
        'on_nonfinite="ignore"': options.get("on_nonfinite") == "ignore",
        "buffers": bool(options.get("buffers")),
        "rehearse=True": options.get("rehearse") is True,
        f"verify_every={options.get('verify_every')}": options.get("verify_every", 1) > 1,
    }
    if names := [name for name, is_set in wrong.items() if is_set]:
        raise UsageError(
            f"session.learners is not supported with {', '.join(names)}",
            "Session(...)",
            "remove it: a learner cannot be rehearsed, and weights are compared in outer steps",
        )


def refuse_incomplete(
    learners: Learners,
    declared: Declared,
    workers: int,
    layout: Layout,
) -> None:
    """UsageError for what the loop has declared, and learners cannot follow."""
    inner = learners.optimizers
    model = declared.refuse_incomplete().module
    if declared.carried:
        what, hint = "session.per_micro_batch is not supported with session.learners", "remove it"
        raise UsageError(what, "session.state(...)", hint)
    if names := [n for n, v in declared.state.items() if isinstance(v, torch.amp.GradScaler)]:
        raise UsageError(
            f"a GradScaler is not supported with session.learners: {join_names(names)}",
            "session.state(...)",
            'train in bf16: session.prepare(model, outer, precision="bf16")',
        )
    if schedulers := unregistered_schedulers(inner, declared.state):
        name = type(schedulers[0]).__name__
        raise UsageError(
            f"{name} sets the learning rate of an inner optimizer, and session.state has it not",
            WHERE,
            "name it before the loop: session.state(scheduler=scheduler)",
        )
    if names := [
        name
        for name, child in model.named_modules()
        if isinstance(child, BATCH_NORMS) and child.track_running_stats
    ]:
        raise UsageError(
            f"BatchNorm is not supported with session.learners: {join_names(names)}",
            "each learner would have other running statistics",
            "use GroupNorm or LayerNorm, or track_running_stats=False",
        )
    _refuse_parameters(inner, model)
    if workers > (most := learners.count * layout.workers_per_replica):
        raise UsageError(
            f"{workers} workers train {learners.count} learners ({layout})",
            "--workers; session.learners(count=...)",
            f"start at most {most} workers, or give more learners",
        )


def _refuse_parameters(inner: Sequence[Optimizer], model: nn.Module) -> None:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    held = {id(p) for o in inner for group in o.param_groups for p in group["params"]}
    if names := [name for name, p in trained.items() if id(p) not in held]:
        raise UsageError(
            f"no inner optimizer updates {join_names(names)}",
            WHERE,
            "give it to one, or freeze it with requires_grad_(False)",
        )
    if names := [name for name, p in trained.items() if p.dtype.itemsize < 4]:
        raise UsageError(
            f"trained parameters of 16 bits: {join_names(names)}",
            "session.learners: a learner's small change would be rounded away",
            'keep the weights in float32, and prepare(..., precision="bf16")',
        )
