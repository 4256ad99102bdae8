"""Assign the micro-batches of a replica to its shards, pass by pass."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.parallel.ordered_sum import leaves_of_rank


@dataclass(frozen=True)
class ShardPass:
    """One forward and backward pass of all shards of a replica, as one of them runs it.

    k              micro-batch that this shard computes
    counts         False: this shard has no micro-batch left and only joins the collectives
    first, leaves  leaves of the pass; with `reduce_once_per_step`, this shard's own leaf
    """

    k: int
    counts: bool
    first: int
    leaves: int
    last: bool


def plan_passes(block: range, shard: int, shards: int, *, reduce_once_per_step: bool) -> list[ShardPass]:
    """Plan the passes of a shard over its replica's micro-batches.

    They go to the shards in turn; with `reduce_once_per_step` in adjacent blocks.
    """
    count = -(-len(block) // shards)
    if reduce_once_per_step:
        own = leaves_of_rank(shard, shards, len(block))
        own_leaves = block[own.start : own.stop]
        ks = [(own_leaves[min(i, len(own_leaves) - 1)], i < len(own_leaves)) for i in range(count)]
        return [ShardPass(k, counts, k, int(counts), i == count - 1) for i, (k, counts) in enumerate(ks)]
    passes = []
    for first in range(block.start, block.stop, shards):
        leaves = min(shards, block.stop - first)
        passes.append(ShardPass(first + min(shard, leaves - 1), shard < leaves, first, leaves, first + shards >= block.stop))
    return passes


def refuse_idle_shards(data_parallel_size: int, leaves: int, block: int, shards: int) -> None:
    """UsageError: some shard would have no micro-batch."""
    if block < shards:
        raise UsageError(
            f"{data_parallel_size} shards of all replicas are running, a step has {leaves} micro-batches",
            "each shard needs at least one micro-batch",
            f"start fewer replicas, or set batch.micro_batches={data_parallel_size}",
        )
