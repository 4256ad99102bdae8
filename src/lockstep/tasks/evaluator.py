"""Score a checkpoint on held-out data: the loss of all of it, and generated texts.

Batches depend on the data only and are assigned to the ranks round-robin; their results are merged
by batch number. So any number of ranks gives the same scores.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from lockstep.config.schema import RunConfig
from lockstep.corpus.prepared import Prepared
from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.runtime import ElasticRuntime

T = TypeVar("T")
Split = Literal["validation", "test"]
SAMPLES = 6  # texts that are printed


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


@dataclass(frozen=True)
class TextGeneration:
    """Texts to generate. batches: of their numbers; texts_of: generates those of a batch."""

    references: list[str]
    batches: Iterable[list[int]]
    texts_of: Callable[[list[int]], Sequence[str]]


@dataclass(frozen=True)
class Evaluator(ABC):
    """Scores the checkpoints of a run. Its model is what `load` returns, with `steps`: the
    checkpoints whose weights it averages."""

    run: RunConfig
    folder: Path
    data: Prepared[Any, Any]

    @property
    @abstractmethod
    def next_command(self) -> str:
        """A command that uses the trained model."""

    @abstractmethod
    def load(self, step: int, spec: EvalSpec, device: torch.device) -> Any:
        """Return the model at `step`. UsageError, DataError, CheckpointError."""

    @abstractmethod
    def losses(self, loaded: Any, split: Split) -> Iterable[Callable[[], tuple[float, int]]]:
        """Yield, for each batch, a function that returns the sum of -log p over its labels, and
        their number."""

    @abstractmethod
    def generation(
        self, loaded: Any, spec: EvalSpec, chosen: list[dict[str, Any]]
    ) -> TextGeneration:
        """Return how to generate the texts for these records."""

    @abstractmethod
    def scores(
        self, spec: EvalSpec, nats: float, texts: Sequence[str], references: Sequence[str]
    ) -> dict[str, Any]:
        """Return the scores of a task, given its loss in all and its texts."""

    @abstractmethod
    def sample(self, record: dict[str, Any], text: str, reference: str) -> Iterator[str]:
        """Yield the lines that show a text, and the reference where it differs."""

    @abstractmethod
    def summary(self, record: dict[str, Any]) -> str:
        """Return one line about a record."""

    def held_out(self, split: Split) -> int:
        """Return the number of pairs, documents or chats in the split."""
        return len(self.data.records(split))

    def evaluate(
        self,
        loaded: Any,
        spec: EvalSpec,
        runtime: ElasticRuntime,
        stopped: Callable[[], str],
        *,
        limit: int = 0,
    ) -> EvalResult | None:
        """Collective. Compute loss and scores on the held-out split; None after a stop signal.

        stopped  returns the name of a received stop signal, or ""
        limit    number of sentences or chats to generate for; 0: all. The loss always covers all
        """
        start_s = time.monotonic()
        batches = batches_of_rank(self.losses(loaded, spec.split), runtime, stopped)
        losses = {number: loss() for number, loss in batches}
        records = self.data.records(spec.split) if self.run.task != "pretrain" else []
        chosen = records[: limit or None]
        generation = self.generation(loaded, spec, chosen)
        generated: dict[int, str] = {}
        for _, numbers in batches_of_rank(generation.batches, runtime, stopped):
            generated |= zip(numbers, generation.texts_of(numbers), strict=True)
        results = merge_results(runtime, stopped, losses=losses, texts=generated)
        if results is None:
            return None
        references = generation.references
        texts = [results["texts"][number] for number in range(len(references))]
        nats = math.fsum(loss for loss, _ in results["losses"].values())
        tokens = sum(count for _, count in results["losses"].values())
        mean = nats / max(1, tokens)
        record = {
            "step": loaded.steps[-1],
            **vars(spec),
            "averaged": list(loaded.steps),
            "loss": mean,
            "perplexity": perplexity(mean),
            "tokens": tokens,
            **self.scores(spec, nats, texts, references),
            "seconds": round(time.monotonic() - start_s, 3),
        }
        samples = [
            line
            for i in range(0, len(texts), max(1, -(-len(texts) // SAMPLES)))
            for line in ("", *self.sample(chosen[i], texts[i], references[i]))
        ]
        return EvalResult(record, samples, complete=len(chosen) == len(records))


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


def perplexity(loss: float) -> float:
    """Return e to the power of a loss in nats; infinity for what no float holds."""
    return math.exp(loss) if loss < 700 else math.inf
