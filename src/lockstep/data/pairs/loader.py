"""Token ids of a micro-batch on the device: what the order names, gathered from memory-mapped arrays.

There is no worker process and no queue: gathering 2,000 tokens takes a third of a millisecond, a hundredth of the step it is for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lockstep.data.order import BucketOrder
from lockstep.data.pairs.encoded import EncodedPairs


@dataclass(frozen=True)
class MicroBatch:
    """source (B, S) with its end mark; target (B, T) behind a begin mark; labels (B, T) before an end mark. Filled up with PAD."""

    source: torch.Tensor
    target: torch.Tensor
    labels: torch.Tensor


class Loader:
    """Micro-batches of `pairs` in `order`, on `device`. Holds no position: any step may be asked for at any time.

    fixed_shapes  each micro-batch has the shape that the order names, so that a compiler meets few; otherwise both sides end with their
                  longest sentence, which is a function of the micro-batch alone and so the same on any number of processes
    """

    def __init__(self, pairs: EncodedPairs, order: BucketOrder, device: torch.device, *, fixed_shapes: bool = False) -> None:
        self.pairs, self.order, self.device, self.fixed_shapes = pairs, order, device, fixed_shapes

    def tokens(self, step: int) -> int:
        """Target tokens of the whole step, end marks included, over the micro-batches of all replicas."""
        ids = np.concatenate([self.order.ids(step, k) for k in range(self.order.micro_batches)])
        return int(self.pairs.lengths[ids, 1].sum())

    def micro_batch(self, step: int, k: int) -> MicroBatch:
        """Micro-batch `k` of step `step`: as many rows as the order names, empty ones at its end."""
        shape, ids = self.order.shape(step, k), self.order.ids(step, k)
        longest = (shape.length, shape.length) if self.fixed_shapes else tuple(int(n) for n in self.pairs.lengths[ids].max(axis=0))
        tensors = [torch.from_numpy(array) for array in self.pairs.gather(ids, shape.rows, *longest)]
        if self.device.type == "cuda":
            tensors = [tensor.pin_memory().to(self.device, non_blocking=True) for tensor in tensors]
        return MicroBatch(*tensors)
