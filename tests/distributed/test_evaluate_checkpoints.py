"""examples/evaluate_checkpoints.py: each score is that of its step, while retention deletes checkpoints."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.launching import ROOT
from torch import nn

from lockstep.checkpoint.state_dict import get_state_dict
from lockstep.checkpoint.store import CheckpointStore

LAST = 40


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import evaluate_checkpoints

    monkeypatch.setattr(evaluate_checkpoints, "POLL_S", 0.05)
    yield evaluate_checkpoints
    for name in ("evaluate_checkpoints", "own_loop"):
        sys.modules.pop(name, None)


def model_of(example: ModuleType, step: int) -> nn.Module:
    """Return a model whose weights depend on its step."""
    model: nn.Module = example.make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + step / 10)
    return model


def save(example: ModuleType, run: Path, step: int, keep: int = 0) -> None:
    state = get_state_dict(model_of(example, step))
    CheckpointStore(run / "checkpoints", keep=keep).save(step, state, {})


def scores_of(example: ModuleType, run: Path, last: int) -> dict[int, float]:
    out = run / "scores.json"
    example.follow(run, last, out)
    return {int(step): score for step, score in json.loads(out.read_text()).items()}


def test_retention_deletes_checkpoints_while_they_are_scored(
    example: ModuleType, tmp_path: Path
) -> None:
    def train() -> None:
        for step in range(1, LAST + 1):
            save(example, tmp_path, step, keep=1)
            time.sleep(0.1)

    trainer = threading.Thread(target=train)
    trainer.start()
    scores = scores_of(example, tmp_path, LAST)
    trainer.join()
    assert LAST in scores and len(scores) < LAST, "retention has deleted some before they were read"
    assert scores == {step: example.score(model_of(example, step)) for step in scores}
    assert len(set(scores.values())) == len(scores)


def test_a_deleted_or_damaged_checkpoint_has_no_score(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 3):
        save(example, tmp_path, step)
    file = tmp_path / "checkpoints" / "step-00000002" / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    monkeypatch.setattr(example, "committed_steps", lambda run: [1, 2, 3])
    assert list(scores_of(example, tmp_path, 3)) == [3]


def test_only_complete_checkpoints_are_listed(example: ModuleType, tmp_path: Path) -> None:
    save(example, tmp_path, 7)
    for name in ("step-00000008", "step-00000009.damaged", ".step-00000010.0123456789abcdef"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step-00000008" / "WRITING").touch()
    for name in ("step-00000009.damaged", ".step-00000010.0123456789abcdef"):
        (tmp_path / "checkpoints" / name / "COMMITTED").touch()
    assert example.committed_steps(tmp_path) == [7]


def test_a_second_start_scores_nothing_twice(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(example, tmp_path, 1)
    first = scores_of(example, tmp_path, 1)
    monkeypatch.setattr(example, "read_weights", None)
    assert scores_of(example, tmp_path, 1) == first
