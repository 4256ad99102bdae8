"""Interface between the training loop and a task: its micro-batches, its model and its loss.

    batch = task.loader.micro_batch(step, k)     on the device
    loss = task.loss(model, batch)               one forward pass; a sum

`open.py` selects an implementation by `run.task`. A task communicates only to prepare its data.
Everything else is a pure function of the configuration and the data, equal on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.data.pairs.loader import PairLoader
from lockstep.data.text.packing import RowLoader


class Task(Protocol):
    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Hashes that must be equal on all ranks, by name: data, tokenizer, initial weights."""

    @property
    def loader(self) -> PairLoader | RowLoader:
        """The micro-batches of each step and their target tokens, the divisor of the loss."""

    @property
    def length(self) -> int:
        """Length of the longest sequence in a micro-batch."""

    @property
    def flops_per_token(self) -> float | None:
        """Floating-point operations per trained token, forward and backward; None: unknown."""

    def meta_model(self) -> nn.Module:
        """Return a new model on the meta device, in training mode, with `requires_grad` set."""

    def init_param(self, name: str, shape: torch.Size) -> Tensor:
        """Return the full initial value of the parameter or buffer `name`, on the CPU, from (seed,
        name) or the file that the run initializes from: a rank fills its shard from this alone."""

    def is_saved(self, name: str) -> bool:
        """Whether checkpoints contain `name`. Other tensors keep their initial value."""

    def loss(self, model: Callable[..., Tensor], batch: Any) -> Tensor:
        """Return the sum of the losses of a micro-batch, 0-dim. Calls `model(...)` once."""
