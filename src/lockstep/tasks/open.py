"""The task that a run names, and the exam that goes with it."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.schema import Run
from lockstep.data.pairs import prepare
from lockstep.data.text import prepare as llama_data
from lockstep.data.text.chat_tokenizer import ChatTokenizer
from lockstep.elastic.world import World
from lockstep.models.llama_io import TOKENIZER, read_model
from lockstep.tasks.evaluator import Exam
from lockstep.tasks.finetuning import open_tuning
from lockstep.tasks.pretraining import open_pretraining
from lockstep.tasks.task import Task
from lockstep.tasks.text_evaluator import LlamaExam
from lockstep.tasks.translation import Translation
from lockstep.tasks.translation_evaluator import TranslationExam


def open_task(run: Run, folder: Path, world: World) -> Task:
    """Collective. What the run trains, with its data prepared under `folder`. DataError when that cannot be done."""
    if run.task == "pretrain":
        return open_pretraining(run, folder, world)
    if run.task == "sft":
        return open_tuning(run, folder, world)
    return Translation.open(run, folder, world)


def open_exam(run: Run, folder: Path) -> Exam:
    """What the checkpoints of the run are asked. DataError when its held-out data is missing or damaged."""
    if run.task == "translate":
        return TranslationExam(run, folder, prepare.open_prepared(folder / "data"))
    tokenizer = ChatTokenizer.load(folder / TOKENIZER, read_model(folder)[1])
    return LlamaExam(run, folder, llama_data.open_prepared(folder / "data", tokenizer))
