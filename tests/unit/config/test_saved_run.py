"""RUN/run.json: its format number and its checksum."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.resolve import resolve
from lockstep.config.saved_run import read_run, to_json, write_run
from lockstep.errors import CheckpointError
from lockstep.files import add_checksum, write_json


@pytest.mark.parametrize("number", [None, 1, 3])
def test_a_run_folder_of_another_format_is_refused(tmp_path: Path, number: int | None) -> None:
    value = to_json(resolve()) | {"format": number}
    write_json(
        tmp_path / "run.json",
        add_checksum({key: item for key, item in value.items() if item is not None}),
    )
    with pytest.raises(
        CheckpointError, match=f"reads runs of format 2, not of format {number}"
    ) as caught:
        read_run(tmp_path)
    assert (
        str(tmp_path / "run.json") in caught.value.where and "another folder" in caught.value.hint
    )


def test_a_saved_run_is_read_back_and_a_damaged_one_refused(tmp_path: Path) -> None:
    assert read_run(tmp_path) is None
    resolved = resolve(None, {"seed": "3", "data.kind": "files", "data.train": "a,b"})
    write_run(tmp_path, resolved)
    assert read_run(tmp_path) == resolved
    path = tmp_path / "run.json"
    intact = path.read_text()
    for damaged in ('{"values": ', "[]", intact.replace('"seed": 3', '"seed": 4')):
        path.write_text(damaged)
        with pytest.raises(CheckpointError, match="is damaged or was edited"):
            read_run(tmp_path)
