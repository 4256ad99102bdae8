"""A host continues its own copy, or downloads the newest snapshot; a damaged blob is never used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import checkpoints
from support.object_store import Proxy

from lockstep.checkpoint.commands import verify
from lockstep.elastic.generation_log import Generation, GenerationLog
from lockstep.errors import CheckpointError, DamagedFileError, FencedError, UsageError
from lockstep.object_store.bucket import RunBucket
from lockstep.remote import upload
from lockstep.remote.download import download
from lockstep.remote.snapshots import BLOBS, Ownership, newest, steps_of
from lockstep.remote.upload import Mirror
from lockstep.remote.working_copy import owned_copy

Host = Callable[[str], Mirror]


def train(mirror: Mirror, *steps: int, released: bool = True) -> None:
    for step in steps:
        checkpoints.save(mirror.folder / "checkpoints", step)
    (mirror.folder / "metrics.jsonl").write_text(f"until {steps[-1]}")
    assert mirror.publish(released=released)


def test_another_host_continues_from_the_newest_snapshot(host: Host, bucket: RunBucket) -> None:
    first = host("a")
    (first.folder / "generations").mkdir()
    GenerationLog(first.folder / "generations").propose(Generation(1, "t", (), "", 0, "start"))
    train(first, 10, 20)
    second = host("b")
    assert (
        second.folder != first.folder
        and (second.folder / "metrics.jsonl").read_text() == "until 20"
    )
    assert verify(second.folder) == (True, ["step 10 is whole", "step 20 is whole"])
    last = GenerationLog(second.folder / "generations").newest()
    assert last.number == 2 and last.end  # no worker waits for members of the other cluster
    train(second, 30)
    assert second.uploaded_bytes < 2000  # the blobs of steps 10 and 20 stay


def test_the_same_host_continues_its_copy_although_it_was_killed(
    host: Host, bucket: RunBucket
) -> None:
    first = host("a")
    train(first, 10, released=False)
    checkpoints.save(first.folder / "checkpoints", 20)  # not uploaded before the kill
    again = host("a")
    assert again.folder == first.folder and again.publish()
    stored = newest(bucket)
    assert stored and steps_of(stored.files) == [10, 20]


def test_a_host_that_was_killed_before_its_first_snapshot_still_owns_its_copy(
    host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = host("a")
    train(first, 10, released=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Ownership, "put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        host("a")
    assert host("a").folder == first.folder and not list(first.folder.parent.glob("*.old*"))


def test_a_first_start_that_failed_can_be_repeated(
    host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="LOCKSTEP_STORE_BEAT_S"):
        patch.setenv("LOCKSTEP_STORE_BEAT_S", "often")
        host("a")
    train(host("a"), 10)
    assert newest(bucket)


def test_a_copy_that_was_overtaken_is_set_aside(
    host: Host, bucket: RunBucket, caplog: pytest.LogCaptureFixture
) -> None:
    first = host("a")
    train(first, 10)
    checkpoints.save(first.folder / "checkpoints", 15)  # never uploaded
    train(host("b"), 20)
    again = host("a")
    assert verify(again.folder)[1] == ["step 10 is whole", "step 20 is whole"]
    assert verify(Path(f"{first.folder}.old"))[1] == ["step 10 is whole", "step 15 is whole"]
    assert "set aside" in caplog.text


def test_a_silent_host_is_overtaken(host: Host, bucket: RunBucket) -> None:
    train(first := host("a"), 10, released=False)
    second = host("b")
    with pytest.raises(FencedError, match="taken over"):
        first.publish()
    assert steps_of(second.ownership.newest.files) == [10]


def test_a_damaged_checkpoint_is_left_out(
    host: Host, bucket: RunBucket, caplog: pytest.LogCaptureFixture
) -> None:
    train(first := host("a"), 10, 20)
    blob = blob_of(first, "checkpoints/step-00000020/tensors-00000.safetensors")
    bucket.write(blob, bucket.read(blob)[:-1] + b"\xff")
    second = host("b")
    assert (
        verify(second.folder) == (True, ["step 10 is whole"])
        and "step-00000020 is damaged" in caplog.text
    )
    assert sorted(path.name for path in (second.folder / "checkpoints").iterdir()) == [
        "step-00000010"
    ]


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_without_a_whole_checkpoint_nothing_starts(
    damage: str, host: Host, bucket: RunBucket
) -> None:
    train(first := host("a"), 10)
    blob = blob_of(first, "checkpoints/step-00000010/tensors-00000.safetensors")
    if damage == "missing":
        bucket.remove(blob)
    else:
        bucket.write(blob, b"other")
    with pytest.raises(CheckpointError, match="no checkpoint in the store is whole"):
        host("b")
    stored = newest(bucket)
    assert stored and stored.owner == first.ownership.newest.owner  # the run was not taken over


def test_a_damaged_file_of_the_run_is_an_error(host: Host, bucket: RunBucket) -> None:
    train(first := host("a"), 10)
    bucket.write(blob_of(first, "metrics.jsonl"), b"other")
    with pytest.raises(DamagedFileError, match="blob"):
        host("b")


def test_a_flipped_byte_on_the_way_is_read_again(
    proxy: Proxy, host: Host, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(host("a"), 10)
    get, flipped = bucket.read, []

    def flip_once(name: str) -> bytes:
        content = get(name)
        if name.startswith(BLOBS) and not flipped:
            flipped.append(name)
            return bytes([content[0] ^ 1]) + content[1:]
        return content

    monkeypatch.setattr(bucket, "read", flip_once)
    assert verify(host("b").folder) == (True, ["step 10 is whole"]) and flipped


def test_a_reader_takes_the_newer_snapshot_when_its_own_is_deleted(
    host: Host, bucket: RunBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(mirror := host("a"), 10)
    before = newest(bucket)
    assert before
    (mirror.folder / "checkpoints/step-00000010").rename(
        mirror.folder / "checkpoints/step-00000010.abandoned"
    )
    train(mirror, 20)
    monkeypatch.setattr(upload, "RETENTION_S", 0.0)
    mirror.retain()
    used, problems, _ = download(bucket, before, tmp_path / "reader")
    assert (
        used == newest(bucket)
        and not problems
        and verify(tmp_path / "reader") == (True, ["step 20 is whole"])
    )


def test_a_copy_has_one_owner_on_a_host(bucket: RunBucket) -> None:
    with (
        owned_copy(bucket, "a"),
        pytest.raises(UsageError, match="already running"),
        owned_copy(bucket, "a"),
    ):
        pass


def test_a_prefix_that_holds_something_else_is_refused(bucket: RunBucket, host: Host) -> None:
    bucket.write("photos/cat.jpg", b"x")
    with pytest.raises(UsageError, match=r"holds no run, but 1 other names: photos"):
        host("a")
    assert bucket.list("snapshots") == []


def test_a_store_that_lost_the_run_is_not_filled_from_a_copy(bucket: RunBucket, host: Host) -> None:
    train(first := host("a"), 10)
    bucket.remove(*bucket.list("snapshots"), *bucket.list(BLOBS))
    with pytest.raises(UsageError, match="is empty, and this host has a copy"):
        host("a")
    assert steps_of(first.ownership.newest.files) == [10]


def blob_of(mirror: Mirror, path: str) -> str:
    return f"{BLOBS}/{mirror.ownership.newest.files[path][0][0]}"
