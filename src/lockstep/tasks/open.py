"""Open the task of a run, and the evaluator of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.schema import RunConfig
from lockstep.data.pairs import prepare
from lockstep.data.text import prepare as text_prepare
from lockstep.data.text.chat_tokenizer import ChatTokenizer
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.models.llama_io import TOKENIZER, read_model
from lockstep.tasks.evaluator import Evaluator
from lockstep.tasks.language_model import LanguageModelTask
from lockstep.tasks.task import Task
from lockstep.tasks.text_evaluator import LlamaEvaluator
from lockstep.tasks.translation import TranslationTask
from lockstep.tasks.translation_evaluator import TranslationEvaluator


def open_task(run: RunConfig, folder: Path, runtime: ElasticRuntime) -> Task:
    """Collective. Return the task of the run, with prepared data. DataError."""
    if run.task == "translate":
        return TranslationTask.open(run, folder, runtime)
    return LanguageModelTask.open(run, folder, runtime)


def open_evaluator(run: RunConfig, folder: Path) -> Evaluator:
    """Return the evaluator of the run. DataError if its held-out data is missing or damaged."""
    if run.task == "translate":
        return TranslationEvaluator(run, folder, prepare.open_prepared(folder / "data"))
    tokenizer = ChatTokenizer.load(folder / TOKENIZER, read_model(folder)[1])
    return LlamaEvaluator(run, folder, text_prepare.open_prepared(folder / "data", tokenizer))
