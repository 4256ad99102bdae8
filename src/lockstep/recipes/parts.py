"""What the scripts use, with the values of a run: data, optimizers, validation, scores.

The loss on held-out rows has the same bits on any number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

import lockstep
from lockstep.corpus.loaders import HeldOutBatches, TextBatch
from lockstep.errors import ConfigError, UsageError
from lockstep.recipes.run import RecipeRun
from lockstep.tasks import evaluate, optim
from lockstep.tasks.evaluator import perplexity
from lockstep.tasks.language_model import LanguageModelTask, held_out_rows, loss_of
from lockstep.tasks.open import Task
from lockstep.tasks.translation import TranslationTask

T = TypeVar("T")


def open_pairs(run: RecipeRun) -> TranslationTask:
    """Collective. Return the sentence pairs of a run and its translator. DataError."""
    return _open(run, TranslationTask, "translate")


def open_rows(run: RecipeRun) -> LanguageModelTask:
    """Collective. Return the documents or chats of a run, and its language model. DataError."""
    return _open(run, LanguageModelTask, "pretrain", "sft")


def open_learners_data(run: RecipeRun) -> Task:
    """Collective. Return the data and the model of a run, for the learners of DiLoCo. DataError."""
    config = run.config
    if not config.diloco.learners:
        raise ConfigError("the run has no learners", "diloco.learners=0", "give a number of them")
    return run.open_task()


def _open(run: RecipeRun, kind: type[T], *tasks: str) -> T:
    if run.config.task not in tasks:
        raise ConfigError(
            f"the run has task={run.config.task}, and this script is for {' or '.join(tasks)}",
            "task",
            "give a run file of its task: recipes/llama-pretrain.toml, recipes/llama-sft.toml",
        )
    if run.config.diloco.learners:
        raise ConfigError(
            "this script trains no learners",
            "diloco.learners",
            "leave it out, or start the script of learners: lockstep recipes copy diloco FILE",
        )
    opened = run.open_task()
    assert isinstance(opened, kind)
    return opened


def make_optimizers(run: RecipeRun, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model on the meta device, as the sections [optim] and [memory]
    have them."""
    on_gpu = run.runtime.world.device.type == "cuda"
    return optim.make_optimizers(model, run.config.optim, run.config.memory, on_gpu=on_gpu)


class Validation:
    """The validation split of a run, scored every evaluate.every_steps steps.

    best, stopping  for session.state: the best step, and the early stop of evaluate.patience
    UsageError: it has no validation split.
    """

    def __init__(self, run: RecipeRun, task: Task) -> None:
        config = run.config
        self.every = config.evaluate.every_steps
        self.best = lockstep.Best()
        self.stopping = lockstep.EarlyStopping(
            config.evaluate.patience or math.inf, name="validation loss"
        )
        if not self.every:
            return
        assert isinstance(task, LanguageModelTask)  # evaluate.every_steps is refused otherwise
        rows = max(1, config.batch.tokens // task.length)
        self.batches = HeldOutBatches(held_out_rows(config, task.validation), rows)
        if not len(self.batches):
            hint = "give data.validation, or a data.held_out_share above 0; "
            hint += "or remove evaluate.every_steps"
            raise UsageError(
                "the run has no validation split to evaluate", "evaluate.every_steps", hint
            )

    def is_due(self, steps: int) -> bool:
        """Return whether the run validates after so many steps."""
        return self.every > 0 and steps % self.every == 0

    def score(
        self, session: lockstep.Session, model: Callable[..., torch.Tensor], step: int, steps: int
    ) -> None:
        """Collective. Log and print the mean loss over the predicted tokens, in nats.

        step, steps  the newest step, as the loop has it, and how many steps are done
        """

        def score(several: list[TextBatch]) -> list[tuple[float, int]]:
            return [loss_of(model, batch) for batch in several]

        sums = session.gather(score, self.batches, batch_size=1, collate_fn=list)
        tokens: int = sum(tokens for _, tokens in sums)
        loss = math.fsum(nats for nats, _ in sums) / max(1, tokens)
        self.best.update(step, loss)
        self.stopping.update(loss)
        session.log(step, validation_loss=loss, validation_perplexity=perplexity(loss))
        line = f"step {steps:,}  validation loss {loss:.4f}  perplexity {perplexity(loss):.2f}"
        if self.best.step is not None:
            line += f"  (lowest: {self.best.score:.4f} at step {self.best.step:,})"
        stop = f"; stopping: not lower in {self.stopping.worse} evaluations"
        session.print(line + stop * self.stopping.stops)


def evaluate_at_end(run: RecipeRun) -> None:
    """Collective. Score the test split, as evaluate.at_end has it; print samples and the next
    command."""
    runtime = run.runtime
    with runtime.during("evaluating"):
        runtime.retry_across_generations(
            lambda: evaluate.evaluate_at_end(run.folder, run.config, runtime)
        )
