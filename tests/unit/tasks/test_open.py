"""Open tasks and evaluators in one process, on tiny data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from lockstep.config.resolve import resolve
from lockstep.config.schema import RunConfig
from lockstep.corpus import loaders
from lockstep.corpus.loaders import IGNORE_INDEX
from lockstep.corpus.token_stream import TokenStream, TokenStreamWriter
from lockstep.corpus.tokenizer import PAD
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import ConfigError, DataError
from lockstep.tasks.evaluator import merge_results
from lockstep.tasks.language_model import refuse_no_rows
from lockstep.tasks.open import Evaluator, Task, open_evaluator, open_task

PAIRS = {"data.pairs": 400, "data.held_out": 20, "tokenizer.vocab_size": 400, "batch.tokens": 256}
TEXT = {
    "task": "pretrain",
    "data.kind": "text",
    "data.held_out_share": 0.1,
    "tokenizer.vocab_size": 400,
    "llama.size": "1M",
}
CHATS = TEXT | {"task": "sft", "data.kind": "drills", "data.pairs": 60}
ROWS = {"batch.seq_len": 64, "batch.tokens": 128}


def run_of(values: dict[str, Any]) -> RunConfig:
    return resolve(None, values).run


def open_alone(run: RunConfig, folder: Path) -> Task:
    with ElasticRuntime.join(threads=1) as runtime:
        return open_task(run, folder, runtime)


@pytest.fixture
def text(tmp_path: Path) -> dict[str, Any]:
    lines = "".join(
        f"Line {number} of a text about {number % 7} things.\n" for number in range(400)
    )
    (tmp_path / "text.txt").write_text(lines)
    return TEXT | ROWS | {"data.train": str(tmp_path / "text.txt")}


def test_a_translation_task_counts_the_tokens_of_its_micro_batches(tmp_path: Path) -> None:
    run = run_of(PAIRS)
    task = open_alone(run, tmp_path)
    batches = [task.loader.micro_batch(3, k) for k in range(run.batch.micro_batches)]
    labels = [batch.labels for batch in batches]
    assert sum(batch.count for batch in batches) == sum(int((part != PAD).sum()) for part in labels)
    assert max(part.shape[1] for part in labels) <= task.length


@pytest.mark.parametrize("kind", ["text", "chats"])
def test_a_llama_task_counts_the_labels_of_its_micro_batches(
    kind: str, text: dict[str, Any], tmp_path: Path
) -> None:
    run = run_of(text if kind == "text" else CHATS | ROWS)
    task = open_alone(run, tmp_path / "run")
    batches = [task.loader.micro_batch(1, k) for k in range(run.batch.micro_batches)]
    assert sum(batch.count for batch in batches) == sum(
        int((batch.labels != IGNORE_INDEX).sum()) for batch in batches
    )
    assert {tuple(batch.labels.shape) for batch in batches} == {(2, 64)} and task.length == 64


def test_a_task_opens_again_with_equal_data_and_weights(
    text: dict[str, Any], tmp_path: Path
) -> None:
    for number, values in enumerate([PAIRS, text]):
        first, second = (open_alone(run_of(values), tmp_path / str(number)) for _ in range(2))
        assert first.fingerprints == second.fingerprints
        name, parameter = next(iter(first.meta_model().named_parameters()))
        assert torch.equal(
            first.init_param(name, parameter.shape), second.init_param(name, parameter.shape)
        )


def open_and_count_packings(
    runtime: ElasticRuntime, folder: Path, state: str
) -> tuple[int, list[list[int]]]:
    """Open the task; return how often this process packed the chats, and its rows."""
    os.environ["LOCKSTEP_TMP"] = state
    pack, calls = loaders.pack, list[int]()
    loaders.pack = lambda *args: calls.append(1) or pack(*args)  # type: ignore[func-returns-value]
    try:
        task = open_task(run_of(CHATS | ROWS), folder, runtime)
    finally:
        loaders.pack = pack
    return len(calls), [task.loader.micro_batch(0, k).tokens.flatten().tolist() for k in range(2)]


def test_chats_are_packed_once_per_run(tmp_path: Path) -> None:
    """Every worker packed them, 64 s for a million chats."""
    first = run_ranks(open_and_count_packings, 3, tmp_path / "run", str(tmp_path))
    assert [count for count, _ in first] == [1, 0, 0] and first[0][1] == first[1][1] == first[2][1]
    second = run_ranks(open_and_count_packings, 3, tmp_path / "run", str(tmp_path))
    assert [count for count, _ in second] == [0, 0, 0] and second[0][1] == first[0][1]
    (index,) = (tmp_path / "run" / "data").glob("rows-*.json")
    index.write_text("{}")
    assert run_ranks(open_and_count_packings, 2, tmp_path / "run", str(tmp_path))[0][0] == 1


def test_damaged_packed_rows_are_refused(tmp_path: Path) -> None:
    """They would silently train other rows on one host."""
    open_alone(run_of(CHATS | ROWS), tmp_path)
    (path,) = (tmp_path / "data").glob("rows-*.npy")
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"rows-\w+\.npy is damaged[\s\S]*remove .*rows-\w+\.json"):
        open_alone(run_of(CHATS | ROWS), tmp_path)
    path.with_suffix(".json").unlink()
    open_alone(run_of(CHATS | ROWS), tmp_path)


def test_prepared_data_of_other_settings_is_refused(text: dict[str, Any], tmp_path: Path) -> None:
    open_alone(run_of(PAIRS), tmp_path / "pairs")
    with pytest.raises(DataError, match=r"other settings: tokenizer\.vocab_size differs"):
        open_alone(run_of(PAIRS | {"tokenizer.vocab_size": 450}), tmp_path / "pairs")
    open_alone(run_of(text), tmp_path / "text")
    with pytest.raises(DataError, match=r"other settings: data\.held_out_share differs"):
        open_alone(run_of(text | {"data.held_out_share": 0.2}), tmp_path / "text")


def test_a_text_shorter_than_a_row_is_refused(text: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fewer than 65536 tokens"):
        longer = {"batch.seq_len": 65536, "batch.tokens": 65536, "llama.max_seq_len": 65536}
        open_alone(run_of(text | longer), tmp_path / "run")


def test_documents_of_one_token_make_no_rows(tmp_path: Path) -> None:
    """As of a tokenizer without begin and end tokens; with data.packing = false."""
    writer = TokenStreamWriter(tmp_path, "train", 400)
    writer.add([5])
    writer.add([6])
    writer.close()
    rows = loaders.DocumentRows(TokenStream.open(tmp_path, "train"), 64)
    with pytest.raises(DataError, match=r"no training document or chat has two tokens") as caught:
        refuse_no_rows(rows, tmp_path)
    assert "batch.seq_len" not in caught.value.where


@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_rows_longer_than_the_context_are_refused_before_the_data_is_prepared(
    task: str, text: dict[str, Any], tmp_path: Path
) -> None:
    values = (text if task == "pretrain" else CHATS) | {"batch.seq_len": 2048, "batch.tokens": 2048}
    with pytest.raises(
        ConfigError,
        match=r"batch\.seq_len=2,048 is above the 1,024 positions[\s\S]*llama\.max_seq_len=2048",
    ):
        open_alone(run_of(values), tmp_path / "run")
    assert not (tmp_path / "run" / "data").exists()


def test_an_evaluator_needs_prepared_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data was prepared"):
        open_evaluator(run_of(PAIRS), tmp_path)
    open_alone(run_of(PAIRS), tmp_path)
    evaluator: Evaluator = open_evaluator(run_of(PAIRS), tmp_path)
    assert evaluator.held_out("validation") == evaluator.held_out("test") == 20
    assert evaluator.next_command == f'lockstep translate {tmp_path} "en text"'


def test_results_are_merged_by_number_unless_a_signal_arrived() -> None:
    with ElasticRuntime.join(threads=1) as runtime:
        assert merge_results(runtime, lambda: "", losses={1: 0.5, 0: 2.0}, answers={}) == {
            "losses": {1: 0.5, 0: 2.0},
            "answers": {},
        }
        assert merge_results(runtime, lambda: "SIGTERM", losses={1: 0.5}) is None
