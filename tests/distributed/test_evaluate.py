"""`lockstep evaluate`: exact on any number of ranks, each checkpoint once, through kills and damage."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.waiting import wait_until

from lockstep.checkpoint.evaluations import best_of
from lockstep.checkpoint.state_dict import get_state_dict
from lockstep.checkpoint.store import CheckpointStore
from lockstep.config.resolve import resolve
from lockstep.config.saved_run import write_run
from lockstep.config.schema import RunConfig
from lockstep.corpus.encoded_pairs import open_prepared, prepare
from lockstep.corpus.tokenizer import BEGIN, END
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError, UsageError
from lockstep.models.load_translator import load_translator, newest_steps
from lockstep.models.translator import build_translator
from lockstep.record.metrics import read_metrics
from lockstep.tasks.evaluate import (
    append_record,
    evaluate,
    evaluate_at_end,
    next_action,
    read_run,
)
from lockstep.tasks.translation import score

LAST = 3
ALONE = ElasticRuntime(World(0, 1, 0, 1, "here", torch.device("cpu")))
CHECKED = [
    "loss",
    "perplexity",
    "tokens",
    "pairs",
    "bleu",
    "chrf",
    "cer",
    "wer",
    "exact_match",
    "averaged",
    "bleu_signature",
]


def sentence_pair(number: int) -> tuple[str, str]:
    """Return a pair of sentences whose length depends on `number`."""
    digits = [int(d) for d in str(number)]
    few = number % 5 + 1
    return " ".join(f"a{d}" for d in digits * few), " ".join(f"b{d}" for d in digits * few)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a corpus and no checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    rng = random.Random(0)
    numbers = rng.sample(range(1000), 150)
    files = {"train": numbers[:90], "validation": numbers[90:137], "test": numbers[137:]}
    for name, chosen in files.items():
        (folder / f"{name}.tsv").write_text(
            "".join("\t".join(sentence_pair(n)) + "\n" for n in chosen)
        )
    flags = {
        "data.kind": "files",
        "steps": LAST,
        "evaluate.at_end": 5,
        "tokenizer.kind": "word",
        "tokenizer.min_frequency": 1,
    }
    flags |= {
        "model.dim": 16,
        "model.n_heads": 2,
        "model.encoder_layers": 1,
        "model.decoder_layers": 1,
        "model.ffn_dim": 16,
    }
    resolved = resolve(
        None, flags | {f"data.{name}": [str(folder / f"{name}.tsv")] for name in files}
    )
    write_run(folder, resolved)
    prepare(resolved.run.data, resolved.run.tokenizer, folder / "data")
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of the run folder for one test."""
    (tmp_path / "data").symlink_to(original / "data")
    (tmp_path / "run.json").write_text((original / "run.json").read_text())
    return tmp_path


def save(folder: Path, step: int) -> None:
    """Commit a checkpoint with weights that depend on its step."""
    run = read_run(folder)
    size = open_prepared(folder / "data").tokenizer.vocab_size
    model = build_translator(run.model, vocab_size=size, device=torch.device("cpu"), seed=step)
    CheckpointStore(folder / "checkpoints", keep=0).save(step, get_state_dict(model), {})


def lines(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "evaluations.jsonl")


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in lines(folder)]


def evaluate_here(runtime: ElasticRuntime, folder: Path, options: dict[str, Any]) -> str:
    return evaluate(folder, runtime, **options)


def in_process(folder: Path, **options: Any) -> multiprocessing.process.BaseProcess:
    """Start an evaluator process. Its exit code is 7 if a signal stopped it."""
    process = multiprocessing.get_context("forkserver").Process(
        target=be_evaluator, args=(folder, options), daemon=True
    )
    process.start()
    return process


def be_evaluator(folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os._exit(7 if evaluate(folder, ALONE, **options) else 0)


# -- exact ------------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_sum_over_single_sentences(folder: Path) -> None:
    save(folder, 1)
    assert evaluate(folder, ALONE) == ""
    [line] = lines(folder)
    loaded = load_translator(folder)
    total, tokens = 0.0, 0
    pairs = open_prepared(folder / "data").records("validation")
    ids = [loaded.tokenizer.encode([pair["source"], pair["target"]]) for pair in pairs]
    for source, target in ids:
        logits = loaded.model(torch.tensor([[*source, END]]), torch.tensor([[BEGIN, *target]]))[0]
        total += float(
            F.cross_entropy(logits.double(), torch.tensor([*target, END]), reduction="sum")
        )
        tokens += len(target) + 1
    assert line["tokens"] == tokens
    assert line["pairs"] == len(pairs) == 47
    assert line["loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert line["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"beams": 3, "average": 2, "split": "test"}])
