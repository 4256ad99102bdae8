"""Writers of one checkpoint: writer 0 takes the files of the others as soon as their list is there."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep import files
from lockstep.checkpoint import shards
from lockstep.checkpoint.commit import Attempt
from lockstep.checkpoint.shards import ShardWriter


def writer(number: int) -> ShardWriter:
    return ShardWriter(number, 2, {}, lambda: 1, lambda: "")


def test_a_folder_that_writer_0_has_emptied_at_once_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = files.fsync_folder

    def flush_slowly(folder: Path) -> None:
        time.sleep(0.05)
        flush(folder)

    monkeypatch.setattr(shards, "POLL_S", 0.0)
    monkeypatch.setattr(files, "fsync_folder", flush_slowly)
    with ThreadPoolExecutor(1) as thread:
        for step in range(5):
            writing = thread.submit(
                writer(1).write, tmp_path, step, [(f"{step}.bin", [b"content"])]
            )
            with Attempt(tmp_path, step) as attempt:
                writer(0).collect(attempt, tmp_path, step)
                writing.result()
                assert (attempt.path / f"{step}.bin").read_bytes() == b"content"
                assert attempt.files[f"{step}.bin"].bytes == len(b"content")
    assert not list(tmp_path.glob(".part-*"))
