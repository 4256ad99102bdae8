"""Assign the micro-batches of a replica to its shards, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.layout import Coordinates, Layout
from lockstep.network.pipeline_schedule import adjacent_blocks
from lockstep.network.subtrees import Subtree
from lockstep.parallel.exchange import Traffic, start_exchange
from lockstep.parallel.groups import ProcessGroups, all_to_all_rows
from lockstep.parallel.ordered_sum import PartialSum, SumTree, merged_subtrees
from lockstep.parallel.wire_sum import WireSum


@dataclass(frozen=True)
class ShardPass:
    """One forward and backward pass of all shards of a replica, as one of them runs it."""

    k: int  # micro-batch that this shard computes
    counts: bool  # False: this shard has no micro-batch left and only joins the collectives
    leaves: tuple[int, ...]  # of the pass; with `reduce_once_per_step`, this shard's own leaf
    last: bool


@dataclass(frozen=True)
class UnitGradients:
    """The gradients of one unit in flight.

    sent  (S * n,), slice j for shard j
    out   (n,), for the sum of this shard's rows
    """

    unit: int
    shard_pass: ShardPass
    sent: Tensor
    out: Tensor


def plan_passes(
    own: Sequence[int], shard: int, shards: int, *, reduce_once_per_step: bool
) -> list[ShardPass]:
    """Plan the passes of a shard over its replica's micro-batches, `own`.

    They go to the shards in turn; with `reduce_once_per_step` in adjacent blocks.
    """
    count = -(-len(own) // shards)
    if reduce_once_per_step:
        block = adjacent_blocks(own, shards)[shard]
        ks = [(block[min(i, len(block) - 1)], i < len(block)) for i in range(count)]
        return [
            ShardPass(k, counts, (k,) if counts else (), i == count - 1)
            for i, (k, counts) in enumerate(ks)
        ]
    passes = []
    for first in range(0, len(own), shards):
        leaves = tuple(own[first : first + shards])
        passes.append(
            ShardPass(
                leaves[min(shard, len(leaves) - 1)],
                shard < len(leaves),
                leaves,
                first + shards >= len(own),
            )
        )
    return passes


def exchange_rows(
    own: SumTree[PartialSum],
    groups: ProcessGroups,
    traffic: Traffic,
    unit: int,
    leaves: Sequence[int],
) -> SumTree[PartialSum]:
    """Collective. Exchange the trees of the shards (`own`: of whole gradients); return the sums of
    this shard's rows over `leaves`, all of the replica."""
    layout, group = groups.current_layout(), groups.scatter_group
    assert group is not None
    own_shard, others = (
        group.rank(),
        [shard for shard in range(layout.shard) if shard != group.rank()],
    )
    sums = [(subtree, part.tensor.view(layout.shard, -1)) for subtree, part in own.stack]
    rows = {
        (shard, subtree): torch.empty_like(sums[0][1][0])
        for shard, block in enumerate(adjacent_blocks(leaves, layout.shard))
        for subtree in merged_subtrees(block)
    }
    rows |= {(own_shard, subtree): parts[own_shard] for subtree, parts in sums}
    sends = [(shard, parts[shard]) for shard in others for _, parts in sums]
    receives = [(shard, row) for (shard, _), row in rows.items() if shard != own_shard]
    groups.waits.wait(start_exchange(sends, receives, group, traffic, unit), group)
    tree: SumTree[PartialSum] = SumTree()
    for (_, subtree), row in rows.items():
        tree.add(subtree, PartialSum(row))
    return tree


def add_rows(gradients: UnitGradients, tree: SumTree[PartialSum], groups: ProcessGroups) -> None:
    """Collective. Receive this shard's rows of the gradients of all leaves of the pass."""
    parts = list(gradients.sent.view(groups.layout.shard, -1))
    rows = all_to_all_rows(parts, groups.scatter_group, groups.waits, gradients.unit)
    for k, row in zip(gradients.shard_pass.leaves, rows, strict=False):
        tree.add(Subtree(k, 1), PartialSum(row))
    for _, part in tree.stack if len(parts) > 1 and not gradients.shard_pass.last else ():
        part.compact()  # a view would keep the rows of all shards alive


def reduce_encoded(
    gradients: UnitGradients, wire_sum: WireSum, groups: ProcessGroups, traffic: Traffic
) -> None:
    """Collective. Add a pass to the sum; after the last one write it to `out`.

    Each leaf is encoded before its rows are sent to their shards.
    """
    shard_pass, unit = gradients.shard_pass, gradients.unit
    parts = [
        wire_sum.encode(shard_pass.k, wire_sum.split(row))
        for row in gradients.sent.view(groups.layout.shard, -1)
    ]
    for k, row in zip(
        shard_pass.leaves,
        all_to_all_rows(parts, groups.scatter_group, groups.waits, unit),
        strict=False,
    ):
        wire_sum.add(k, row)
    if shard_pass.last:
        wire_sum.all_reduce(
            wire_sum.split(gradients.out), groups.replica_group, groups.waits, traffic, unit
        )


def refuse_idle_shards(data_parallel_size: int, leaves: int, block: int, shards: int) -> None:
    """UsageError: some shard would have no micro-batch."""
    if block < shards:
        raise UsageError(
            f"{data_parallel_size} shards of all replicas are running, a step has {leaves} micro-batches",
            "each shard needs at least one micro-batch",
            f"start fewer replicas, or set micro_batches={data_parallel_size}",
        )


def reports_losses(at: Coordinates, layout: Layout) -> bool:
    """Return whether this worker reports its micro-batches' losses, which others have too."""
    return at.tensor == 0 and at.stage == layout.pipeline - 1
