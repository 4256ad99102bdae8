"""Files that are complete or absent."""

from __future__ import annotations

from pathlib import Path

from lockstep.files import open_unpublished, publish, remove_unpublished


def test_two_writers_of_a_file_never_change_each_other_s_bytes(tmp_path: Path) -> None:
    """A worker that was given up still prepares data while its successor starts to."""
    path = tmp_path / "ids"
    first = open_unpublished(path)
    first.write(b"whole")
    publish(first)
    second = open_unpublished(path)
    second.write(b"wh")
    second.flush()
    assert path.read_bytes() == b"whole"
    second.write(b"ole")
    publish(second)
    assert path.read_bytes() == b"whole" and [entry.name for entry in tmp_path.iterdir()] == ["ids"]
    left = open_unpublished(path)
    left.close()
    remove_unpublished(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["ids"]
