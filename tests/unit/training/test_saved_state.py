"""Plain values and values of each micro-batch in the checkpoints of a Session."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.session import Session

INPUTS = torch.rand(32, 4, generator=torch.Generator().manual_seed(1))
VALUES: dict[str, Any] = {
    "number": 0.5,
    "count": 3,
    "flag": True,
    "text": "a",
    "nothing": None,
    "items": [1, {"a": 2.0}],
    "pair": (1, "b"),
    "table": {"k": [1, 2]},
    "queue": deque([1, 2], maxlen=3),
    "tensor": torch.arange(3),
    "array": np.arange(4.0).reshape(2, 2),
    "scores": [np.float32(0.5), np.int64(2)],
}


def train(out: Path, steps: int, values: dict[str, Any], change: Callable[[Any, int], None]) -> Any:
    """Train `steps` steps, with `change(saved, step)` after each; return the saved state."""
    torch.manual_seed(0)
    module = nn.Linear(4, 1)
    with Session(out, micro_batches=2, save_every=2) as session:
        model, optimizer = session.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        saved = session.state(**values)
        for step in session.steps(steps):
            for k in session.micro_batches(step):
                session.backward(model(INPUTS[8 * k : 8 * k + 8]).mean())
            optimizer.step()
            change(saved, step)
    return saved


def assign(saved: Any, step: int) -> None:
    saved.number = step + 0.25
    saved.items = [*saved.items, step]
    saved.queue.append(step)
    saved.table["k"].append(step)
    saved.tensor = saved.tensor + 1
    saved.array = saved.array * 2


def copies(values: dict[str, Any]) -> dict[str, Any]:
    import copy

    return copy.deepcopy(values)


def as_text(saved: Any) -> dict[str, str]:
    return {name: repr(getattr(saved, name)) for name in VALUES if name != "scores"}


def test_plain_values_are_those_of_an_uninterrupted_run_after_a_resume(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 6, copies(VALUES), assign)
    train(tmp_path / "resumed", 3, copies(VALUES), assign)
    resumed = train(tmp_path / "resumed", 6, copies(VALUES), assign)
    assert as_text(resumed) == as_text(whole)
    assert resumed.number == 5.25 and [float(score) for score in resumed.scores] == [0.5, 2.0]


def test_containers_and_tensors_are_filled_for_variables_that_hold_them(tmp_path: Path) -> None:
    train(tmp_path, 2, copies(VALUES), assign)
    values = copies(VALUES)
    train(tmp_path, 3, values, lambda saved, step: None)
    assert values["queue"] == deque([2, 0, 1], maxlen=3)
    assert values["table"] == {"k": [1, 2, 0, 1]} and values["items"] == [1, {"a": 2.0}, 0, 1]
    assert values["tensor"].tolist() == [2, 3, 4]


def test_a_name_that_was_not_declared_is_refused(tmp_path: Path) -> None:
    def change(saved: Any, step: int) -> None:
        saved.other = 1

    with pytest.raises(
        UsageError,
        match=r"session\.state has received no 'other'(?s:.*)saved = session\.state\(other=\.\.\.\)",
    ):
        train(tmp_path, 1, {"best": 0.0}, change)


def test_an_object_cannot_be_replaced_by_an_assignment(tmp_path: Path) -> None:
    def change(saved: Any, step: int) -> None:
        saved.average = None

    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="'average' is a AveragedModel, not a plain value"):
        train(tmp_path, 1, {"average": average}, change)


def carry(
    out: Path, steps: int, *, read_outside: bool = False, shape: tuple[int, ...] = (8, 4)
) -> str:
    """Train with a hidden state of each micro-batch; return its last values."""
    torch.manual_seed(0)
    cell = nn.RNNCell(4, 4)
    with Session(out, micro_batches=3, save_every=2) as session:
        model, optimizer = session.prepare(cell, torch.optim.SGD(cell.parameters(), lr=0.1))
        saved = session.state(hidden=session.per_micro_batch(torch.zeros(8, 4)))
        for step in session.steps(steps):
            for k in session.micro_batches(step):
                hidden = model(INPUTS[8 * k : 8 * k + 8], saved.hidden.value)
                session.backward(hidden.square().mean())
                saved.hidden.value = hidden.reshape(shape)
            optimizer.step()
            if read_outside:
                _ = saved.hidden.value
    return str(saved.hidden.rows.tolist())


def test_a_value_of_each_micro_batch_is_carried_and_resumed(tmp_path: Path) -> None:
    whole = carry(tmp_path / "whole", 6)
    carry(tmp_path / "resumed", 3)
    assert carry(tmp_path / "resumed", 6) == whole
    assert carry(tmp_path / "one step", 1) != whole


def test_a_value_of_each_micro_batch_is_refused_outside_of_the_loop_and_with_another_shape(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="there is a value only in the micro-batch loop"):
        carry(tmp_path / "outside", 1, read_outside=True)
    with pytest.raises(
        UsageError,
        match=r"the value of micro-batch 0 is torch\.float32 \(4, 8\), the initial one torch\.float32 \(8, 4\)",
    ):
        carry(tmp_path / "shape", 1, shape=(4, 8))


def test_a_value_of_each_micro_batch_belongs_into_the_checkpoint(tmp_path: Path) -> None:
    cell = nn.RNNCell(4, 4)
    with Session(tmp_path, micro_batches=3) as session:
        session.prepare(cell, torch.optim.SGD(cell.parameters(), lr=0.1))
        session.per_micro_batch(torch.zeros(8, 4))
        with pytest.raises(UsageError, match=r"session\.state has not received a per_micro_batch"):
            next(session.steps(1))
