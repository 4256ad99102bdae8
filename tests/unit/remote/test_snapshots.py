"""One owner at a time can put the next snapshot."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.object_store import Proxy

from lockstep.errors import CheckpointError, FencedError, StoreError, UsageError
from lockstep.files import add_checksum
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.snapshots import (
    Ownership,
    Snapshot,
    name_of,
    newest,
    parse_snapshot,
    refuse_unsafe_store,
    wait_until_silent,
)

FILES = {"run.json": (("a/1", 3),)}


def test_a_later_owner_fences_the_earlier_one(bucket: RunBucket) -> None:
    first = Ownership(bucket, "a", None)
    first.put(FILES)
    second = Ownership(bucket, "b", newest(bucket))
    assert second.newest.files == FILES
    with pytest.raises(FencedError, match="taken over"):
        first.put({})
    second.put({"metrics.jsonl": ()})
    stored = newest(bucket)
    assert stored and (stored.owner, stored.number, stored.files) == ("b", 4, {"metrics.jsonl": ()})


def test_one_of_many_starts_owns_the_run(bucket: RunBucket) -> None:
    before = Ownership(bucket, "a", None).newest

    def start(owner: str) -> str:
        try:
            return Ownership(bucket, owner, before).newest.owner
        except FencedError:
            return ""

    with ThreadPoolExecutor(6) as pool:
        winners = [owner for owner in pool.map(start, "bcdefg") if owner]
    stored = newest(bucket)
    assert stored and winners == [stored.owner]


@pytest.mark.parametrize("fault", ["lost", "torn", "503"])
def test_an_owner_survives_faults_of_its_own_put(
    fault: str, proxy: Proxy, bucket: RunBucket
) -> None:
    owner = Ownership(bucket, "a", None)
    faults = iter([fault, fault])
    proxy.fault = lambda method, path: next(faults, "") if method == "PUT" else ""
    for number in range(3):
        owner.put({str(number): ()})
    stored = newest(bucket)
    assert stored and stored.files == {"2": ()} and stored.number == owner.newest.number


def test_an_outage_of_a_put_that_arrived_is_no_other_owner(proxy: Proxy, bucket: RunBucket) -> None:
    owner = Ownership(bucket, "a", None)
    proxy.fault = lambda method, path: "lost" if method == "PUT" else "503"
    with pytest.raises(StoreError):
        owner.put(FILES)
    proxy.fault = lambda method, path: ""
    owner.put(FILES | {"x": ()})
    stored = newest(bucket)
    assert stored and stored.owner == "a" and set(stored.files) == {"run.json", "x"}


def test_a_number_that_is_free_again_belongs_to_nobody(bucket: RunBucket) -> None:
    late, later = Ownership(bucket, "a", None), Ownership(bucket, "b", newest(bucket))
    for _ in range(3):
        later.put(FILES)
    bucket.remove(*map(name_of, range(1, 5)))
    with pytest.raises(FencedError):
        late.put({})
    stored = newest(bucket)
    assert stored and stored.owner == "b"


def test_damaged_snapshots_are_skipped(bucket: RunBucket) -> None:
    owner = Ownership(bucket, "a", None)
    bucket.write(name_of(2), owner.newest.to_bytes()[:-20])
    assert newest(bucket) == owner.newest
    owner.put(FILES)
    assert owner.newest.number == 3 and newest(bucket) == owner.newest
    bucket.remove(name_of(1), name_of(3))
    with pytest.raises(CheckpointError, match="every snapshot"):
        newest(bucket)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
def test_a_snapshot_cannot_name_files_elsewhere(path: str) -> None:
    with pytest.raises(ValueError, match="files is"):
        parse_snapshot(Snapshot(1, "a", 1.0, {path: ()}).to_bytes())


WRONG = [
    ("number", "1"),
    ("number", -1),
    ("number", 10**400),
    ("number", True),
    ("owner", 5),
    ("owner", ""),
    ("owner", None),
    ("beat_s", float("inf")),
    ("beat_s", float("nan")),
    ("beat_s", "15"),
    ("beat_s", 0),
    ("beat_s", 10**400),
    ("files", []),
    ("files", {"a": [["a/1"]]}),
    ("files", {"a": [["a/1", "3"]]}),
    ("files", {"a": [["a/1", -3]]}),
    ("files", {"a": [["../../x", 3]]}),
    ("files", {"a": "blob"}),
    ("files", {"a": [], "a/b": []}),
    ("files", {"": []}),
    ("files", {"a//b": []}),
    ("files", {"a\0": []}),
    ("files", {"x" * 300: []}),
    ("files", {"\udcff": []}),
    ("released", "no"),
    ("released", 1),
    ("host", ["a"]),
    ("host", "a\x1b[31m"),
    ("pid", 1.5),
    ("generation", "1"),
    ("generation", None),
    ("format", "1"),
    ("color", "red"),
]


def changed_snapshot(number: int, name: str, value: object) -> bytes:
    """Return a snapshot with another value and a checksum that fits."""
    fields = json.loads(Snapshot(number, "a", 1.0, {}).to_bytes()) | {name: value}
    del fields["sha256"]
    return json.dumps(add_checksum(fields)).encode()


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_whole_snapshot_with_a_wrong_value_is_damaged(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is |digits|lone surrogate"):
        parse_snapshot(changed_snapshot(2, name, value))


@pytest.mark.parametrize(
    ("name", "value"), [("beat_s", float("inf")), ("files", {"a": [["a/1", "3"]]}), ("owner", 5)]
)
def test_a_wrong_value_is_named_and_its_number_is_skipped(
    name: str, value: object, bucket: RunBucket
) -> None:
    owner = Ownership(bucket, "a", None)
    bucket.write(name_of(2), changed_snapshot(2, name, value))
    with pytest.raises(CheckpointError, match=f"snapshot 2 is damaged: {name} is"):
        newest(bucket)
    owner.put(FILES)
    assert newest(bucket) == owner.newest and owner.newest.number == 3


def test_a_changed_snapshot_is_no_torn_upload(
    bucket: RunBucket, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Ownership(bucket, "a", None)
    owner.put(FILES)
    content = bucket.read(name_of(2))
    bucket.write(name_of(2), content.replace(b"run.json", b"rum.json"))
    with pytest.raises(CheckpointError, match="snapshot 2 is damaged: its checksum does not fit"):
        newest(bucket)
    bucket.write(name_of(2), content[:-30])
    stored = newest(bucket, warns=True)
    assert stored and stored.number == 1 and "snapshot 2 is damaged and is skipped" in caplog.text
    bucket.write(name_of(2), bucket.read(name_of(1)))
    with pytest.raises(CheckpointError, match="snapshot 2 is damaged: it holds snapshot 1"):
        newest(bucket)


def test_stray_objects_are_no_snapshots(bucket: RunBucket) -> None:
    for name in ("5", "notes.txt", "9999999999", "٣"):
        bucket.write(f"snapshots/{name}", b"stray")
    with pytest.raises(CheckpointError, match="every snapshot"):
        newest(bucket)
    owner = Ownership(bucket, "a", None)
    owner.put(FILES)
    assert newest(bucket) == owner.newest and owner.newest.number == 2


def test_blobs_without_snapshots_are_no_new_run(bucket: RunBucket) -> None:
    assert newest(bucket) is None
    bucket.write("blobs/a/1", b"x")
    with pytest.raises(CheckpointError, match="blobs of a run and no snapshot"):
        newest(bucket)


def test_a_snapshot_that_is_gone_at_once_was_not_put(
    bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Ownership(bucket, "a", None)
    read = bucket.create

    def put_and_delete(name: str, content: bytes) -> bytes:
        stored = read(name, content)
        bucket.remove(*bucket.list("snapshots"))
        return stored

    with (
        monkeypatch.context() as patch,
        pytest.raises(StoreError, match="snapshot 2 was stored, and was gone at once"),
    ):
        patch.setattr(bucket, "create", put_and_delete)
        owner.put(FILES)
    owner.put(FILES)
    assert newest(bucket) == owner.newest


def test_a_later_format_is_refused(bucket: RunBucket) -> None:
    value = json.loads(Snapshot(1, "a", 1.0, {}).to_bytes()) | {"format": 2}
    del value["sha256"]
    bucket.write(name_of(1), json.dumps(add_checksum(value)).encode())
    with pytest.raises(CheckpointError, match="newer version"):
        newest(bucket)


def test_a_run_that_trains_is_not_taken_over(bucket: RunBucket) -> None:
    owner, ended = Ownership(bucket, "a", None), threading.Event()

    def train() -> None:
        while not ended.wait(0.1):
            owner.put(FILES)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        with pytest.raises(UsageError, match="already running"):
            wait_until_silent(bucket, owner.newest)
    finally:
        ended.set()
        thread.join()
    start_s = time.monotonic()
    silent = wait_until_silent(bucket, owner.newest)
    assert silent == owner.newest and time.monotonic() - start_s > 5 * silent.beat_s
    owner.put(FILES, released=True)
    assert wait_until_silent(bucket, silent).released


def test_a_store_without_conditional_puts_is_refused(
    bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_unsafe_store(bucket)
    assert bucket.list("probes") == []
    store = bucket._store
    monkeypatch.setattr(bucket, "_store", Unconditional(store))
    with pytest.raises(StoreError, match="If-None-Match"):
        refuse_unsafe_store(bucket)


class Unconditional:
    """A store that ignores the condition of a put, as some older servers do."""

    def __init__(self, store: object) -> None:
        self.store = store

    def put(self, name: str, content: bytes, mode: str = "", **options: object) -> object:
        return self.store.put(name, content, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


@pytest.mark.parametrize("text", ["0", "-1", "often", "1e9", "nan"])
def test_a_wrong_beat_is_refused(
    text: str, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_STORE_BEAT_S", text)
    with pytest.raises(UsageError, match="LOCKSTEP_STORE_BEAT_S"):
        Ownership(bucket, "a", None)
