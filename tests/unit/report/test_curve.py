"""Curves in bounded memory."""

from __future__ import annotations

import math

import pytest

from lockstep.report.curve import BINS, Curve


@pytest.mark.parametrize("steps", [1, BINS, BINS + 1, 37_123])
def test_a_curve_has_a_bounded_size_and_keeps_spikes_and_sums(steps: int) -> None:
    curve, spike = Curve(), max(1, steps // 3)
    for step in range(1, steps + 1):
        curve.add(step, 1e6 if step == spike else float(step % 7))
    points = curve.points()
    assert (
        len(points) <= BINS
        and max(point[3] for point in points) == 1e6
        and curve.highest == (spike, 1e6)
    )
    assert math.isclose(
        curve.total, sum(1e6 if step == spike else step % 7 for step in range(1, steps + 1))
    )
    assert points[-1][0] <= steps, "a click would ask for a step that the run does not have"
    assert [point[0] for point in points] == sorted(point[0] for point in points) and abs(
        points[-1][0] - steps
    ) <= curve.width


def test_values_that_are_not_finite_are_counted_and_not_drawn() -> None:
    curve = Curve()
    for step, value in ((1, 2.0), (2, math.nan), (3, math.inf)):
        curve.add(step, value)
    assert (
        curve.points() == [(1.0, 2.0, 2.0, 2.0)]
        and curve.not_finite == (2, 2)
        and curve.last[0] == 3
    )
