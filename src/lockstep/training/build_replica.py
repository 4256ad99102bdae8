"""Build the replica that a ReplicaGroup trains, and refuse a checkpointer of another model."""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep.checkpoint.state_dict import model_name, unwrap_model
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.network.wire_format import Wire, wire_conflict
from lockstep.parallel.learner_shards import LearnerShards
from lockstep.parallel.parallelize import LocalModel, unwrap_local_model
from lockstep.parallel.replica import Replica
from lockstep.parallel.sharded_replica import ShardedReplica
from lockstep.runtime.work import static_group
from lockstep.training.checkpointer import Checkpointer


def build_replica(
    runtime: ElasticRuntime,
    model: nn.Module | LocalModel,
    *,
    bucket_bytes: int,
    reduce_once_per_step: bool,
    has_learners: bool,
    wire: Wire,
    **options: Any,
) -> Replica | ShardedReplica:
    """Collective. Return this worker's replica, or its part of one that several workers hold.

    In a new run a whole replica gets rank 0's weights. options: of all kinds of replica.
    """
    module, local_model = unwrap_local_model(model)
    layout = local_model.layout if local_model else Layout(1)
    if conflict := wire_conflict(wire, layout.tensor, layout.pipeline, reduce_once_per_step):
        raise UsageError(*conflict)
    options |= {
        "wire": wire,
        "board": runtime.board,
        "generation_error": runtime.generation_error if runtime.membership else static_group,
    }
    if local_model is None:
        first = runtime.first_generation
        return Replica(module, bucket_bytes=bucket_bytes, init_sync=first, **options)
    options |= {
        "form_context": runtime.group.track_subgroups,
        "reduce_once_per_step": reduce_once_per_step,
    }
    if has_learners:
        return LearnerShards(local_model, bucket_bytes=bucket_bytes, **options)
    return ShardedReplica(local_model, **options)


def refuse_other_checkpointer(
    checkpointer: Checkpointer, runtime: ElasticRuntime, model: nn.Module | LocalModel
) -> None:
    """UsageError when the checkpointer saves another model than the group trains."""
    module, local_model = unwrap_local_model(model)
    same = local_model is not None or (
        isinstance(checkpointer.model, nn.Module)
        and unwrap_model(checkpointer.model) is unwrap_model(module)
    )
    if (
        checkpointer.runtime is not runtime
        or checkpointer.local_model is not local_model
        or not same
    ):
        raise UsageError(
            f"the ReplicaGroup trains {model_name(module)}, the Checkpointer saves another {model_name(checkpointer.model)}",
            "Checkpointer(folder, runtime, model, ...) and ReplicaGroup(runtime, model, ...)",
            "give the same ElasticRuntime and module to both",
        )
    checkpointer.refuse_unsaved_parameters()
