"""A folder on a disk and one in an object store: the same verbs, the same faults, the same errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from support.object_store import Proxy

from lockstep.object_store.bucket import RunBucket
from lockstep.object_store.storage import DiskStorage, Storage

# A fault -> how it shows on each: an error number of the disk, a fault of the proxy.
REFUSING = {"full": (errno.ENOSPC, "503"), "broken": (errno.EIO, "cut")}


class Faults:
    """A storage, and a way to inject faults into it."""

    def __init__(self, storage: Storage, proxy: Proxy) -> None:
        self.storage, self.proxy = storage, proxy

    @contextmanager
    def refusing(self, fault: str) -> Iterator[None]:
        """Let every write fail."""
        number, reply = REFUSING[fault]
        self.proxy.fault = lambda method, path: reply if method != "GET" else ""
        error = OSError(number, os.strerror(number))
        with mock.patch("os.fsync", side_effect=error), mock.patch("os.open", fail_to_write(error)):
            yield
        self.proxy.fault = lambda method, path: ""

    @contextmanager
    def losing_the_reply(self) -> Iterator[None]:
        """Let a creation succeed, and report a failure: link(2) over NFS, PUT."""
        self.proxy.fault = lambda method, path: "lost" if method == "PUT" else ""
        link = os.link

        def link_and_fail(*paths: Path) -> None:
            link(*paths)
            raise FileExistsError(errno.EEXIST, "File exists")

        with mock.patch("os.link", link_and_fail):
            yield
        self.proxy.fault = lambda method, path: ""


def fail_to_write(error: OSError) -> Callable[..., int]:
    open_file = os.open

    def fail(path: str, flags: int, *mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise error
        return open_file(path, flags, *mode)

    return fail


@pytest.fixture(params=["disk", "store"])
def faults(
    request: pytest.FixtureRequest, tmp_path: Path, bucket: RunBucket, proxy: Proxy
) -> Faults:
    (tmp_path / "folder").mkdir()
    return Faults(
        DiskStorage(tmp_path / "folder")
        if request.param == "disk"
        else RunBucket(bucket.address, "membership/folder", waits=False),
        proxy,
    )


@pytest.fixture
def storage(faults: Faults) -> Storage:
    return faults.storage


def test_the_first_creation_of_a_name_wins(storage: Storage) -> None:
    assert storage.create("1.json", b"first") == b"first"
    assert storage.create("1.json", b"second") == storage.read("1.json") == b"first"


def test_one_of_many_creations_wins(storage: Storage) -> None:
    with ThreadPoolExecutor(8) as pool:
        winners = set(pool.map(lambda k: storage.create("1.json", str(k).encode()), range(8)))
    assert winners == {storage.read("1.json")}


def test_a_written_file_is_replaced(storage: Storage) -> None:
    for content in (b"a longer text", b"\xff"):
        storage.write("a.sign", content)
        assert storage.read("a.sign") == content


def test_a_missing_file_is_told_from_a_failure(storage: Storage) -> None:
    assert not storage.exists("1.json")
    with pytest.raises(FileNotFoundError):
        storage.read("1.json")
    storage.remove("1.json")
    storage.create("1.json", b"")
    assert storage.exists("1.json") and storage.read("1.json") == b""


def test_names_are_those_of_the_folder_itself(storage: Storage) -> None:
    assert list(storage.names()) == []
    for name in ("2.json", "1.json", "archive/0.json"):
        storage.create(name, name.encode())
    assert list(storage.names()) == ["1.json", "2.json", "archive"]
    assert storage.read("archive/0.json") == b"archive/0.json"
    storage.remove("1.json", "archive/0.json")
    assert "1.json" not in storage.names() and not storage.exists("archive/0.json")


@pytest.mark.parametrize("fault", REFUSING)
def test_a_refused_write_is_an_os_error_and_changes_nothing(fault: str, faults: Faults) -> None:
    storage = faults.storage
    storage.create("1.json", b"first")
    with faults.refusing(fault):
        for write in (storage.create, storage.write):
            with pytest.raises(OSError, match=r"was not|No space|Input") as caught:
                write("2.json", b"second")
            assert not isinstance(caught.value, FileNotFoundError)
    assert list(storage.names()) == ["1.json"] and storage.read("1.json") == b"first"
    assert storage.create("2.json", b"second") == b"second"


def test_a_creation_whose_reply_is_lost_has_won(faults: Faults) -> None:
    with faults.losing_the_reply():
        assert faults.storage.create("1.json", b"mine") == b"mine"
    assert faults.storage.create("1.json", b"other") == b"mine"


@pytest.mark.parametrize("fault", ["torn", "killed"])
def test_a_torn_write_leaves_no_half_of_a_created_file(fault: str, faults: Faults) -> None:
    """On a disk the process dies before the name exists; in a store the body arrives in part."""
    storage, torn = faults.storage, []

    def tear(method: str, path: str) -> str:
        torn.append(path)
        return "torn" if method == "PUT" and len(torn) == 1 else ""

    if fault == "torn":
        faults.proxy.fault = tear
        storage.write("a.sign", b"a text of some length")
        assert storage.read("a.sign") == b"a text of some length"
        return
    with mock.patch("os.link", side_effect=KeyboardInterrupt):
        if isinstance(storage, DiskStorage):
            with pytest.raises(KeyboardInterrupt):
                storage.create("1.json", b"first")
            assert list(storage.names()) == []
    assert storage.create("1.json", b"second") == b"second"


def test_a_missing_folder_on_a_disk_is_not_created(tmp_path: Path) -> None:
    gone = DiskStorage(tmp_path / "gone")
    for name in ("1.json", "archive/1.json"):
        with pytest.raises(FileNotFoundError):
            gone.create(name, b"")
    with pytest.raises(FileNotFoundError):
        gone.names()
    assert not gone.path.exists()
