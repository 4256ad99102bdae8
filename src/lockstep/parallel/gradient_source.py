"""Where the gradients of a replica come from: the interface between a replica and its sources.

    BucketSource      a whole replica: hooks on its parameters fill buckets (bucket_source.py)
    UnitSource        slices that FSDP gathers unit by unit (unit_source.py)
    StageSource       a stage of a pipeline (pipeline.py)
    DifferenceSource  DiLoCo's learners, each a leaf of the sum (learner_replica.py)

Replica (replica.py) asks its source for one pass after the other; the source queues the sums of the
gradients for its Reducer, beside the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.network.pipeline_schedule import adjacent_blocks
from lockstep.network.wire_format import Wire
from lockstep.parallel.gradient_watch import (
    UNUSED_HINT,
    Unused,
    hash_of,
    refuse_different_parameters,
)
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.ordered_sum import FlatSum
from lockstep.parallel.reducer import Reducer
from lockstep.parallel.running_statistics import RunningStatistics
from lockstep.runtime.process_group import gather_json
from lockstep.units import join_names


class PassPhase(Enum):
    """The use of the gradients of the current pass."""

    OUTSIDE = auto()  # of the micro-batches: there must be none
    TRAINING = auto()  # they are added to the sum of the step
    SKIPPING = auto()  # they become zeros first
    REHEARSING = auto()  # they are dropped


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of all shards of a replica, as one of them runs it."""

    k: int  # micro-batch that this shard computes
    counts: bool  # False: this shard has no micro-batch left and only joins the collectives
    leaves: tuple[int, ...]  # of the pass; with `reduce_once_per_step`, this shard's own leaf
    last: bool


@dataclass(frozen=True)
class StepPlan:
    """The passes of a worker in a step, and the sum of their gradients.

    key     seed and step, which decide how encoded gradients are rounded
    shares  number of leaves by replica
    leaves  of this replica
    group   the workers with the same gradients in other replicas; None: this replica has all leaves
    """

    key: tuple[int, int] = (0, 0)
    shares: tuple[int, ...] = ()
    leaves: Sequence[int] = ()
    passes: Sequence[Pass] = ()
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class SumOptions:
    """How gradients are summed.

    wire                  the format in which they travel (network/wire_format.py)
    bucket_bytes          gradients of a whole replica, or differences of learners, sent together
    reduce_once_per_step  in shards after the last micro-batch: less traffic, more memory
    unused                "zero": a parameter without a gradient in a micro-batch gets a gradient of
                          zero; in shards of a model that is gathered at once
    """

    wire: Wire = "fp32"
    bucket_bytes: int = 25_000_000
    reduce_once_per_step: bool = False
    unused: Unused = "raise"


