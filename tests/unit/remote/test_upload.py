"""What a mirror uploads: whole checkpoints, files of one moment, no secrets; and what it deletes."""

from __future__ import annotations

import errno
import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints
from support.object_store import Proxy
from support.store_fixtures import stored, stored_steps

from lockstep.checkpoint.folder import committed_steps, retire, set_aside
from lockstep.cli import remote
from lockstep.errors import CheckpointError, FencedError, StoreError
from lockstep.object_store.bucket import RunBucket
from lockstep.remote import upload
from lockstep.remote.snapshots import BLOBS, Ownership, Snapshot, steps_of
from lockstep.remote.upload import Mirror

Host = Callable[[str], Mirror]


def content(bucket: RunBucket, snapshot: Snapshot, path: str) -> bytes:
    return b"".join(bucket.read(f"{BLOBS}/{name}") for name, _ in snapshot.files[path])


def save(mirror: Mirror, *steps: int) -> Path:
    """Save checkpoints; return the folder of the last one."""
    for step in steps:
        path = checkpoints.save(mirror.folder / "checkpoints", step)
    return path


def test_a_snapshot_has_the_run_without_what_belongs_to_this_host(
    host: Host, bucket: RunBucket
) -> None:
    mirror = host("a")
    save(mirror, 10)
    for name in (
        "run.json",
        "token",
        "run.lock",
        "data/corpus.bin",
        "waiting/a-0.json",
        "logs/a-0.log",
        ".hidden",
        "data/.part",
        "metrics.jsonl",
    ):
        (mirror.folder / name).parent.mkdir(exist_ok=True)
        (mirror.folder / name).write_text(name)
    (mirror.folder / "checkpoints/.step-00000011.0123456789abcdef").mkdir()
    (mirror.folder / "link").symlink_to("/etc/passwd")
    assert mirror.publish()
    files = stored(bucket).files
    own = {"run.json", "data/corpus.bin", "logs/a-0.log", "metrics.jsonl"}
    assert {path for path in files if not path.startswith("checkpoints/")} == own and steps_of(
        files
    ) == [10]
    assert content(bucket, stored(bucket), "data/corpus.bin") == b"data/corpus.bin"


def test_equal_bytes_are_uploaded_once(
    host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "GROWING_BLOB_BYTES", 1000)
    mirror = host("a")
    metrics = mirror.folder / "metrics.jsonl"
    metrics.write_bytes(bytes(range(250)) * 16)
    assert mirror.publish()
    assert mirror.uploaded_bytes == 1000
    with open(metrics, "ab") as file:
        file.write(b"x" * 10)
    assert mirror.publish()
    assert (
        mirror.uploaded_bytes == 1010
        and content(bucket, stored(bucket), "metrics.jsonl") == metrics.read_bytes()
    )


def test_a_run_through_faults_is_in_the_store_whole(
    proxy: Proxy, host: Host, bucket: RunBucket
) -> None:
    mirror, requests, faults = (
        host("a"),
        itertools.count(),
        itertools.cycle(["503", "slow", "torn", "cut", "lost"]),
    )

    def every_third(method: str, path: str) -> str:
        fault = next(faults) if next(requests) % 3 == 2 else ""
        return fault if fault != "torn" or method == "PUT" else ""

    proxy.fault = every_third
    for step in (10, 20, 30):
        save(mirror, step)
        mirror.poll()
    mirror.finish()
    proxy.fault = lambda method, path: ""
    snapshot = stored(bucket)
    assert len(proxy.faults) > 9 and snapshot.released and steps_of(snapshot.files) == [10, 20, 30]
    for path in snapshot.files:
        if not path.endswith(".jsonl"):
            assert content(bucket, snapshot, path) == (mirror.folder / path).read_bytes()


