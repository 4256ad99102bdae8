"""Validation during training: loss and perplexity, the best step, early stopping.

Every worker computes the history from the same sums, so all of them stop at the same step. Each
checkpoint has it in its facts, and joiners receive it: a run that was killed decides as one that
was not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.config.schema import RunConfig
from lockstep.data.text.documents import in_groups
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.log import log
from lockstep.record.events import append_event
from lockstep.tasks.evaluator import EvalSpec, loss_record
from lockstep.tasks.language_model import LanguageModelTask, Row, held_out_rows, loss_of
from lockstep.tasks.open import Task
from lockstep.training.evaluation import Scores, compute_in_shares, in_eval_mode
from lockstep.training.optim import averaged_weights
from lockstep.training.replica_group import ReplicaGroup


@dataclass(frozen=True)
class History:
    """best_step: the one with the lowest loss; -1: none. worse: the number of evaluations since."""

    best_step: int = -1
    best_loss: float = 0.0
    worse: int = 0

    def after(self, step: int, loss: float) -> History:
        if math.isfinite(loss) and (self.best_step < 0 or loss < self.best_loss):
            return History(step, loss)
        return replace(self, worse=self.worse + 1)


class Validation:
    """Scores the validation split after every `evaluate.every_steps` steps; 0: never.

    saved  the history in the facts of the checkpoint that was resumed
    UsageError when the run has no validation split.
    """

    def __init__(
        self,
        run: RunConfig,
        task: Task,
        folder: Path,
        runtime: ElasticRuntime,
        saved: Mapping[str, Any] | None,
    ) -> None:
        self.run, self.task, self.folder, self.runtime = run, task, folder, runtime
        self.history = History(**(runtime.loop_state.get("validation") or saved or {}))
        self.batch_count = sum(1 for _ in self._batches()) if run.evaluate.every_steps else 0
        if run.evaluate.every_steps and not self.batch_count:
            hint = "give data.validation, or a data.held_out_share above 0; or remove evaluate.every_steps"
            raise UsageError(
                "the run has no validation split to evaluate", "evaluate.every_steps", hint
            )
        runtime.set_loop_state("validation", asdict(self.history))
        if self.stops:
            log.info("the run has stopped early; a higher evaluate.patience continues it")

    @property
    def facts(self) -> dict[str, Any]:
        return {"validation": asdict(self.history)} if self.history != History() else {}

    def due(self, step: int) -> bool:
        return bool(self.batch_count) and step % self.run.evaluate.every_steps == 0

    @property
    def stops(self) -> bool:
        return 0 < self.run.evaluate.patience <= self.history.worse

    def evaluate(
        self, replicas: ReplicaGroup, optimizers: Sequence[torch.optim.Optimizer], step: int
    ) -> dict[str, float]:
        """Collective. Score the weights (or their averages) after `step` steps; return the
        metrics."""
        device, precision = self.runtime.world.device, self.run.compute.precision

        def scores(numbers: Iterable[int]) -> Scores:
            chosen = set(numbers)
            batches = [
                (number, rows) for number, rows in enumerate(self._batches()) if number in chosen
            ]
            return {
                number: dict(zip(("nats", "tokens"), loss_of(replicas, rows, device), strict=True))
                for number, rows in batches
            }

        with (
            self.runtime.during("evaluating"),
            in_eval_mode(replicas.module),
            averaged_weights(optimizers),
            torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"),
        ):
            batches = compute_in_shares(
                self.runtime, scores, self.batch_count, replicas.replica.workers_per_replica
            ).values()
        tokens = int(sum(batch["tokens"] for batch in batches))
        record = loss_record(EvalSpec(), [step], (batch["nats"] for batch in batches), tokens)
        self.history = self.history.after(step, record["loss"])
        self.runtime.set_loop_state("validation", asdict(self.history))
        if self.stops and self.runtime.world.leader:
            append_event(
                self.folder,
                "stopped early",
                step=step,
                patience=self.run.evaluate.patience,
                **asdict(self.history),
            )
        return {f"validation_{name}": record[name] for name in ("loss", "perplexity")}

    def describe(self, step: int, values: Mapping[str, float]) -> str:
        text = f"step {step:,}  validation loss {values['validation_loss']:.4f}  perplexity {values['validation_perplexity']:.2f}"
        best = f"  (lowest: {self.history.best_loss:.4f} at step {self.history.best_step:,})"
        return (
            text + best + f"; stopping: not lower in {self.history.worse} evaluations" * self.stops
        )

    def _batches(self) -> Iterator[list[Row]]:
        assert isinstance(self.task, LanguageModelTask)  # evaluate.every_steps is refused otherwise
        rows = held_out_rows(self.task.validation, self.task.length, packed=self.run.task == "sft")
        return in_groups(
            rows, max(1, self.run.batch.tokens // self.task.length), kind=lambda row: len(row[0])
        )