def test_any_number_of_ranks_gives_the_same_scores(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    save(folder, 1)
    save(folder, 2)
    records = []
    for size in (1, 3):
        (folder / "evaluations.jsonl").unlink(missing_ok=True)
        run_ranks(evaluate_here, size, folder, options)
        [line] = lines(folder)
        records.append({key: line[key] for key in CHECKED})
    assert records[0] == records[1]
    assert records[0]["averaged"] == ([1, 2] if options else [2])


def test_checkpoints_are_averaged_in_float64(folder: Path) -> None:
    for step in (1, 2, 3):
        save(folder, step)
    store = CheckpointStore(folder / "checkpoints")
    last_two = [store.load(step).tensors for step in (2, 3)]
    model = load_translator(folder, average=2).model
    for name, parameter in model.named_parameters():
        expected = (
            (last_two[0]["model." + name].double() + last_two[1]["model." + name].double()) / 2
        ).float()
        assert torch.equal(parameter, expected)
    assert newest_steps([1, 2, 3, 4], 3, 2) == (2, 3)
    assert newest_steps([1, 2, 3], 3, 4) == newest_steps([1, 2, 3], 3, 9) == (1, 2, 3)
    assert newest_steps([1, 2, 3], 3, 0) == newest_steps([1, 2, 3], 3, 1) == (3,)


def test_scores_equal_hand_computed_values() -> None:
    expected = ["the cat sat", "a dog"]
    perfect = score(expected, expected, language="en")
    assert (perfect["exact_match"], perfect["cer"], perfect["wer"], perfect["chrf"]) == (
        1.0,
        0.0,
        0.0,
        100.0,
    )
    scores = score(["the cat sit down", "A dog"], expected, language="en")
    assert scores["exact_match"] == 0.0
    assert scores["wer"] == (2 + 1) / 5  # sat -> sit, + down; a -> A
    assert scores["cer"] == (1 + 5 + 1) / 16
    lower = score(["the cat sit down", "A dog"], expected, language="en", lowercase=True)
    assert (lower["exact_match"], lower["wer"]) == (0.5, 2 / 5)
    assert "case:lc" in str(lower["bleu_signature"]) and "case:mixed" in str(
        scores["bleu_signature"]
    )
    assert "tok:zh" in str(score(["我们"], ["我们"], language="zh")["bleu_signature"])
    with pytest.raises(ValueError, match="1 translations for 2"):
        score(["one"], expected, language="en")


# -- once -------------------------------------------------------------------------------------------------------------


def test_a_step_is_scored_once_per_spec(folder: Path) -> None:
    save(folder, 2)
    for options in ({}, {}, {"beams": 2}, {"split": "test"}, {"average": 2}, {"beams": 2}):
        evaluate(folder, ALONE, **options)  # type: ignore[arg-type]
    specs = [
        (line["split"], line["beams"], line["average"], line["lowercase"]) for line in lines(folder)
    ]
    assert specs == [
        ("validation", 1, 0, False),
        ("validation", 2, 0, False),
        ("test", 1, 0, False),
        ("validation", 1, 2, False),
    ]


def test_a_partial_line_is_truncated(folder: Path) -> None:
    save(folder, 1)
    evaluate(folder, ALONE)
    whole = (folder / "evaluations.jsonl").read_bytes()
    (folder / "evaluations.jsonl").write_bytes(whole + whole[: len(whole) // 2])
    save(folder, 2)
    evaluate(folder, ALONE)
    content = (folder / "evaluations.jsonl").read_text()
    assert content.endswith("\n")
    assert [json.loads(line)["step"] for line in content.splitlines()] == [1, 2]


def test_the_best_has_the_highest_bleu_then_the_lowest_loss(folder: Path) -> None:
    record = {"split": "validation", "beams": 1, "average": 0, "lowercase": False}
    for step, bleu, loss in [(1, 10.0, 3.0), (2, 30.0, 2.0), (3, 30.0, 1.5), (4, 29.0, 1.0)]:
        assert append_record(folder, record | {"step": step, "bleu": bleu, "loss": loss})
        assert not append_record(folder, record | {"step": step, "bleu": 100.0, "loss": 0.0}), (
            "a second line"
        )
    assert append_record(
        folder, record | {"step": 5, "bleu": 99.0, "loss": 0.0, "split": "test"}
    ), "test never selects the best"
    assert json.loads((folder / "best.json").read_text())["step"] == 3
    assert best_of([]) is None


# -- following --------------------------------------------------------------------------------------------------------


def test_next_action() -> None:
    assert next_action([], [], [], 9, 0).kind == "wait"
    assert next_action([3, 6], [], [], 9, 0).step == 3, (
        "the oldest first: retention deletes it first"
    )
    assert next_action([3, 6], [3], [], 9, 0).step == 6
    assert next_action([3, 6], [3], [6], 9, 0).kind == "wait"
    assert next_action([6, 9], [3, 6, 9], [], 9, 0).kind == "end"
    assert next_action([6, 9], [3, 6], [9], 9, 0).kind == "end", "the last checkpoint is unreadable"
    assert next_action([6], [6], [], 9, 9).kind == "end", "the last checkpoint could not be written"
    assert next_action([6, 9], [6, 9], [], 12, 9).kind == "wait", "the run was extended"


@pytest.fixture
def late(folder: Path) -> Iterator[Path]:
    """A run folder that gets its first checkpoint at once, and each other one when the previous one is scored."""

    def train() -> None:
        for step in range(1, LAST + 1):
            if step > 1:
                wait_until(lambda step=step: step - 1 in steps(folder))  # type: ignore[misc]
            save(folder, step)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    yield folder
    thread.join()


def test_follow_scores_every_step_once_and_exits_with_the_run(late: Path) -> None:
    assert evaluate(late, ALONE, follow=True) == ""
    assert steps(late) == [1, 2, 3]
    assert json.loads((late / "best.json").read_text())["step"] in (1, 2, 3)


def test_a_killed_and_restarted_evaluator_writes_each_line_once(folder: Path) -> None:
    for step in range(1, LAST + 1):
        save(folder, step)
    rng = random.Random(1)
    kills = 0
    while len(steps(folder)) < LAST and kills < 6:
        before = len(steps(folder))
        process = in_process(folder, follow=True)
        wait_until(lambda before=before: len(steps(folder)) > before, running=process.is_alive)  # type: ignore[misc]
        time.sleep(rng.random() * 0.1)
        if process.is_alive():
            process.kill()
        process.join()
        kills += 1
    assert evaluate(folder, ALONE, follow=True) == ""
    assert steps(folder) == [1, 2, 3]
    assert kills >= 2


def test_sigterm_stops_a_waiting_evaluator(folder: Path) -> None:
    save(folder, 1)
    process = in_process(folder, follow=True)
    wait_until(lambda: steps(folder) == [1], running=process.is_alive)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(timeout=20)
    assert process.exitcode == 7
    assert steps(folder) == [1]


def test_a_damaged_checkpoint_is_skipped_by_follow_and_an_error_otherwise(folder: Path) -> None:
    for step in range(1, LAST + 1):
        save(folder, step)
    file = next((folder / "checkpoints").glob("step-*2/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        evaluate(folder, ALONE, step=2)
    assert evaluate(folder, ALONE, follow=True) == ""
    assert steps(folder) == [1, 3]


def test_errors_list_the_available_steps(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        evaluate(folder, ALONE)
    save(folder, 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5[\s\S]*checkpoints: 1"):
        evaluate(folder, ALONE, step=5)
    with pytest.raises(UsageError, match=r"there is no run in"):
        evaluate(tmp_path_factory.mktemp("empty"), ALONE)


def test_a_training_run_prints_scores_and_translations_at_its_end(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder, LAST)
    run: RunConfig = read_run(folder)
    evaluate_at_end(folder, run, ALONE)
    shown = capsys.readouterr().out
    assert "test, 5 pairs" in shown and "exact" in shown and "lockstep translate" in shown
    assert shown.count("\n  en  ") == 5
    assert not (folder / "evaluations.jsonl").exists(), "a part of the split is not recorded"
    assert json.loads((folder / "finished.json").read_text()) == {"step": LAST}
