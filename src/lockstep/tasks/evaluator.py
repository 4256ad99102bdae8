"""What the evaluators share: how to score a checkpoint, and the merged results of all ranks.

Batches depend on the data only and are assigned to the ranks round-robin; their results are merged
by batch number. So any number of ranks gives the same scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.runtime import ElasticRuntime

T = TypeVar("T")
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
        return all(record.get(key) == value for key, value in vars(self).items())


@dataclass(frozen=True)
class EvalResult:
    """The line of one evaluation, and a few samples to print."""

    record: dict[str, Any]
    samples: list[str]
    complete: bool  # whether the whole split was used


def batches_of_rank(
    batches: Iterable[T], runtime: ElasticRuntime, stopped: Callable[[], str]
) -> Iterator[tuple[int, T]]:
    """Yield (number, batch) of this rank's share, until a stop signal arrives."""
    for number, batch in enumerate(batches):
        if number % runtime.world.size == runtime.world.rank and not stopped():
            yield number, batch


def merge_results(
    runtime: ElasticRuntime, stopped: Callable[[], str], **results: dict[int, Any]
) -> dict[str, dict[int, Any]] | None:
    """Collective. Return the results of all ranks, by number; None after a stop signal."""
    # Lists of pairs, because JSON keys are strings. JSON keeps floats exactly.
    by_rank = all_gather_json(
        runtime,
        {"stopped": stopped(), **{name: list(values.items()) for name, values in results.items()}},
    )
    if any(rank["stopped"] for rank in by_rank):
        return None
    return {name: dict(item for rank in by_rank for item in rank[name]) for name in results}


def loss_record(
    spec: EvalSpec, steps: Sequence[int], losses: Iterable[float], tokens: int
) -> dict[str, Any]:
    """Return the part of a record that all tasks share. losses: sums of -log p, in nats."""
    loss = math.fsum(losses) / max(1, tokens)
    return {
        "step": steps[-1],
        **vars(spec),
        "averaged": list(steps),
        "loss": loss,
        "perplexity": perplexity(loss),
        "tokens": tokens,
    }


def perplexity(loss: float) -> float:
    """Return e to the power of a loss in nats; infinity for what no float holds."""
    return math.exp(loss) if loss < 700 else math.inf
