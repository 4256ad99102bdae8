"""Following a growing file, and curves of bounded size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lockstep.record.follow import BINS, Curve, LineFollower


def test_a_call_reads_only_the_whole_lines_that_are_new(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    follower = LineFollower(path)
    assert list(follower.read()) == []
    path.write_bytes(b"one\ntwo\nthr")
    assert list(follower.read()) == [b"one\n", b"two\n"] and follower.bytes_read == 8
    path.write_bytes(b"one\ntwo\nthree\n")
    assert list(follower.read()) == [b"three\n"] and follower.bytes_read == 14
    assert list(follower.read()) == [] and follower.bytes_read == 14


def test_a_shorter_file_is_read_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    follower = LineFollower(path)
    assert len(list(follower.read())) == 2
    path.write_bytes(b"new\n")
    assert list(follower.read()) == [b"new\n"]


@pytest.mark.parametrize("tail_bytes", [9, 12, 1000])
def test_the_tail_starts_at_a_line(tmp_path: Path, tail_bytes: int) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"line %03d\n" % i for i in range(50)))
    read = list(LineFollower(path, tail_bytes).read())
    assert (
        read == [b"line %03d\n" % i for i in range(50)][50 - len(read) :]
        and len(read) == {9: 0, 12: 1, 1000: 50}[tail_bytes]
    )


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
