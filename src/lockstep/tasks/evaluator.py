"""What a checkpoint is asked, by the task of its run, and how its answers are told.

Exactly: the work is cut into batches by the data alone, dealt to the processes in turn, and its results are put together by their numbers,
so nothing is padded in or counted twice, and any number of processes gives the same answer.
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
class Question:
    """What is asked of each checkpoint; with the step it names one line of evaluations.jsonl."""

    split: Split = "validation"
    beams: int = 1
    average: int = 0
    lowercase: bool = False

    def of(self, record: dict[str, Any]) -> bool:
        """Whether the record answers this question."""
        return all(record.get(key) == value for key, value in vars(self).items())


@dataclass(frozen=True)
class Result:
    """The line of one evaluation, and a few samples for people."""

    record: dict[str, Any]
    samples: list[str]
    complete: bool  # whether all of the split was asked


class Exam(Protocol):
    """See the head of this file."""

    @property
    def folder(self) -> Path:
        """Of the run."""

    @property
    def next(self) -> str:
        """A command that uses the trained model."""

    def held_out(self, split: Split) -> int:
        """How many pairs, documents or chats the split has."""

    def load(self, step: int, asked: Question, device: torch.device) -> Any:
        """The model at `step`. UsageError: that cannot be asked here. CheckpointError: it is missing or damaged."""

    def steps(self, loaded: Any) -> Sequence[int]:
        """The checkpoints whose weights the loaded model has the mean of."""

    def measure(self, loaded: Any, asked: Question, world: World, stopped: Callable[[], str], *, most: int = 0) -> Result | None:
        """Collective. Loss and scores of a model on the held-out split; None when a process was told to stop.

        most  sentences or chats to generate for; 0: all. The loss is always over all
        """

    def summary(self, record: dict[str, Any]) -> str:
        """One line for people."""
