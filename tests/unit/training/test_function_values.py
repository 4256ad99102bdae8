"""Values of a user's function at a resume: refused, overridden, or free to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.stateful import Trained
from lockstep.errors import CheckpointError, UsageError
from lockstep.training.function_values import (
    NO_VALUES,
    FunctionValues,
    call_with,
    running,
    text_of,
)
from lockstep.training.trained_parameters import (
    apply_options,
    constructed_options,
    options_as_text,
)

OUT = Path("runs/own")


def changed(before: dict[str, Any], now: dict[str, Any], *overrides: str) -> dict[str, str]:
    facts = FunctionValues(before).saved()
    return FunctionValues(now, overrides).overridden(OUT, 3, facts, 40)


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("out", "runs/a", "runs/b"),
        ("folder", "runs/moved", str(OUT)),
        ("folder", "runs/moved", OUT),
        ("steps", 100, 200),
        ("max_epochs", 1, 2),
        ("patience", 3, 5),
        ("save_every", 10, 20),
        ("keep", 5, 3),
        ("track", "", "tensorboard"),
        ("shard", 1, 2),
    ],
)
def test_a_value_that_decides_no_bits_may_change(name: str, before: object, now: object) -> None:
    assert changed({name: before}, {name: now}) == {}


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("keep", 0.5, 0.9),  # not that of the Session
        ("warmup_steps", 10, 20),
        ("folder", "a", "b"),
        ("augment", True, False),
        ("lr", 1, 1.0),
    ],
)
def test_another_value_is_refused_with_both_and_accepted_with_override(
    name: str, before: object, now: object
) -> None:
    with pytest.raises(CheckpointError) as caught:
        changed({name: before, "seed": 1}, {name: now, "seed": 1})
    assert f"step 40 was trained with {name} = {before}," in caught.value.what
    assert f"this start has {name} = {now}" in caught.value.what
    assert caught.value.hint.endswith(f"--override {name}={now}")
    assert changed({name: before}, {name: now}, name) == {name: str(now)}


def test_an_override_of_one_value_does_not_accept_another() -> None:
    with pytest.raises(CheckpointError, match=r"trained with decay = 0.1, and"):
        changed({"lr": 1.0, "decay": 0.1}, {"lr": 2.0, "decay": 0.2}, "lr")


def test_a_parameter_that_one_side_lacks_is_not_compared() -> None:
    assert changed({"old": 1}, {"new": 2}) == {}
    assert FunctionValues({"lr": 1.0}).overridden(OUT, 3, {}, 4) == {}


def test_texts_are_the_same_in_each_process_and_hold_no_secrets() -> None:
    assert text_of(object()) == "<object object>"
    assert text_of({"b", "a"}) == "['a', 'b']"
    values = FunctionValues({"lr": 3e-4, "api_key": "x", "data": Path("a"), "out": "b"})
    assert values.texts() == {"lr": "0.0003", "api_key": "(hidden)", "data": "a", "out": "b"}
    assert values.shared() == {"--lr": "0.0003", "--api_key": "(hidden)"}


def test_only_a_function_that_is_running_has_values() -> None:
    seen = []
    values = FunctionValues({"lr": 1.0})
    call_with(lambda lr: seen.append(running()), values)
    assert seen == [values] and running() is NO_VALUES
    with pytest.raises(UsageError, match="no run to override"):
        FunctionValues({"lr": 1.0}, ["lr"]).refuse_new_run()


def test_options_that_are_constructed_as_before_keep_what_training_has_set() -> None:
    def optimizer(decay: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.ones(2)], lr=0.1, weight_decay=decay)

    before = options_as_text(constructed_options(Trained({}, [optimizer(0.0)], {})))
    resumed = optimizer(0.5)
    trained = Trained({}, [resumed], {})
    constructed = constructed_options(trained)
    resumed.param_groups[0].update(lr=0.025, weight_decay=0.0)  # as a checkpoint does
    apply_options(trained, constructed, before)
    group = resumed.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.025, 0.5)
