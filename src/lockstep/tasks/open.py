"""The task that a run names, and the exam that goes with it."""

from __future__ import annotations

from pathlib import Path

from lockstep.config import Run
from lockstep.data import llama as llama_data
from lockstep.data import prepare
from lockstep.data.chat import ChatTokenizer
from lockstep.models.pretrained import TOKENIZER, read_model
from lockstep.tasks.chat import open_tuning
from lockstep.tasks.exam import Exam
from lockstep.tasks.language import open_pretraining
from lockstep.tasks.llama_exam import LlamaExam
from lockstep.tasks.task import Task
from lockstep.tasks.translation import Translation
from lockstep.tasks.translation_exam import TranslationExam
from lockstep.world import World


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
