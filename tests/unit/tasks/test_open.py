"""Open tasks and evaluators in one process, on tiny data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.resolve import resolve
from lockstep.config.schema import RunConfig
from lockstep.data.text.packing import IGNORE_INDEX
from lockstep.data.tokenizer import PAD
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import DataError
from lockstep.tasks.evaluator import Evaluator, merge_results
from lockstep.tasks.open import open_evaluator, open_task
from lockstep.tasks.task import Task

PAIRS = {"data.pairs": 400, "data.held_out": 20, "tokenizer.vocab_size": 400, "batch.tokens": 256}
TEXT = {"task": "pretrain", "data.kind": "text", "data.held_out_share": 0.1, "tokenizer.vocab_size": 400, "llama.size": "1M"}
CHATS = TEXT | {"task": "sft", "data.kind": "drills", "data.pairs": 60}
ROWS = {"batch.seq_len": 64, "batch.tokens": 128}


def run_of(values: dict[str, Any]) -> RunConfig:
    return resolve(None, values).run


def open_alone(run: RunConfig, folder: Path) -> Task:
    with ElasticRuntime.join(threads=1) as runtime:
        return open_task(run, folder, runtime)


@pytest.fixture
def text(tmp_path: Path) -> dict[str, Any]:
    lines = "".join(f"Line {number} of a text about {number % 7} things.\n" for number in range(400))
    (tmp_path / "text.txt").write_text(lines)
    return TEXT | ROWS | {"data.train": str(tmp_path / "text.txt")}


def test_a_translation_task_counts_the_tokens_of_its_micro_batches(tmp_path: Path) -> None:
    run = run_of(PAIRS)
    task = open_alone(run, tmp_path)
    labels = [task.loader.micro_batch(3, k).labels for k in range(run.batch.micro_batches)]
    assert task.loader.tokens_in_step(3) == sum(int((part != PAD).sum()) for part in labels)
    assert max(part.shape[1] for part in labels) <= task.length


@pytest.mark.parametrize("kind", ["text", "chats"])
def test_a_llama_task_counts_the_labels_of_its_micro_batches(kind: str, text: dict[str, Any], tmp_path: Path) -> None:
    run = run_of(text if kind == "text" else CHATS | ROWS)
    task = open_alone(run, tmp_path / "run")
    batches = [task.loader.micro_batch(1, k) for k in range(run.batch.micro_batches)]
    assert task.loader.tokens_in_step(1) == sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
    assert {tuple(batch.labels.shape) for batch in batches} == {(2, 64)} and task.length == 64


def test_a_task_opens_again_with_equal_data_and_weights(text: dict[str, Any], tmp_path: Path) -> None:
    for number, values in enumerate([PAIRS, text]):
        first, second = (open_alone(run_of(values), tmp_path / str(number)) for _ in range(2))
        assert first.fingerprints == second.fingerprints
        name, parameter = next(iter(first.meta_model().named_parameters()))
        assert torch.equal(first.init_param(name, parameter.shape), second.init_param(name, parameter.shape))


def test_prepared_data_of_other_settings_is_refused(text: dict[str, Any], tmp_path: Path) -> None:
    open_alone(run_of(PAIRS), tmp_path / "pairs")
    with pytest.raises(DataError, match=r"other settings: tokenizer\.vocab_size differs"):
        open_alone(run_of(PAIRS | {"tokenizer.vocab_size": 450}), tmp_path / "pairs")
    open_alone(run_of(text), tmp_path / "text")
    with pytest.raises(DataError, match=r"other settings: data\.held_out_share differs"):
        open_alone(run_of(text | {"data.held_out_share": 0.2}), tmp_path / "text")


def test_a_text_shorter_than_a_row_is_refused(text: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fewer than 65536 tokens"):
        open_alone(run_of(text | {"batch.seq_len": 65536, "batch.tokens": 65536}), tmp_path / "run")


def test_an_evaluator_needs_prepared_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data was prepared"):
        open_evaluator(run_of(PAIRS), tmp_path)
    open_alone(run_of(PAIRS), tmp_path)
    evaluator: Evaluator = open_evaluator(run_of(PAIRS), tmp_path)
    assert evaluator.held_out("validation") == evaluator.held_out("test") == 20
    assert evaluator.next_command == f'lockstep translate {tmp_path} "en text"'


def test_results_are_merged_by_number_unless_a_signal_arrived() -> None:
    with ElasticRuntime.join(threads=1) as runtime:
        assert merge_results(runtime, lambda: "", losses={1: 0.5, 0: 2.0}, answers={}) == {"losses": {1: 0.5, 0: 2.0}, "answers": {}}
        assert merge_results(runtime, lambda: "SIGTERM", losses={1: 0.5}) is None