def test_an_outage_loses_nothing(
    proxy: Proxy, host: Host, bucket: RunBucket, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = host("a")
    proxy.fault = lambda method, path: "503"
    for step in (10, 20):
        save(mirror, step)
        mirror.poll()
    proxy.fault = lambda method, path: ""
    assert stored_steps(bucket) == []
    mirror.poll()
    assert stored_steps(bucket) == [10, 20]
    assert [record.levelname for record in caplog.records].count("WARNING") == 2  # out, and back


def test_a_checkpoint_is_not_listed_before_all_its_blobs_are_stored(
    proxy: Proxy, host: Host, bucket: RunBucket
) -> None:
    mirror = host("a")
    save(mirror, 10)
    proxy.fault = lambda method, path: "torn" if method == "PUT" and f"/{BLOBS}/" in path else ""
    mirror.poll()
    assert stored_steps(bucket) == []
    proxy.fault = lambda method, path: ""
    mirror.poll()
    assert stored_steps(bucket) == [10]


def test_a_checkpoint_that_is_damaged_after_it_was_verified_is_not_uploaded(
    host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = host("a")
    path = save(mirror, 10, 20)
    verify, damaged = upload.verify_listed_files, list[int]()

    def verify_and_damage(folder: Path, step: int) -> object:
        result = verify(folder, step)
        if step == 20 and not damaged:
            damaged.append((path / "tensors-00000.safetensors").write_bytes(b"other"))
        return result

    monkeypatch.setattr(upload, "verify_listed_files", verify_and_damage)
    for _ in range(2):
        mirror.list_s = 0.0
        mirror.poll()
    assert damaged and stored_steps(bucket) == [10]


def test_a_checkpoint_whose_disk_times_out_is_tried_again(
    host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = host("a")
    save(mirror, 10)

    def time_out(path: Path, step: int) -> object:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    with monkeypatch.context() as patch:
        patch.setattr(upload, "verify_listed_files", time_out)
        mirror.poll()
    assert stored_steps(bucket) == []
    mirror.poll()
    assert stored_steps(bucket) == [10]


def test_a_fenced_owner_ends_its_upload(
    proxy: Proxy, host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "GROWING_BLOB_BYTES", 1000)
    monkeypatch.setenv("LOCKSTEP_STORE_BEAT_S", "0.1")
    mirror, puts = host("a"), list[str]()
    later = Ownership(bucket, "later", stored(bucket))
    (mirror.folder / "notes.txt").write_bytes(os.urandom(100_000))

    def count(method: str, path: str) -> str:
        if f"/{BLOBS}/" in path:
            puts.append(path)
            time.sleep(0.5)
        return ""

    proxy.fault = count
    with pytest.raises(FencedError):
        mirror.publish()
    mirror.reader.shutdown()
    assert len(puts) < 50 and stored(bucket).owner == later.newest.owner


def test_a_damaged_checkpoint_of_this_host_is_not_uploaded(host: Host, bucket: RunBucket) -> None:
    mirror = host("a")
    path = save(mirror, 10, 20)
    tensors = path / "tensors-00000.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\xff")
    mirror.poll()
    assert stored_steps(bucket) == [10]
    set_aside(path, "damaged")
    save(mirror, 20)
    mirror.poll()
    assert stored_steps(bucket) == [10, 20]


def add_file(name: bytes) -> Callable[[Path], object]:
    return lambda folder: Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text("stray")


STRAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "not UTF-8": (add_file(b"caf\xe9.txt"), r"caf\\udce9.txt is omitted .* not UTF-8"),
    "a folder that is not UTF-8": (
        lambda folder: os.mkdir(os.fsencode(folder) + b"/caf\xe9"),
        "not UTF-8",
    ),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe"), "pipe is omitted .* a named pipe"),
    "in a checkpoint": (
        add_file(b"checkpoints/step-00000010/notes.txt"),
        "notes.txt is omitted .* manifest",
    ),
    "hidden, in a checkpoint": (
        add_file(b"checkpoints/step-00000010/.nfs01"),
        ".nfs01 is omitted .* manifest",
    ),
}


@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_file_is_omitted_with_one_warning(
    stray: str, host: Host, bucket: RunBucket, caplog: pytest.LogCaptureFixture
) -> None:
    add, warning = STRAYS[stray]
    mirror = host("a")
    save(mirror, 10)
    add(mirror.folder)
    mirror.poll()
    mirror.finish()
    assert set(stored(bucket).files) - {"events.jsonl"} == {
        f"checkpoints/step-00000010/{name}"
        for name in ("COMMITTED", "facts.json", "manifest.json", "tensors-00000.safetensors")
    }
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and re.search(warning, warnings[0])


def test_a_stray_file_that_always_changes_blocks_no_checkpoint(
    host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, numbers = host("a"), itertools.count()
    save(mirror, 10)
    (mirror.folder / "data").mkdir()
    (mirror.folder / "data/prepared.json").write_text('{"files": {"train.bin": ""}}')
    (mirror.folder / "data/train.bin").write_bytes(b"rows")
    (mirror.folder / "data/notes.txt").write_text("stray")
    read = mirror._upload

    def upload_and_change(path: str) -> object:
        (mirror.folder / "data/notes.txt").write_text("x" * next(numbers))
        return read(path)

    monkeypatch.setattr(mirror, "_upload", upload_and_change)
    assert mirror.publish() and stored_steps(bucket) == [10]


def test_a_run_whose_prepared_data_is_gone_is_not_uploaded(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "FINAL_BEATS", 0)
    mirror = host("a")
    save(mirror, 10)
    (mirror.folder / "data").mkdir()
    (mirror.folder / "data/prepared.json").write_text('{"files": {"train.bin": ""}}')
    with pytest.raises(
        StoreError, match=r"was not uploaded: the run folder lacks its data: data/train\.bin"
    ):
        mirror.finish()


@pytest.mark.parametrize("loss", ["deleted", "truncated"])
def test_blobs_that_the_store_has_lost_are_uploaded_again(
    loss: str, host: Host, bucket: RunBucket, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = host("a")
    save(mirror, 10)
    (mirror.folder / "run.json").write_text("{}")
    mirror.poll()
    for name in bucket.list(BLOBS):
        bucket.write(name, bucket.read(name)[:-1])
        if loss == "deleted":
            bucket.remove(name)
    mirror.list_s = 0.0
    assert mirror.publish()
    snapshot = stored(bucket)
    for path in snapshot.files:
        assert content(bucket, snapshot, path) == (mirror.folder / path).read_bytes()
    assert (
        "blobs of s3://runs/team/first are gone from the store, and are uploaded again"
        in caplog.text
    )


def test_the_end_finds_blobs_that_were_never_stored(
    proxy: Proxy, host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "FINAL_BEATS", 1)
    mirror = host("a")
    save(mirror, 10)
    proxy.fault = lambda method, path: (
        "swallowed" if method == "PUT" and f"/{BLOBS}/" in path else ""
    )
    with pytest.raises(StoreError, match="blobs are missing right after their upload"):
        mirror.finish()
    assert stored_steps(bucket) == []


def test_the_end_of_a_run_whose_last_checkpoint_is_damaged_here_is_an_error(
    host: Host, bucket: RunBucket
) -> None:
    mirror = host("a")
    path = save(mirror, 10, 20)
    (path / "tensors-00000.safetensors").write_bytes(b"other")
    with pytest.raises(
        CheckpointError,
        match="step 20 is damaged or unreadable on this host, so it is not in the store",
    ):
        mirror.finish()
    assert stored_steps(bucket) == [10] and stored(bucket).released


@pytest.mark.parametrize(
    "failure",
    [ValueError("x"), IndexError("x"), MemoryError(), PermissionError(13, "Permission denied")],
)
def test_a_failed_mirror_is_the_exit_code(
    failure: Exception,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also of a type that nothing expects, and also when the run itself has exited with 75: saved."""
    monkeypatch.setattr(upload, "FINAL_BEATS", 1)
    monkeypatch.setattr(remote, "POLL_S", 0.05)
    mirror, polls = host("a"), list[float]()

    def fail(**_: object) -> bool:
        polls.append(time.monotonic())
        raise failure

    monkeypatch.setattr(mirror, "publish", fail)
    save(mirror, 10)
    for code in (0, 75, 4):
        monkeypatch.setattr(remote, "CHILD", f"import sys, time; time.sleep(0.3); sys.exit({code})")
        assert remote.run_mirrored(mirror, [], signal.SIGTERM) == (4 if code == 4 else 3)
    assert len(polls) > 6 and "Error: " in capsys.readouterr().err


def test_no_snapshot_mixes_two_moments(
    host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes back to step 10 while its files are read: step 20 is set aside, then the metrics are truncated."""
    mirror = host("a")
    save(mirror, 10, 20)
    metrics = mirror.folder / "metrics.jsonl"
    metrics.write_text("20 lines")
    read, went_back = mirror._upload, []

    def upload_and_go_back(path: str) -> object:
        if path == "metrics.jsonl" and not went_back:
            went_back.append(set_aside(mirror.folder / "checkpoints/step-00000020", "abandoned"))
            metrics.write_text("10 lines")
        return read(path)

    monkeypatch.setattr(mirror, "_upload", upload_and_go_back)
    assert not mirror.publish() and stored(bucket).files == {}
    assert mirror.publish() and stored_steps(bucket) == [10]
    assert content(bucket, stored(bucket), "metrics.jsonl") == b"10 lines"


def test_a_checkpoint_is_not_deleted_while_it_is_uploaded(
    proxy: Proxy, host: Host, bucket: RunBucket
) -> None:
    mirror, deleted = host("a"), []
    folder = mirror.folder / "checkpoints"
    checkpoints.save(folder, 10)

    def retire_now(method: str, path: str) -> str:
        if f"/{BLOBS}/" in path:
            deleted.append(retire(folder, 10))
        return ""

    proxy.fault = retire_now
    mirror.poll()
    assert deleted and not any(deleted) and stored_steps(bucket) == [10]
    proxy.fault = lambda method, path: ""
    assert retire(folder, 10) and mirror.publish() and stored_steps(bucket) == []


def test_retention_deletes_what_no_kept_snapshot_lists(
    host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = host("a")
    folder = mirror.folder / "checkpoints"
    bucket.write(f"{BLOBS}/{mirror.ownership.newest.owner}/orphan", b"of an upload that was killed")
    checkpoints.save(folder, 10)
    mirror.poll()
    assert not any(name.endswith("orphan") for name in bucket.list(BLOBS))
    before = stored(bucket)
    checkpoints.save(folder, 20)
    retire(folder, 10)
    mirror.poll()
    assert stored_steps(bucket) == [20]
    assert all(content(bucket, before, path) for path in before.files)  # a reader may still use it
    monkeypatch.setattr(upload, "RETENTION_S", 0.0)
    mirror.retain()
    kept = {name.removeprefix(f"{BLOBS}/") for name in bucket.list(BLOBS)}
    assert kept == stored(bucket).blobs and len(bucket.list("snapshots")) == 1
    mirror.publish()
    assert all(content(bucket, stored(bucket), path) for path in stored(bucket).files)


def test_an_owner_that_was_overtaken_deletes_nothing_of_the_later_one(
    host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "RETENTION_S", 0.0)
    early = host("a")
    checkpoints.save(early.folder / "checkpoints", 10)
    assert early.publish()
    later = Mirror(early.folder, Ownership(bucket, "later", stored(bucket)))
    checkpoints.save(early.folder / "checkpoints", 20)
    assert later.publish()
    early.retain()
    assert all(content(bucket, stored(bucket), path) for path in stored(bucket).files)
    with pytest.raises(FencedError):
        early.publish()
    assert stored(bucket).owner == "later"


def test_beats_continue_during_a_long_upload(proxy: Proxy, host: Host, bucket: RunBucket) -> None:
    mirror = host("a")
    (mirror.folder / "data.bin").write_bytes(b"x")
    number, start_s = stored(bucket).number, time.monotonic()

    def slow_blobs(method: str, path: str) -> str:
        if f"/{BLOBS}/" in path:
            time.sleep(1.5)
        return ""

    proxy.fault = slow_blobs
    assert mirror.publish() and time.monotonic() - start_s > 1.5
    assert stored(bucket).number >= number + 2


def test_the_steps_of_a_folder_are_those_in_its_snapshot(
    host: Host, bucket: RunBucket, tmp_path: Path
) -> None:
    mirror = host("a")
    for step in (7, 123_456_789):
        save(mirror, step)
    mirror.publish()
    assert (
        stored_steps(bucket) == committed_steps(mirror.folder / "checkpoints") == [7, 123_456_789]
    )
