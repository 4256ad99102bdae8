"""Where the time of a few steps goes, on made-up spans."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.training.profiler import Shares, Steps, covered, merged, shares


def test_steps_are_read_as_they_are_numbered_on_the_screen() -> None:
    assert Steps.parse("steps=10..12") == Steps(10, 12)
    assert Steps.parse("steps=7") == Steps(7, 7)
    for wrong in ("10..12", "steps=0..3", "steps=5..4", "steps=a", ""):
        with pytest.raises(UsageError, match="--profile"):
            Steps.parse(wrong)


def test_overlaps_count_once() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert covered([(0, 10), (2, 3), (9, 12)]) == 12
    assert covered([(4, 4), (5, 3)]) == 0


def test_communication_is_exposed_where_nothing_is_computed_and_the_parts_add_up_to_the_window() -> None:
    found = shares((0, 10), compute=[(0, 4), (3, 5), (8, 9)], wire=[(2, 7), (8.5, 8.7), (9.5, 20)])
    assert found == Shares(compute_s=6, exposed_s=2.5, idle_s=1.5)
    assert found.show() == "compute 6.000 s (60%), exposed communication 2.500 s (25%), idle 1.500 s (15%)"
    assert shares((0, 2), [], []) == Shares(0, 0, 2)
