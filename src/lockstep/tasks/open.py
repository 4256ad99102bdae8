"""Open the task of a run, and the evaluator of its checkpoints.

    batch = task.loader.micro_batch(step, k)     on the device
    loss = task.loss(model, batch)               one forward pass; a sum

A task communicates only to prepare its data. Everything else is a pure function of the
configuration and the data, equal on every rank.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from lockstep.config.schema import RunConfig
from lockstep.corpus import encoded_pairs, prepared
from lockstep.corpus.chat_tokenizer import ChatTokenizer
from lockstep.data.manifest import FileDigests
from lockstep.elastic.collectives import run_on_rank0
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.models.llama_io import TOKENIZER, read_model
from lockstep.runtime.worker_env import state_folder
from lockstep.tasks.evaluator import Evaluator
from lockstep.tasks.language_model import LanguageModelTask, LlamaEvaluator
from lockstep.tasks.translation import TranslationEvaluator, TranslationTask

Task = TranslationTask | LanguageModelTask


def open_task(run: RunConfig, folder: Path, runtime: ElasticRuntime) -> Task:
    """Collective. Return the task of the run; rank 0 prepares its data the first time.
    DataError."""
    task = TranslationTask if run.task == "translate" else LanguageModelTask
    return task.open(run, folder, runtime, digests_on_host(runtime, folder))


def digests_on_host(runtime: ElasticRuntime, folder: Path) -> FileDigests:
    """Collective in a static group. Return the digests that this host shares in this start."""
    if not runtime.is_static:
        env = runtime.member.worker_env
        return FileDigests(
            Path(env.state) / "file_digests.json", f"after generation {env.after_generation}"
        )
    start = run_on_rank0(runtime, lambda: secrets.token_hex(8))
    if runtime.world.local_size == 1:
        return FileDigests()
    return FileDigests(state_folder(folder, runtime.world.host) / "file_digests.json", start)


def open_evaluator(run: RunConfig, folder: Path) -> Evaluator:
    """Return the evaluator of the run. DataError if its held-out data is missing or damaged."""
    if run.task == "translate":
        return TranslationEvaluator(run, folder, encoded_pairs.open_prepared(folder / "data"))
    tokenizer = ChatTokenizer.load(folder / TOKENIZER, read_model(folder).hf_config)
    return LlamaEvaluator(run, folder, prepared.open_prepared(folder / "data", tokenizer))
