"""What the loop trains, seen from the loop: where micro-batches come from, which model they go through, what their loss is.

    batch = task.micro_batch(step, k)     on the device
    loss = task.loss(team, batch)         one forward pass, a sum

A task knows no processes beyond the agreement on its data, and no optimizer. Everything it gives is a function of the run and its data,
so that it is the same on every process that asks. Here are translation, pre-training and fine-tuning; `open.py` chooses by `run.task`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Task(Protocol):
    """See the head of this file."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """What is equal on all who train together, by name: data, tokenizer, the weights that it starts from."""

    @property
    def length(self) -> int:
        """Positions in the longest row of a micro-batch."""

    @property
    def flops_per_token(self) -> float | None:
        """Operations to train one of the `tokens`; None: not known."""

    def meta(self) -> nn.Module:
        """A new model on the meta device, without memory: in training mode, `requires_grad` set as it is trained."""

    def first_value(self, name: str, shape: torch.Size) -> Tensor:
        """The whole first value, on the CPU, of the model's parameter or buffer `name`.

        It follows from (seed, name), or from the checkpoint that the run starts from: then it is a view of that file, and nobody needs the
        whole model to fill a shard of it.
        """

    def saved(self, name: str) -> bool:
        """Whether a checkpoint holds the parameter or buffer `name`; one that is left out keeps its first value."""

    def micro_batch(self, step: int, k: int) -> Any:
        """Micro-batch `k` of step `step`, on the device."""

    def loss(self, model: Callable[..., Tensor], batch: Any) -> Tensor:
        """The sum of the losses of a micro-batch, 0-dim. Calls `model(...)` once."""

    def tokens(self, step: int) -> int:
        """What the sum of the step's losses is divided by: its target tokens, over all micro-batches."""

    def epoch(self, step: int) -> float:
        """Epochs passed when step `step` begins."""
