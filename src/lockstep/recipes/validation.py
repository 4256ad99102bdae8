"""The loss of a language model on held-out rows, in the loop: the same bits on any number of
workers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.utils.data import Dataset

import lockstep
from lockstep.corpus.text.packing import TextBatch, batch_of
from lockstep.errors import UsageError
from lockstep.recipes.run import RecipeRun
from lockstep.tasks.evaluator import perplexity
from lockstep.tasks.language_model import HeldOutRows, LanguageModelTask
from lockstep.tasks.open import Task


class HeldOutBatches(Dataset[TextBatch]):
    """Batches of held-out rows of one length each. rows: of each batch, their numbers."""

    def __init__(self, rows: HeldOutRows, rows_per_batch: int) -> None:
        self.rows = rows
        self.numbers = rows.in_batches(rows_per_batch)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> TextBatch:
        rows = [self.rows[number] for number in self.numbers[i]]
        return batch_of(rows, torch.device("cpu"))


def held_out_batches(run: RecipeRun, task: Task) -> HeldOutBatches | None:
    """Return the validation split in batches; None if the run does not validate.

    UsageError: it has no validation split.
    """
    config = run.config
    if not config.evaluate.every_steps:
        return None
    assert isinstance(task, LanguageModelTask)  # evaluate.every_steps is refused otherwise
    rows = HeldOutRows(task.validation, task.length, packed=config.task == "sft")
    batches = HeldOutBatches(rows, max(1, config.batch.tokens // task.length))
    if not len(batches):
        hint = (
            "give data.validation, or a data.held_out_share above 0; or remove evaluate.every_steps"
        )
        what = "the run has no validation split to evaluate"
        raise UsageError(what, "evaluate.every_steps", hint)
    return batches


def mean_loss(
    session: lockstep.Session, model: Callable[..., torch.Tensor], batches: HeldOutBatches
) -> float:
    """Collective. Return the mean loss over the predicted tokens of the batches, in nats."""

    def score(batch: TextBatch) -> list[tuple[float, int]]:
        if not batch.count:
            return [(0.0, 0)]
        return [(float(model(batch.tokens, batch.labels, batch.documents)), batch.count)]

    sums = session.gather(score, batches, batch_size=1, collate_fn=only)
    tokens: int = sum(tokens for _, tokens in sums)
    return math.fsum(nats for nats, _ in sums) / max(1, tokens)


def only(batches: list[TextBatch]) -> TextBatch:
    """Return the batch of a list with one."""
    [batch] = batches
    return batch


def loss_and_perplexity(loss: float) -> dict[str, float]:
    """Return the metrics of a validation."""
    return {"validation_loss": loss, "validation_perplexity": perplexity(loss)}


def validation_line(
    step: int, loss: float, best: lockstep.Best, stopping: lockstep.EarlyStopping
) -> str:
    """Return the line on the screen after `step` steps."""
    line = f"step {step:,}  validation loss {loss:.4f}  perplexity {perplexity(loss):.2f}"
    if best.step is not None:
        line += f"  (lowest: {best.score:.4f} at step {best.step:,})"
    return line + f"; stopping: not lower in {stopping.worse} evaluations" * stopping.stops
