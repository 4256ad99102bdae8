"""The store of the tests of this folder, and hosts of a run in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from support.store_fixtures import bucket, proxy, server

from lockstep.object_store.bucket import RunBucket
from lockstep.remote.upload import Mirror
from lockstep.remote.working_copy import owned_copy

__all__ = ["bucket", "host", "proxy", "server"]


@pytest.fixture
def host(bucket: RunBucket, tmp_path: Path) -> Iterator[Callable[[str], Mirror]]:
    """Return a function that makes a host of a given name the owner of the run."""
    hosts: dict[str, ExitStack] = {}

    def own(name: str) -> Mirror:
        hosts.pop(name, ExitStack()).close()  # as if its process had exited
        hosts[name] = ExitStack()
        with mock.patch.dict(os.environ, {"LOCKSTEP_STORE_CACHE": str(tmp_path / name)}):
            return Mirror(*hosts[name].enter_context(owned_copy(bucket, name)))

    yield own
    for stack in hosts.values():
        stack.close()
