"""What the scripts use, with the values of a run: data, optimizers, scores."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.recipes.run import RecipeRun
from lockstep.tasks import evaluate, optim
from lockstep.tasks.language_model import LanguageModelTask
from lockstep.tasks.open import Task
from lockstep.tasks.translation import TranslationTask

T = TypeVar("T")


def open_pairs(run: RecipeRun) -> TranslationTask:
    """Collective. Return the sentence pairs of a run and its translator. DataError."""
    return _open(run, "translate", TranslationTask)


def open_documents(run: RecipeRun) -> LanguageModelTask:
    """Collective. Return the documents of a run and its language model. DataError."""
    return _open(run, "pretrain", LanguageModelTask)


def open_chats(run: RecipeRun) -> LanguageModelTask:
    """Collective. Return the chats of a run and its language model. DataError."""
    return _open(run, "sft", LanguageModelTask)


def open_learners_data(run: RecipeRun) -> Task:
    """Collective. Return the data and the model of a run, for the learners of DiLoCo. DataError."""
    config = run.config
    if not config.diloco.learners:
        raise ConfigError("the run has no learners", "diloco.learners=0", "give a number of them")
    return run.open_task()


def _open(run: RecipeRun, task: str, kind: type[T]) -> T:
    if run.config.task != task:
        hint = "give a run file of its task: recipes/llama-pretrain.toml, recipes/llama-sft.toml"
        what = f"the run has task={run.config.task}, and this script is for {task}"
        raise ConfigError(what, "task", hint)
    if run.config.diloco.learners:
        hint = "leave it out, or start the script of learners: lockstep recipes copy diloco FILE"
        raise ConfigError("this script trains no learners", "diloco.learners", hint)
    opened = run.open_task()
    assert isinstance(opened, kind)
    return opened


def make_optimizers(run: RecipeRun, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model on the meta device, as the sections [optim] and [memory]
    have them."""
    on_gpu = run.runtime.world.device.type == "cuda"
    return optim.make_optimizers(model, run.config.optim, run.config.memory, on_gpu=on_gpu)


def evaluate_at_end(run: RecipeRun) -> None:
    """Collective. Score the test split, as evaluate.at_end has it; print samples and the next
    command."""
    runtime = run.runtime
    with runtime.during("evaluating"):
        runtime.retry_across_generations(
            lambda: evaluate.evaluate_at_end(run.folder, run.config, runtime)
        )
