"""The workers of a host hash a file once; a changed file is hashed again."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.waiting import wait_until

from lockstep.config.schema import DataOptions, TokenizerOptions
from lockstep.corpus.encoded_pairs import open_prepared, prepare
from lockstep.data.manifest import FileDigests
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import DataError
from lockstep.tasks.open import digests_on_host


def bytes_read() -> int:
    """Return how many bytes this process has read in all, by the kernel's count."""
    return int(Path("/proc/self/io").read_text().split()[1])


def open_and_count(runtime: ElasticRuntime, folder: Path, state: str) -> int:
    """Open prepared data as the workers of a host do; return the bytes that were read for it."""
    os.environ["LOCKSTEP_TMP"] = state
    digests = digests_on_host(runtime, folder)
    before = bytes_read()
    open_prepared(folder / "data", digests)
    return bytes_read() - before


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    prepare(
        DataOptions(pairs=20_000, held_out=40), TokenizerOptions(vocab_size=1000), folder / "data"
    )
    return folder


def test_workers_of_a_host_hash_prepared_data_once(prepared: Path, tmp_path: Path) -> None:
    """Each of them read and hashed all of it: four times the bytes."""
    size = sum(path.stat().st_size for path in (prepared / "data").iterdir())
    small = size // 4  # manifest, tokenizer, headers of the arrays, the digests themselves
    assert size > 1_000_000
    counts = sorted(run_ranks(open_and_count, 4, prepared, str(tmp_path)))
    assert max(counts[:3]) < small and size <= counts[3] < size + small
    again = sorted(run_ranks(open_and_count, 4, prepared, str(tmp_path)))
    assert size <= again[3] < size + small, "the next start hashes again"


def test_a_changed_file_is_hashed_again(tmp_path: Path) -> None:
    path, digests = tmp_path / "file", FileDigests(tmp_path / "digests.json", "start 1")
    path.write_bytes(b"some bytes")
    first = digests.of([path])[path]
    assert first == hashlib.sha256(b"some bytes").hexdigest() and digests.of([path]) == {
        path: first
    }
    times = path.stat()
    path.write_bytes(b"other byte")  # of equal length, with the old time of modification
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = digests.of([path])[path]
    assert second == hashlib.sha256(b"other byte").hexdigest()
    (tmp_path / "new").write_bytes(b"more bytes")
    os.replace(tmp_path / "new", path)
    assert digests.of([path])[path] == hashlib.sha256(b"more bytes").hexdigest()


@pytest.mark.parametrize("content", ["", "[]", '{"start": "start 1"}', None])
def test_damaged_digests_are_made_again(tmp_path: Path, content: str | None) -> None:
    path, digests = tmp_path / "file", FileDigests(tmp_path / "digests.json", "start 1")
    path.write_bytes(b"some bytes")
    right = digests.of([path])[path]
    text = (tmp_path / "digests.json").read_text()
    flipped = text.replace(right, right[:-1] + ("0" if right[-1] != "0" else "1"))
    (tmp_path / "digests.json").write_text(flipped if content is None else content)
    assert digests.of([path]) == {path: right}


def test_digests_of_another_start_are_not_used(tmp_path: Path) -> None:
    path, digests = tmp_path / "file", FileDigests(tmp_path / "digests.json", "start 1")
    path.write_bytes(bytes(3_000_000))
    digests.of([path])
    before = bytes_read()
    digests.of([path])
    assert bytes_read() - before < 10_000
    replace(digests, start="start 2").of([path])
    assert bytes_read() - before > 3_000_000


def test_damage_is_found_with_shared_digests(prepared: Path, tmp_path: Path) -> None:
    digests = FileDigests(tmp_path / "digests.json", "start 1")
    open_prepared(prepared / "data", digests)
    path = prepared / "data" / "train.source.00000.ids"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=r"train\.source\.00000\.ids is damaged"):
        open_prepared(prepared / "data", digests)
    path.write_bytes(content)
    open_prepared(prepared / "data", digests)


def test_a_worker_killed_while_it_hashes_does_not_block_the_others(tmp_path: Path) -> None:
    large, small, digests = (
        tmp_path / "large",
        tmp_path / "small",
        FileDigests(tmp_path / "digests.json", "start 1"),
    )
    small.write_bytes(b"some bytes")
    with open(large, "wb") as file:
        file.truncate(1 << 40)  # a hole: it occupies no disk, and hashing it takes many minutes
    program = (
        "import sys; from pathlib import Path; from lockstep.data.manifest import FileDigests\n"
    )
    program += f"FileDigests(Path({str(digests.path)!r}), 'start 1').of([Path({str(large)!r})])"
    with subprocess.Popen([sys.executable, "-c", program]) as hashing:
        wait_until(lambda: is_locked(tmp_path / "digests.lock"), "the lock", process=hashing)
        hashing.kill()
        start_s = time.monotonic()
        assert digests.of([small])[small] == hashlib.sha256(b"some bytes").hexdigest()
        assert time.monotonic() - start_s < 10


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_run_of_one_worker_leaves_no_state_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    runtime = ElasticRuntime(World(0, 1, 0, 1, "here", torch.device("cpu")))
    assert digests_on_host(runtime, tmp_path).path is None and not list(tmp_path.iterdir())
