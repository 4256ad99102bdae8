"""A start that resumes with something else than what the checkpoint holds is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import CheckpointError
from lockstep.session import Session
from lockstep.training.witness import FirstMicroBatch, WitnessFile, describe_difference

INPUTS = torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
CRASH_AT = 3  # the first step after the save that computes micro-batch 0 and is not saved


class Crash(Exception):
    """What ends the first start, without a save."""


class Parts:
    """What a start is made of; a test changes one part of the second start."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = INPUTS
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.factor = 1.0
        self.hidden = torch.ones(4)
        self.offset = torch.zeros(4)


def train(
    out: Path,
    *,
    crash: bool = False,
    change: Callable[[Parts], None] = lambda parts: None,
    loss_of: Callable[[Parts, Tensor, int], Tensor] | None = None,
    steps: int = 6,
    crash_at: int = CRASH_AT,
    **options: Any,
) -> None:
    parts = Parts()
    change(parts)
    optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1, momentum=0.9)
    with Session(out, **({"micro_batches": 4, "save_every": 2} | options)) as session:
        model, optimizer = session.prepare(parts.model, optimizer)
        loader = session.loader(TensorDataset(parts.inputs), batch_size=8)
        for step in session.steps(steps):
            for (x,) in loader(step):
                default = (parts.factor * model(x * parts.hidden + parts.offset)).square().mean()
                session.backward(loss_of(parts, model(x), step) if loss_of else default)
            optimizer.step()
            if crash and step == crash_at - 1:
                raise Crash


def other_inputs(parts: Parts) -> None:
    parts.inputs = INPUTS.flip(1)


def other_attribute(parts: Parts) -> None:
    parts.model[2].p = 0.3


def other_factor(parts: Parts) -> None:
    parts.factor = 0.5


def other_hidden_state(parts: Parts) -> None:
    parts.hidden = torch.full((4,), 0.9)


def other_draw_before_the_loop(parts: Parts) -> None:
    parts.offset = torch.rand(4)


def tiny_difference(parts: Parts) -> None:
    parts.offset = torch.full((4,), 1e-6)


@pytest.mark.parametrize(
    "change",
    [
        other_inputs,
        other_attribute,
        other_factor,
        other_hidden_state,
        other_draw_before_the_loop,
        tiny_difference,
    ],
)
def test_resume_with_something_else_than_the_checkpoint_holds_is_refused(
    change: Callable[[Parts], None], tmp_path: Path
) -> None:
    with pytest.raises(Crash):
        train(tmp_path, crash=True)
    with pytest.raises(
        CheckpointError,
        match=r"step 3 began otherwise when the checkpoint of step 2 was saved: loss 0\.",
    ):
        train(tmp_path, change=change)
    train(tmp_path)


def test_equal_loss_with_another_gradient_is_refused(tmp_path: Path) -> None:
    def loss_of(parts: Parts, output: Tensor, step: int) -> Tensor:
        flat = 0.0 if parts.factor == 1.0 else (output - output.detach()).sum()
        return output.square().mean() + flat

    with pytest.raises(Crash):
        train(tmp_path, crash=True, loss_of=loss_of)
    with pytest.raises(CheckpointError, match=r"loss \S+ as now, and another gradient"):
        train(tmp_path, change=other_factor, loss_of=loss_of)


def test_repeated_step_with_another_loss_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loss_of(parts: Parts, output: Tensor, step: int) -> Tensor:
        return output.square().mean() * (parts.factor if step == 4 else 1.0)

    with pytest.raises(Crash):
        train(tmp_path, crash=True, crash_at=6, loss_of=loss_of, save_every=3)
    train(tmp_path, loss_of=loss_of, save_every=3, steps=4)
    assert "is repeated with loss" not in caplog.text
    with pytest.raises(Crash):
        train(tmp_path / "other", crash=True, crash_at=6, loss_of=loss_of, save_every=3)
    train(tmp_path / "other", change=other_factor, loss_of=loss_of, save_every=3)
    assert (
        caplog.text.count("is repeated with loss") == 1
        and "step 5 is repeated with loss" in caplog.text
    )


def test_refused_resume_continues_without_the_comparison(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(tmp_path, crash=True)
    train(tmp_path, change=other_inputs, rehearse=False)


def test_other_arguments_explain_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--noise", "0.1"])
    with pytest.raises(Crash):
        train(tmp_path, crash=True)
    monkeypatch.setattr("sys.argv", ["train.py", "--noise", "0.2"])
    train(tmp_path, change=other_inputs)
    assert (
        "step 3 began otherwise" in caplog.text
        and "--arguments was --noise 0.1, is --noise 0.2" in caplog.text
    )


def test_finished_run_that_is_extended_has_no_record_and_continues(tmp_path: Path) -> None:
    train(tmp_path, steps=4)
    assert sorted(WitnessFile(tmp_path).read()) == [2]
    train(tmp_path, steps=6)
    assert sorted(WitnessFile(tmp_path).read()) == [2, 4], (
        "the resume has recorded what it began with"
    )


def test_return_to_an_earlier_step_drops_the_records_after_it(tmp_path: Path) -> None:
    train(tmp_path, steps=6)
    assert sorted(WitnessFile(tmp_path).read()) == [2, 4]
    train(tmp_path, steps=3, resume="2", rehearse=False)
    assert sorted(WitnessFile(tmp_path).read()) == [2]


def test_damaged_record_is_named_and_compares_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Crash):
        train(tmp_path, crash=True)
    path = tmp_path / "witness.json"
    values = json.loads(path.read_text())
    values["steps"]["2"]["loss"] = "0.5"
    path.write_text(json.dumps(values))
    train(tmp_path)
    assert "witness.json is damaged" in caplog.text


def test_passes_of_other_slices_are_not_compared() -> None:
    whole = FirstMicroBatch(0, "0.5", 1)
    assert not describe_difference(whole, FirstMicroBatch(0, "0.7", None, (2, 1)))
    assert describe_difference(whole, FirstMicroBatch(0, "0.7", 1)) == "loss 0.5, now 0.7"
    assert (
        describe_difference(whole, FirstMicroBatch(0, "0.5", 2))
        == "loss 0.5 as now, and another gradient"
    )
    assert not describe_difference(whole, FirstMicroBatch(0, "0.5", 1))
    assert not describe_difference(whole, FirstMicroBatch(1, "0.7", 1))
