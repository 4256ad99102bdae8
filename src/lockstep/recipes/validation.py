"""The loss of a language model on held-out rows, in the loop: the same bits on any number of
workers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import lockstep
from lockstep.corpus.loaders import HeldOutBatches, TextBatch
from lockstep.errors import UsageError
from lockstep.recipes.run import RecipeRun
from lockstep.tasks.evaluator import perplexity
from lockstep.tasks.language_model import LanguageModelTask, loss_of
from lockstep.tasks.open import Task


def held_out_batches(run: RecipeRun, task: Task) -> HeldOutBatches | None:
    """Return the validation split in batches; None if the run does not validate.

    UsageError: it has no validation split.
    """
    config = run.config
    if not config.evaluate.every_steps:
        return None
    assert isinstance(task, LanguageModelTask)  # evaluate.every_steps is refused otherwise
    rows = max(1, config.batch.tokens // task.length)
    packed = config.task == "sft"
    batches = HeldOutBatches(task.validation, task.length, rows, packed=packed)
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

    def score(several: list[TextBatch]) -> list[tuple[float, int]]:
        return [loss_of(model, batch) for batch in several]

    sums = session.gather(score, batches, batch_size=1, collate_fn=list)
    tokens: int = sum(tokens for _, tokens in sums)
    return math.fsum(nats for nats, _ in sums) / max(1, tokens)


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
