"""The files of a checkpoint on the disk: exact content, hash in the same pass, no page cache."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.checkpoint.commit import PIECE_BYTES, set_direct, write_all, write_file


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        4096,
        PIECE_BYTES - 1,
        PIECE_BYTES,
        PIECE_BYTES + 1,
        3 * PIECE_BYTES,
        3 * PIECE_BYTES + 777,
    ],
)
def test_any_size_in_any_chunks_is_written_and_hashed(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    for chunk_bytes in (size or 1, 1_234_567, PIECE_BYTES):
        places: list[str] = []
        chunks = [content[start : start + chunk_bytes] for start in range(0, size, chunk_bytes)]
        path = tmp_path / f"file-{chunk_bytes}"
        record = write_file(path, [b"", *chunks], places.append)
        assert path.read_bytes() == content
        assert (record.bytes, record.sha256) == (size, hashlib.sha256(content).hexdigest())
        assert places == [f"in {path.name}"]
        path.unlink()


def test_whole_pieces_are_not_in_the_page_cache(tmp_path: Path) -> None:
    """A read that may not wait for the disk finds nothing there."""
    with open(tmp_path / "probe", "xb", buffering=0) as file:
        if not set_direct(file, True):
            pytest.skip("this file system has no direct I/O")
    write_file(tmp_path / "file", [bytes(3 * PIECE_BYTES), b"rest"])
    assert list(cached(tmp_path / "file")) == [False, False, False, True]


def cached(path: Path) -> Iterator[bool]:
    """Yield for each piece of the file whether its first byte can be read without the disk."""
    with open(path, "rb", buffering=0) as file:
        for offset in range(0, path.stat().st_size, PIECE_BYTES):
            try:
                yield bool(os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT))
            except BlockingIOError:
                yield False


def test_write_that_the_file_system_refuses_goes_through_the_page_cache(tmp_path: Path) -> None:
    """Direct I/O refuses memory, lengths and offsets that are not aligned: EINVAL."""
    data = np.frombuffer(random.Random(1).randbytes(100_001), np.uint8)[1:]
    with open(tmp_path / "file", "xb", buffering=0) as file:
        set_direct(file, True)
        write_all(file, data)
        assert not set_direct(file, False)
        write_all(file, data)
    assert (tmp_path / "file").read_bytes() == data.tobytes() * 2


def test_other_write_errors_are_raised(tmp_path: Path) -> None:
    with (
        open("/dev/full", "wb", buffering=0) as file,
        pytest.raises(OSError, match="No space left"),
    ):
        write_all(file, np.zeros(10, np.uint8))
