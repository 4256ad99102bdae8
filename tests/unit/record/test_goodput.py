"""Goodput ledger: the categories always add up to the wall time."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.record.goodput import CATEGORIES, Ledger

categories = st.sampled_from(CATEGORIES)
seconds = st.floats(0, 1e6)
events = st.lists(
    st.one_of(
        st.tuples(st.just("switch"), categories, seconds),
        st.tuples(st.just("move"), st.tuples(categories, categories, st.floats(-10, 1e7)), seconds),
        st.tuples(st.just("lost"), seconds, seconds),
        st.tuples(st.just("summary"), st.none(), seconds),
        st.tuples(st.just("joined by another host"), st.floats(-1e9, 1e9), seconds),
        st.tuples(st.just("restarted"), st.floats(-1e3, 1e6), seconds),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(events, st.floats(-1e6, 1e6))
def test_categories_add_up_to_the_wall_time(
    events: list[tuple[str, object, float]], start_s: float
) -> None:
    now_s, wall_clock_s, elapsed_s = start_s, 1.8e9, 0.0
    ledger = Ledger(now_s)
    for event, facts, passed_s in events:
        now_s, wall_clock_s, elapsed_s = (
            now_s + passed_s,
            wall_clock_s + passed_s,
            elapsed_s + passed_s,
        )
        match event, facts:
            case "switch", category:
                category_before = ledger.category
                assert ledger.switch(category, now_s) == category_before  # type: ignore[arg-type]
            case "move", (source, target, amount):
                assert 0 <= ledger.move(source, target, amount, now_s) <= max(amount, 0)
            case "lost", amount:
                ledger.move("training", "lost", amount, now_s)  # type: ignore[arg-type]
            case "summary", _:
                ledger.summary(now_s)
            case "joined by another host", other_clock_s:
                value = json.loads(json.dumps(ledger.to_json(now_s, wall_clock_s)))
                now_s = other_clock_s  # type: ignore[assignment]
                ledger = Ledger.from_json(value, now_s, ledger.category)
            case "restarted", gap_s:
                value = json.loads(json.dumps(ledger.to_json(now_s, wall_clock_s)))
                wall_clock_s += gap_s  # type: ignore[operator]
                elapsed_s += max(0.0, gap_s)  # type: ignore[call-overload]
                now_s = 5.0
                ledger = Ledger.from_json(value, now_s, wall_clock_s=wall_clock_s)
    values = ledger.summary(now_s)
    assert all(value >= 0 for value in values.values())
    assert math.isclose(values["wall_s"], elapsed_s, rel_tol=1e-9, abs_tol=1e-4)
    assert math.isclose(math.fsum(values[f"{name}_s"] for name in CATEGORIES), values["wall_s"])
    assert 0 <= values["goodput"] <= 1 and ledger.describe(now_s).startswith("goodput")


def an_hour_with_a_failure() -> Ledger:
    ledger = Ledger(100.0)
    ledger.switch("training", 160.0)
    ledger.move("training", "communication", 72.0, 3000.0)
    ledger.move("training", "data", 36.0, 3000.0)
    category = ledger.switch("saving", 3000.0)
    ledger.switch(category, 3072.0)
    ledger.move("training", "lost", 5.0, 3600.0)  # the failed step started at 3595
    ledger.switch("regrouping", 3600.0)
    ledger.switch("training", 3600.3)
    return ledger


def test_describe() -> None:
    assert an_hour_with_a_failure().describe(3700.0) == (
        "goodput 93.2%: training 93.2%, exposed communication 2.0%, data wait 1.0%, saving 2.0%, lost work 0.1%, starting 1.7%, of 60 min"
    )


def test_summary_has_seconds_per_category() -> None:
    values = an_hour_with_a_failure().summary(3700.0)
    assert (
        values["wall_s"] == pytest.approx(3600)
        and values["lost_s"] == 5
        and values["starting_s"] == 60
    )
    assert (
        values["regrouping_s"] == pytest.approx(0.3) and values["down_s"] == values["other_s"] == 0
    )
    assert values["training_s"] == pytest.approx(3600 - 72 - 36 - 72 - 5 - 60 - 0.3)
    assert values["goodput"] == values["training_s"] / values["wall_s"]


def test_metrics() -> None:
    ledger = Ledger(0.0, "training")
    ledger.switch("regrouping", 3.0)
    assert ledger.metrics(4.0) == {
        "goodput": 0.75,
        "lost_seconds_so_far": 0.0,
        "regrouping_seconds_so_far": 1.0,
        "saving_seconds_so_far": 0.0,
        "down_seconds_so_far": 0.0,
    }


def test_no_category_becomes_negative() -> None:
    ledger = Ledger(0.0, "training")
    assert ledger.move("training", "communication", 9.0, 4.0) == 4.0
    assert ledger.move("training", "lost", 1.0, 4.0) == 0.0
    assert ledger.summary(4.0)["communication_s"] == 4.0


def test_restart_counts_the_gap_as_down() -> None:
    saved = an_hour_with_a_failure().to_json(3700.0, wall_clock_s=1.8e9)
    resumed = Ledger.from_json(saved, 12.0, wall_clock_s=1.8e9 + 8 * 3600)
    values = resumed.summary(72.0)
    assert (
        values["down_s"] == 8 * 3600
        and values["wall_s"] == pytest.approx(9 * 3600 + 60)
        and values["starting_s"] == 120
    )


def test_new_leader_with_a_wrong_clock_counts_no_gap() -> None:
    saved = an_hour_with_a_failure().to_json(3700.0, wall_clock_s=1.8e9)
    assert Ledger.from_json(saved, 9e9, "training").summary(9e9 + 1)["wall_s"] == pytest.approx(
        3601
    )
    set_back = Ledger.from_json(saved, 0.0, wall_clock_s=1.8e9 - 3600)
    assert set_back.summary(0.0)["wall_s"] == pytest.approx(3600)


def test_the_time_since_an_earlier_start_counts_as_down() -> None:
    saved = Ledger(0.0).to_json(1.0, wall_clock_s=100.0)
    assert Ledger.from_json(saved, 0.0, wall_clock_s=103.0).summary(0.0)["down_s"] == 3.0


def test_no_time_has_passed() -> None:
    assert Ledger(7.0).describe(7.0) == "goodput: no time has passed"
    assert Ledger(7.0).summary(7.0)["goodput"] == 0.0
    assert Ledger(7.0).summary(6.0)["wall_s"] == 0.0, "a clock that is set back adds nothing"


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"seconds": None},
        {"seconds": {"data": "x"}},
        {"seconds": {"data": -1}},
        {"seconds": {"data": "nan"}},
    ],
)
def test_invalid_json_is_rejected(value: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Ledger.from_json(value, 0.0)
