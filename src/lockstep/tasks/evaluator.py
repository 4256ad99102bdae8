"""Interface of the evaluators: load a checkpoint, score it on held-out data, format the result.

Results are exact: batches depend on the data only, are assigned to the ranks round-robin, and their
results are merged by batch number. No sample is padded in or counted twice, and any number of ranks
gives the same scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from lockstep.elastic.world import World

Split = Literal["validation", "test"]


@dataclass(frozen=True)
class EvalSpec:
    """How to score a checkpoint; with the step it identifies one line of evaluations.jsonl.

    average  number of newest checkpoints whose weights are averaged; 0: no average
    """

    split: Split = "validation"
    beams: int = 1
    average: int = 0
    lowercase: bool = False

    def matches(self, record: dict[str, Any]) -> bool:
        """Whether the record was scored with this spec."""
        return all(record.get(key) == value for key, value in vars(self).items())


@dataclass(frozen=True)
class EvalResult:
    """The line of one evaluation, and a few samples to print."""

    record: dict[str, Any]
    samples: list[str]
    complete: bool  # whether the whole split was used


class Evaluator(Protocol):
    @property
    def folder(self) -> Path:
        """The run folder."""

    @property
    def next_command(self) -> str:
        """A command that uses the trained model."""

    def held_out(self, split: Split) -> int:
        """Number of pairs, documents or chats in the split."""

    def load(self, step: int, spec: EvalSpec, device: torch.device) -> Any:
        """Load the model at `step`. UsageError: unsupported spec. CheckpointError: damaged."""

    def steps(self, loaded: Any) -> Sequence[int]:
        """The steps of the checkpoints that were averaged."""

    def evaluate(self, loaded: Any, spec: EvalSpec, world: World, stopped: Callable[[], str], *, limit: int = 0) -> EvalResult | None:
        """Collective. Compute loss and scores on the held-out split; None if a rank received a stop
        signal.

        stopped  returns the name of a received stop signal, or ""
        limit    number of sentences or chats to generate for; 0: all. The loss always covers all
        """

    def summary(self, record: dict[str, Any]) -> str:
        """Format a record as one line."""
