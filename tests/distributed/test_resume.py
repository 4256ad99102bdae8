"""A checkpoint that is not of the run that wants to resume from it is refused; nothing goes on with other bits in silence."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint.fingerprints import make_run_id
from lockstep.cli.run_options import open_run
from lockstep.elastic.world import World
from lockstep.errors import CheckpointError, UsageError
from lockstep.runtime import sources
from lockstep.testing.ranks import run_ranks
from lockstep.train import claim, train
from lockstep.training.checkpointer import Keeper

TINY = {"data.kind": "files", "tokens.kind": "word", "tokens.min_frequency": 1, "save.every_steps": 2, "evaluate.at_end": 0}
TINY |= {"model.width": 16, "model.heads": 2, "model.encoder_layers": 1, "model.decoder_layers": 1, "model.feed_forward": 16}


def make_text(path: Path, seed: int) -> str:
    """Pairs of made-up sentences, the same words for every seed."""
    rng = random.Random(seed)
    numbers = [[rng.randrange(10) for _ in range(6)] for _ in range(4000)]
    path.write_text("".join(f"{' '.join(f'a{n}' for n in row)}\t{' '.join(f'b{n}' for n in row)}\n" for row in numbers))
    return str(path)


def train_here(world: World, folder: Path, flags: dict[str, Any]) -> str:
    """Train the run in `folder`; what was refused, or ""."""
    try:
        resolved = open_run(folder, None, {**TINY, **flags}, {})
        with claim(folder, resolved):
            train(resolved, folder, world)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two steps, and the values that it was started with."""
    base = tmp_path_factory.mktemp("begun")
    flags = {"data.train": make_text(base / "text.tsv", 1), "data.held_out": 40, "steps": 2}
    assert run_ranks(train_here, 1, base / "run", flags) == [""]
    return base / "run", flags


def changed_run(begun: tuple[Path, dict[str, Any]], folder: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of the run, and values with which it goes on to step 3."""
    shutil.copytree(begun[0], folder / "run")
    return folder / "run", begun[1] | {"steps": 3}


def test_a_resumed_run_keeps_its_bits_or_is_refused(begun: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    # A checkpoint of a run with another learning rate, copied in; then its own again.
    folder, flags = changed_run(begun, tmp_path / "copied in")
    other = tmp_path / "other"
    assert run_ranks(train_here, 1, other, flags | {"optim.learning_rate": 0.02, "steps": 2}) == [""]
    kept = folder / "checkpoints" / "step-00000002"
    kept.rename(tmp_path / "kept")
    shutil.copytree(other / "checkpoints" / "step-00000002", kept)
    (told,) = run_ranks(train_here, 1, folder, flags)
    assert "the checkpoint of step 2 belongs to another run: run_id was " in told and "; optim.learning_rate was 0.02, is 0.004" in told
    shutil.rmtree(kept)
    (tmp_path / "kept").rename(kept)
    assert run_ranks(train_here, 1, folder, flags) == [""]

    # The text has changed, and was prepared again.
    folder, flags = changed_run(begun, tmp_path / "other text")
    shutil.rmtree(folder / "data")
    (told,) = run_ranks(train_here, 1, folder, flags | {"data.train": make_text(tmp_path / "text.tsv", 2)})
    assert "belongs to another run: corpus was " in told and (folder / "checkpoints" / "step-00000002").is_dir()


def keeper(folder: Path) -> Keeper:
    """A keeper of an own loop's state."""
    model = nn.Linear(2, 1)
    return Keeper(folder / "checkpoints", World(0, 1, 0, 1, "here", torch.device("cpu")), model, torch.optim.SGD(model.parameters(), 0.1))


def save(folder: Path, step: int, facts: dict[str, str] | None = None) -> None:
    """Save the state of an own loop."""
    with keeper(folder) as one:
        one.resume("never", facts)
        one.save(step)


def test_an_own_loop_does_not_resume_from_the_checkpoint_of_another_run_folder(tmp_path: Path) -> None:
    save(tmp_path / "a", 3)
    save(tmp_path / "b", 5)
    shutil.copytree(tmp_path / "b/checkpoints/step-00000005", tmp_path / "a/checkpoints/step-00000005")
    with pytest.raises(CheckpointError, match="the checkpoint of step 5 belongs to another run: run_id was") as caught:
        keeper(tmp_path / "a").resume()
    assert caught.value.where and caught.value.hint
    assert keeper(tmp_path / "b").resume() == 5
    (tmp_path / "b" / "run_id.json").unlink()
    assert keeper(tmp_path / "b").resume() == 5, "the id is taken from the checkpoint"


def test_what_an_own_loop_says_must_be_equal_is_compared_at_a_resume(tmp_path: Path) -> None:
    save(tmp_path, 3, {"text": "abc"})
    with pytest.raises(CheckpointError, match="text was abc, is abd"):
        keeper(tmp_path).resume(facts={"text": "abd"})
    assert keeper(tmp_path).resume(facts={"text": "abd"}, allowed={"text"}) == 3


def test_the_facts_of_a_checkpoint_that_are_lockstep_s_own_cannot_be_given(tmp_path: Path) -> None:
    """They would hide the ones that a resume compares."""
    with keeper(tmp_path) as one:
        one.resume("never", {"text": "abc"})
        with pytest.raises(UsageError, match="facts of the names code, fingerprints are Lockstep's own"):
            one.save(3, {"fingerprints": {}, "code": {}, "epoch": 2})


def test_a_joiner_reads_the_id_of_the_run_once_the_others_have_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come before they have: a checkpoint that it saves as a leader has the id all the same."""

    def join(joiner: Keeper, facts: dict[str, str]) -> int:
        make_run_id(tmp_path, "0123456789abcdef")
        return 4

    monkeypatch.setattr(Keeper, "_join", join)
    one = keeper(tmp_path)
    one.world.joining = True
    assert one.resume() == 4 and one.stamp["run_id"] == "0123456789abcdef"


def test_an_edited_loop_goes_on_with_a_warning_and_a_line_in_the_diary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "own", {"own loop": "loop.py, sources 1"})
    save(tmp_path, 3)
    monkeypatch.setattr(sources, "own", {"own loop": "loop.py, sources 2"})
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert keeper(tmp_path).resume() == 3
    assert "other bits than it would have had where it began: own loop was loop.py, sources 1, is loop.py, sources 2" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["event"] == "resumed with differences"]
    assert line["differences"] == ["own loop was loop.py, sources 1, is loop.py, sources 2"]
