"""Best and EarlyStopping: which scores are better, and what their state restores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.checkpoint.folder import COMMITTED, folder_name
from lockstep.errors import UsageError
from lockstep.record.events import read_events
from lockstep.training.scores import Best, EarlyStopping, ScoredRun

NAN = math.nan


@dataclass
class Loop:
    """A loop whose micro-batches of `step` are done; None: they are not."""

    step: int | None
    updates: int = 0
    commit_steps: int = 1

    def trained_step(self) -> int | None:
        return self.step


@pytest.mark.parametrize(
    ("mode", "scores", "step", "score"),
    [
        ("min", [3.0, 2.0, 2.0, 5.0], 2, 2.0),
        ("max", [0.1, 0.4, 0.4, 0.3], 2, 0.4),
        ("min", [NAN, 4.0, NAN, 5.0], 2, 4.0),
        ("max", [NAN, NAN], None, None),
    ],
)
def test_best_is_the_first_step_with_the_best_score(
    mode: Any, scores: list[float], step: int | None, score: float | None
) -> None:
    best, told = Best(mode), list[bool]()
    for number, value in enumerate(scores):
        best.follow(Loop(number))
        told.append(best.update(number, value))
    assert (best.step, best.score) == (step, score)
    assert (
        told.index(True) == next(i for i, value in enumerate(scores) if value == value)
        if step
        else True
    )
    again = Best(mode)
    again.load_state_dict(best.state_dict())
    assert (again.step, again.score) == (step, score)


@pytest.mark.parametrize(
    ("options", "scores", "stops_after"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.0, 1.0, 1.0, 1.0], 6),
        ({"patience": 1, "mode": "max"}, [0.1, 0.2, 0.2], 3),
        ({"patience": 2, "min_delta": 0.5}, [3.0, 2.9, 2.8], 3),
        ({"patience": 2}, [NAN, NAN], 2),
        ({"patience": 2}, [1.0, 2.0, 0.5, 2.0], None),
    ],
)
def test_stops_after_so_many_scores_that_are_not_better(
    options: dict[str, Any], scores: list[float], stops_after: int | None
) -> None:
    stopping, told = EarlyStopping(**options), list[bool]()
    for score in scores:
        resumed = EarlyStopping(**options)
        resumed.follow(Loop(0))
        resumed.load_state_dict(stopping.state_dict())
        stopping = resumed
        told.append(stopping.update(score))
    assert told == [stops_after is not None and i + 1 >= stops_after for i in range(len(scores))]


def test_a_higher_patience_goes_on() -> None:
    stopping = EarlyStopping(1)
    stopping.follow(Loop(0))
    stopping.update(1.0)
    assert stopping.update(2.0)
    longer = EarlyStopping(2)
    longer.load_state_dict(stopping.state_dict())
    assert not longer.stops


@pytest.mark.parametrize(
    "make",
    [
        lambda: Best("highest"),  # type: ignore[arg-type]
        lambda: EarlyStopping(0),
        lambda: EarlyStopping(1, min_delta=NAN),
        lambda: EarlyStopping(1, "most"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(make: Any) -> None:
    with pytest.raises(UsageError, match=r"lockstep\.(Best|EarlyStopping)"):
        make()


def test_scores_that_would_have_no_effect_are_refused() -> None:
    for score in (Best(), EarlyStopping(2)):
        give = (
            partial(score.update, 3, 0.5) if isinstance(score, Best) else partial(score.update, 0.5)
        )
        with pytest.raises(UsageError, match=r"is not in session\.state"):
            give()
        score.follow(Loop(None))
        with pytest.raises(UsageError, match="before the micro-batches of the step"):
            give()
    best = Best()
    best.follow(Loop(4))
    with pytest.raises(UsageError, match="a score of step=3, and the loop has step=4"):
        best.update(3, 0.5)
    assert best.step is None


def run_of(folder: Path, leader: bool, loop: Loop, *state: object) -> ScoredRun:
    runtime: Any = SimpleNamespace(is_leader=lambda: leader, is_late=True)
    return ScoredRun(folder, state, runtime, loop)


@pytest.mark.parametrize("leader", [True, False])
def test_the_leader_records_why_a_run_stops(tmp_path: Path, leader: bool) -> None:
    stopping = EarlyStopping(1)
    run = run_of(tmp_path, leader, Loop(0), object(), stopping)
    assert run.end(1) == run.why() == ""
    for score in (1.0, 2.0):
        stopping.update(score)
    assert run.end(2) == "no score better than 1.0 in 1"
    assert [event["step"] for event in read_events(tmp_path)] == [2] * leader


def test_the_best_step_is_one_with_a_checkpoint(tmp_path: Path) -> None:
    """A best step whose save fails leaves the one before it protected and named."""
    best, loop = Best("max"), Loop(0)
    run = run_of(tmp_path, True, loop, best)
    for step, score in ((2, 0.5), (5, 0.7)):
        loop.step = step
        best.update(step, score)
        run.end(step + 1)
        assert run.is_best(step + 1)
        if step == 2:
            folder = tmp_path / "checkpoints" / folder_name(3)
            folder.mkdir(parents=True)
            (folder / COMMITTED).touch()
    assert run.best_steps() == [3]
    assert run.best_steps(saving=6) == [6]


def test_weights_that_are_updated_after_their_score_are_refused(tmp_path: Path) -> None:
    best, stopping, loop = Best(), EarlyStopping(3), Loop(4, updates=4)
    run = run_of(tmp_path, True, loop, best, stopping)
    stopping.update(0.5)
    loop.updates = 5
    assert run.end(5) == "", "a score that names no checkpoint may be one of the weights before"
    best.update(4, 0.5)
    loop.updates = 6
    with pytest.raises(UsageError, match="weights of step 5 were scored before they were updated"):
        run.end(5)
