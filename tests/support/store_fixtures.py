"""One S3 server for the tests of a folder, behind a proxy; each test starts with an empty bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from support.object_store import Proxy, environment, make_bucket, s3_server

from lockstep.object_store.address import parse_address
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.snapshots import Snapshot, newest, steps_of


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def proxy(server: str, tmp_path: Path) -> Iterator[Proxy]:
    """The proxy, at which this process reaches the bucket `runs`."""
    make_bucket(server)
    with (
        Proxy(server) as proxy,
        mock.patch.dict(os.environ, environment(proxy.address, tmp_path / "copies")),
    ):
        yield proxy


@pytest.fixture
def bucket(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> RunBucket:
    monkeypatch.setattr("lockstep.object_store.bucket.RETRIES", {"max_retries": 2})
    address = parse_address("s3://runs/team/first")
    assert address
    return RunBucket(address)


def stored(bucket: RunBucket) -> Snapshot:
    """Return the newest snapshot."""
    snapshot = newest(bucket)
    assert snapshot
    return snapshot


def stored_steps(bucket: RunBucket) -> list[int]:
    """Return the steps of the checkpoints in the newest snapshot."""
    return steps_of(stored(bucket).files)
