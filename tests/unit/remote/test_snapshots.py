"""One owner at a time can put the next snapshot."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.object_store import Proxy

from lockstep.errors import CheckpointError, FencedError, StoreError, UsageError
from lockstep.files import add_checksum
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.snapshots import Ownership, Snapshot, name_of, newest, refuse_unsafe_store, wait_until_silent

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
def test_an_owner_survives_faults_of_its_own_put(fault: str, proxy: Proxy, bucket: RunBucket) -> None:
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
    bucket.delete([name_of(number) for number in range(1, 5)])
    with pytest.raises(FencedError):
        late.put({})
    stored = newest(bucket)
    assert stored and stored.owner == "b"


def test_damaged_snapshots_are_skipped(bucket: RunBucket) -> None:
    owner = Ownership(bucket, "a", None)
    bucket.put(name_of(2), owner.newest.to_bytes()[:-20])
    assert newest(bucket) == owner.newest
    owner.put(FILES)
    assert owner.newest.number == 3 and newest(bucket) == owner.newest
    bucket.delete([name_of(1), name_of(3)])
    with pytest.raises(CheckpointError, match="every snapshot"):
        newest(bucket)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
def test_a_snapshot_cannot_name_files_elsewhere(path: str) -> None:
    assert Snapshot.from_bytes(replace(Snapshot(1, "a", 1.0, {}), files={path: ()}).to_bytes()) is None


def test_a_later_format_is_refused(bucket: RunBucket) -> None:
    value = json.loads(Snapshot(1, "a", 1.0, {}).to_bytes()) | {"format": 2}
    del value["sha256"]
    bucket.put(name_of(1), json.dumps(add_checksum(value)).encode())
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


def test_a_store_without_conditional_puts_is_refused(bucket: RunBucket, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_wrong_beat_is_refused(text: str, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_STORE_BEAT_S", text)
    with pytest.raises(UsageError, match="LOCKSTEP_STORE_BEAT_S"):
        Ownership(bucket, "a", None)
