"""Checkpoints of another run are refused; a resume that changes the bits is reported."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

from lockstep.checkpoint.fingerprints import make_run_id
from lockstep.config.saved_run import open_run
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError, UsageError
from lockstep.recipes.script import lock_run_folder, train
from lockstep.runtime import sources
from lockstep.training.checkpointer import Checkpointer

TINY = {
    "data.kind": "files",
    "tokenizer.kind": "word",
    "tokenizer.min_frequency": 1,
    "checkpoint.every_steps": 2,
    "evaluate.at_end": 0,
}
TINY |= {
    "model.dim": 16,
    "model.n_heads": 2,
    "model.encoder_layers": 1,
    "model.decoder_layers": 1,
    "model.ffn_dim": 16,
}


def make_text(path: Path, seed: int) -> str:
    """Pairs of made-up sentences, the same words for every seed."""
    rng = random.Random(seed)
    numbers = [[rng.randrange(10) for _ in range(6)] for _ in range(4000)]
    path.write_text(
        "".join(
            f"{' '.join(f'a{n}' for n in row)}\t{' '.join(f'b{n}' for n in row)}\n"
            for row in numbers
        )
    )
    return str(path)


def train_here(runtime: ElasticRuntime, folder: Path, flags: dict[str, Any]) -> str:
    """Train the run in `folder`; return the refusal, or ""."""
    try:
        resolved = open_run(folder, None, {**TINY, **flags}, {})
        with lock_run_folder(folder, resolved):
            train(resolved, folder, runtime)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def two_step_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two steps and its values."""
    base = tmp_path_factory.mktemp("begun")
    flags = {"data.train": make_text(base / "text.tsv", 1), "data.held_out": 40, "steps": 2}
    assert run_ranks(train_here, 1, base / "run", flags) == [""]
    return base / "run", flags


def changed_run(
    two_step_run: tuple[Path, dict[str, Any]], folder: Path
) -> tuple[Path, dict[str, Any]]:
    """Return a copy of the run, and values that train it to step 3."""
    shutil.copytree(two_step_run[0], folder / "run")
    return folder / "run", two_step_run[1] | {"steps": 3}


def test_resumed_run_keeps_its_bits_or_is_refused(
    two_step_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    # A checkpoint of a run with another learning rate, copied in; then its own again.
    folder, flags = changed_run(two_step_run, tmp_path / "copied in")
    other = tmp_path / "other"
    assert run_ranks(train_here, 1, other, flags | {"optim.learning_rate": 0.02, "steps": 2}) == [
        ""
    ]
    kept = folder / "checkpoints" / "step-00000002"
    kept.rename(tmp_path / "kept")
    shutil.copytree(other / "checkpoints" / "step-00000002", kept)
    (refusal,) = run_ranks(train_here, 1, folder, flags)
    assert (
        "the checkpoint of step 2 belongs to another run: run_id was " in refusal
        and "; optim.learning_rate was 0.02, is 0.004" in refusal
    )
    shutil.rmtree(kept)
    (tmp_path / "kept").rename(kept)
    assert run_ranks(train_here, 1, folder, flags) == [""]

    # The text has changed, and was prepared again.
    folder, flags = changed_run(two_step_run, tmp_path / "other text")
    shutil.rmtree(folder / "data")
    (refusal,) = run_ranks(
        train_here, 1, folder, flags | {"data.train": make_text(tmp_path / "text.tsv", 2)}
    )
    assert (
        "belongs to another run: data was " in refusal
        and (folder / "checkpoints" / "step-00000002").is_dir()
    )


def checkpointer(folder: Path) -> Checkpointer:
    """Return the checkpointer of a user's loop."""
    model = nn.Linear(2, 1)
    return Checkpointer(
        folder / "checkpoints",
        ElasticRuntime(World(0, 1, 0, 1, "here", torch.device("cpu"))),
        model,
        torch.optim.SGD(model.parameters(), 0.1),
    )


def save(folder: Path, step: int, facts: dict[str, str] | None = None) -> None:
    """Save the state of a user's loop."""
    with checkpointer(folder) as saver:
        saver.resume("never", facts)
        saver.save(step)


def test_checkpoint_of_another_run_folder_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", 3)
    save(tmp_path / "b", 5)
    shutil.copytree(
        tmp_path / "b/checkpoints/step-00000005", tmp_path / "a/checkpoints/step-00000005"
    )
    with pytest.raises(
        CheckpointError, match="the checkpoint of step 5 belongs to another run: run_id was"
    ) as caught:
        checkpointer(tmp_path / "a").resume()
    assert caught.value.where and caught.value.hint
    assert checkpointer(tmp_path / "b").resume() == 5
    (tmp_path / "b" / "run_id.json").unlink()
    assert checkpointer(tmp_path / "b").resume() == 5, "the id is taken from the checkpoint"


def test_resume_compares_the_fingerprints_of_the_loop(tmp_path: Path) -> None:
    save(tmp_path, 3, {"text": "abc"})
    with pytest.raises(CheckpointError, match="text was abc, is abd"):
        checkpointer(tmp_path).resume(fingerprints={"text": "abd"})


def test_reserved_facts_are_refused(tmp_path: Path) -> None:
    """They would replace the facts that a resume compares."""
    with checkpointer(tmp_path) as saver:
        saver.resume("never", {"text": "abc"})
        with pytest.raises(
            UsageError, match="facts of the names code, fingerprints are Lockstep's own"
        ):
            saver.save(3, {"fingerprints": {}, "code": {}, "epoch": 2})


def test_joiner_reads_the_run_id_after_the_others_created_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that it saves later as rank 0 then has the id."""

    def join(joiner: Checkpointer, facts: dict[str, str]) -> int:
        make_run_id(tmp_path, "0123456789abcdef")
        return 4

    monkeypatch.setattr(Checkpointer, "_join", join)
    joiner = checkpointer(tmp_path)
    joiner.runtime.is_joining = True
    assert joiner.resume() == 4 and joiner.run_facts["run_id"] == "0123456789abcdef"


def test_edited_loop_resumes_with_a_warning_and_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "user_code", {"own loop": "loop.py, sources 1"})
    save(tmp_path, 3)
    monkeypatch.setattr(sources, "user_code", {"own loop": "loop.py, sources 2"})
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert checkpointer(tmp_path).resume() == 3
    assert (
        "this run may continue with other bits than where it started: own loop was loop.py, sources 1, is loop.py, sources 2"
        in caplog.text
    )
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["event"] == "resumed with differences"]
    assert line["differences"] == ["own loop was loop.py, sources 1, is loop.py, sources 2"]
