"""A growing file of lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.record.metrics import LineFollower


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
    read = list(LineFollower(path, tail_bytes=tail_bytes).read())
    assert (
        read == [b"line %03d\n" % i for i in range(50)][50 - len(read) :]
        and len(read) == {9: 0, 12: 1, 1000: 50}[tail_bytes]
    )
