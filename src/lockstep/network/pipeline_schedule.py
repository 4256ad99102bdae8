"""The order of passes in a pipeline: 1F1B, and interleaved 1F1B with several chunks per stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Literal, NamedTuple


class PipelineOp(NamedTuple):
    """A pass of micro-batch `micro` (its index on this worker) through a chunk of the stage."""

    kind: Literal["forward", "backward"]
    chunk: int
    micro: int

    def edges(self, stage: int, stages: int, chunks: int) -> tuple[int, int]:
        """Return the edges over which the pass receives and sends; -1: none. Edge n is between the
        model's chunks n and n + 1."""
        number = self.chunk * stages + stage
        before = number - 1
        after = number if number < stages * chunks - 1 else -1
        return (before, after) if self.kind == "forward" else (after, before)


def pipeline_schedule(
    stage: int, stages: int, micro_batches: int, chunks: int = 1
) -> list[PipelineOp]:
    """Return the operations of a stage in a step, in order.

    With several chunks, micro-batches go in rounds of `stages`; if their number is no multiple of
    that, all forward passes come before all backward passes.
    """
    total = micro_batches * chunks
    if chunks > 1 and micro_batches % stages:
        everything = list(product(range(chunks), range(micro_batches)))
        forward = [PipelineOp("forward", chunk, micro) for chunk, micro in everything]
        return forward + [
            PipelineOp("backward", chunks - 1 - chunk, micro) for chunk, micro in everything
        ]

    def unit(number: int) -> tuple[int, int]:
        # A cycle takes `stages` micro-batches through chunk 0, then the same through chunk 1, ...
        cycle, within = divmod(number, stages * chunks)
        return within // stages, cycle * stages + within % stages

    warmup = stages - stage - 1
    if chunks > 1:
        warmup = 2 * warmup + (chunks - 1) * stages
    warmup = min(total, warmup)
    forward = [PipelineOp("forward", *unit(i)) for i in range(total)]
    backward = [
        PipelineOp("backward", chunks - 1 - chunk, micro)
        for chunk, micro in map(unit, range(total))
    ]
    steady = [op for pair in zip(forward[warmup:], backward, strict=False) for op in pair]
    return forward[:warmup] + steady + backward[total - warmup :]


def adjacent_blocks(items: Sequence[int], count: int) -> list[Sequence[int]]:
    """Cut items into blocks of equal size; the first ones may be one larger."""
    each, rest = divmod(len(items), count)
    starts = [block * each + min(block, rest) for block in range(count + 1)]
    return [items[start:stop] for start, stop in pairwise(starts)]
