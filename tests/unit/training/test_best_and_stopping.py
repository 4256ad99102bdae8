"""Best and EarlyStopping: which scores are better, and what their state restores."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.record.events import read_events
from lockstep.training.scores import Best, EarlyStopping, ScoredRun

NAN = math.nan


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
    best = Best(mode)
    told = [best.update(number, value) for number, value in enumerate(scores)]
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
        resumed.load_state_dict(stopping.state_dict())
        stopping = resumed
        told.append(stopping.update(score))
    assert told == [stops_after is not None and i + 1 >= stops_after for i in range(len(scores))]


def test_a_higher_patience_goes_on() -> None:
    stopping = EarlyStopping(1)
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


@pytest.mark.parametrize("leader", [True, False])
def test_the_leader_records_why_a_run_stops(tmp_path: Path, leader: bool) -> None:
    best, stopping = Best(), EarlyStopping(1)
    run = ScoredRun(tmp_path, [object(), best, stopping], lambda: leader)
    assert run.end(1) == run.why() == "" and run.best_steps() == []
    for step, score in enumerate((1.0, 2.0)):
        best.update(step, score)
        stopping.update(score)
    assert run.best_steps() == [1]
    assert run.end(2) == "no score better than 1.0 in 1"
    assert [event["step"] for event in read_events(tmp_path)] == [2] * leader