class GradientSource:
    """Base of all sources: the methods that a Replica calls.

    names, parameters  that are trained on this worker; other lists when others are
    """

    names: list[str]
    parameters: list[nn.Parameter]
    runs_at_once = True  # False: passes run together after the last micro-batch
    reduce_once_per_step = False

    def __init__(self, groups: ProcessGroups, reducer: Reducer, options: SumOptions) -> None:
        self.groups = groups
        self.reducer = reducer
        self.options = options
        self.phase = PassPhase.OUTSIDE
        self.now = Pass(0, True, (), True)
        self.where = ""  # micro-batch and step of the current pass
        self.backwards = 0  # in the current pass
        self.is_hashed = False  # the gradients of the current pass are hashed
        self.plan = StepPlan()
        self.shards = groups.layout.shard  # to which the micro-batches of a replica are dealt
        self.slice_sums: list[Tensor] = []  # of the slices of the sum that this rank has added

    @property
    def measures_passes(self) -> bool:
        """Whether the time of the passes is that of this worker's computation alone."""
        return True

    def reset(self) -> None:
        """Forget the step before, and its gradients."""
        raise NotImplementedError

    def follow_parameters(self) -> bool:
        """Take the parameters that are trained now; return whether ranks must agree on them."""
        raise NotImplementedError

    def agree(self) -> None:
        """Collective. UsageError: other ranks train other parameters."""
        wait = self.groups.waits.wait
        hashes = gather_json(dist.get_world_size(), hash_of(self.names), wait)
        refuse_different_parameters(hashes, self.names, wait)

    def start_step(self, plan: StepPlan) -> None:
        self.plan = plan
        self.slice_sums = []

    def start_pass(self, now: Pass, phase: PassPhase, where: str, *, is_hashed: bool) -> None:
        self.now = now
        self.phase = phase
        self.where = where
        self.backwards = 0
        self.is_hashed = is_hashed

    def forward(self, *inputs: Any, **named: Any) -> Any:
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a micro-batch. loss: scaled, if there is a scale."""
        raise NotImplementedError

    def skip(self) -> bool:
        """Let the current pass add zeros; return whether it is done. False: a pass over another
        micro-batch must run."""
        self.phase = PassPhase.SKIPPING
        return False

    def count_backward(self, call: str) -> None:
        """UsageError: a second backward pass in a micro-batch, or one outside of them."""
        where = f"session.{call}(...)"
        if self.phase is PassPhase.OUTSIDE:
            raise UsageError(
                f"{call}() was called outside of the micro-batch loop",
                where,
                "call it inside the loop over loader(step)",
            )
        if self.backwards:
            raise UsageError(
                f"{call}() was called twice in {self.where}",
                where,
                "add the losses of a micro-batch and call it once",
            )
        self.backwards += 1

    def end_pass(self) -> None:
        """UsageError: gradients are missing, or were changed."""
        if not self.backwards:
            raise UsageError(
                f"no gradient arrived for the {len(self.names)} parameters in {self.where}: "
                "backward() was not called",
                "the loop over loader(step)",
                "call session.backward(loss) once for every micro-batch, not loss.backward()",
            )
        if self.runs_at_once:
            self.phase = PassPhase.OUTSIDE

    def refuse_missing(self, missing: list[str], where: str) -> None:
        """UsageError: these parameters have no gradient."""
        if missing:
            raise UsageError(
                f"no gradient arrived for {len(missing)} "
                f"of {len(self.names)} parameters in {where}: {join_names(missing)}",
                "session.backward(loss)",
                UNUSED_HINT,
            )

    def run_passes(self, statistics: RunningStatistics) -> list[Tensor] | None:
        """Run the passes that were kept until all micro-batches are known. Return their losses;
        None: each has run at its time."""
        return None

    def finish_step(self) -> None:
        """Leave the sum of the step in .grad. UsageError: some of it is missing."""

    def pass_hash(self) -> int:
        """Return 64 bits over the gradients of a pass that was hashed."""
        raise NotImplementedError

    def is_pass_finite(self) -> bool:
        """Return whether the gradients of a rehearsed pass are finite."""
        raise NotImplementedError

    def sum_up(self, total: FlatSum, out: Tensor, tag: int) -> Tensor:
        """Collective. Write the sum over all replicas to `out`; return the slice that this rank
        has added."""
        return total.all_reduce(total.split(out), self.plan.group, self.groups.waits, tag)

    def note_slice(self, own: Tensor) -> None:
        """Take the slice of a sum that this rank has added, to test it for
        infinities with the losses of the step."""
        dtype = torch.float64 if own.dtype == torch.float64 else torch.float32
        self.slice_sums.append(own.sum(dtype=dtype).double())

    def norm_squared(self, *, is_scaled: bool) -> Tensor | None:
        """Collective in the replica. Return the squared norm of the sum; None: this worker has all
        of it."""
        return None

    def release(self) -> None:
        """Forget the step of a generation that is over. A complete gradient stays: the members of
        the next generation may have committed its step."""
        self.phase = PassPhase.OUTSIDE
        self.reducer.drain()
        self._drop_group()

    def _drop_group(self) -> None:
        """Forget the group of the step: gloo ends its threads with the last reference."""
        self.plan = replace(self.plan, group=None)

    def close(self) -> None:
        self.reducer.close()
        self._drop_group()
        self.groups.clear()


def plan_passes(
    own: Sequence[int], shard: int, shards: int, *, reduce_once_per_step: bool
) -> list[Pass]:
    """Plan the passes of a shard over its replica's micro-batches, `own`.

    They go to the shards in turn; with `reduce_once_per_step` in adjacent blocks.
    """
    if reduce_once_per_step:
        count = -(-len(own) // shards)
        block = adjacent_blocks(own, shards)[shard]
        ks = [(block[min(i, len(block) - 1)], i < len(block)) for i in range(count)]
        return [
            Pass(k, counts, (k,) if counts else (), i == count - 1)
            for i, (k, counts) in enumerate(ks)
        ]
    passes = []
    for first in range(0, len(own), shards):
        leaves = tuple(own[first : first + shards])
        # A shard without a micro-batch repeats the last one: every unit is gathered by all shards.
        k = leaves[min(shard, len(leaves) - 1)]
        passes.append(Pass(k, shard < len(leaves), leaves, first + shards >= len(own)))
    return passes
