"""The generation log and the waiting room in an object store decide as those on a disk do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.object_store import Proxy

from lockstep.elastic import run_folder
from lockstep.elastic.generation_log import (
    NO_GENERATION,
    Generation,
    GenerationLog,
    Member,
    RunResult,
    open_generation_log,
)
from lockstep.errors import DamagedFileError
from lockstep.object_store.bucket import RunBucket
from lockstep.object_store.storage import STORE_FILE, shared_folder
from lockstep.remote.working_copy import copy_generations


@pytest.fixture
def hosts(bucket: RunBucket, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The working copies of two hosts."""
    copies = tmp_path / "a", tmp_path / "b"
    for copy in copies:
        (copy / "generations").mkdir(parents=True)
        (copy / "waiting").mkdir()
        (copy / STORE_FILE).write_text(json.dumps({"address": str(bucket.address)}))
    yield copies


def generation(number: int, token: str = "t") -> Generation:
    return Generation(number, token, (member(),), "10.0.0.1:1", 5, "start")


def member(id: str = "a/0/1234") -> Member:
    host, slot, _ = id.split("/")
    return Member(id, host, int(slot), 7, "10.0.0.1:2000")


def test_a_run_folder_without_an_address_has_its_log_on_the_disk(tmp_path: Path) -> None:
    log = open_generation_log(tmp_path)
    assert log.folder.is_shared_disk and log.folder.where == str(tmp_path / "generations")


def test_two_hosts_have_one_log(hosts: tuple[Path, Path]) -> None:
    first, second = map(open_generation_log, hosts)
    assert not first.folder.is_shared_disk and first.newest() == NO_GENERATION
    assert (
        first.propose(generation(1, "first")).token
        == second.propose(generation(1, "second")).token
        == "first"
    )
    assert (
        second.newest() == first.newest() == generation(1, "first")
        and second.newest(known=1) == NO_GENERATION
    )
    assert second.propose(generation(2)).number == 2
    newest = first.newest(known=1)
    assert newest.number == 2 and first.read(1).token == "first"
    assert not list(hosts[0].glob("generations/*"))


def test_one_of_many_proposals_wins(hosts: tuple[Path, Path]) -> None:
    logs = [open_generation_log(hosts[k % 2]) for k in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert (
            len(
                {
                    winner.token
                    for winner in pool.map(
                        lambda k: logs[k].propose(generation(1, str(k))), range(8)
                    )
                }
            )
            == 1
        )


def test_a_copy_gets_the_newest_generation_and_those_after_it(hosts: tuple[Path, Path]) -> None:
    log = open_generation_log(hosts[0])
    copy_generations(hosts[1])
    for number in (1, 2):
        log.propose(generation(number))
    copy_generations(hosts[1])
    for number in (3, 4):
        log.propose(generation(number))
    log.mark_untrusted(4, "replicas differ", {"step": 5, "what": "weights", "digests": {}})
    copy_generations(hosts[1])
    assert sorted(path.name for path in hosts[1].glob("generations/*")) == [
        "000002.json",
        "000003.json",
        "000004.json",
    ]
    assert GenerationLog(hosts[1] / "generations").newest() == generation(4)


def test_generations_from_a_million_on_are_in_order(hosts: tuple[Path, Path]) -> None:
    (hosts[0] / "on-disk" / "generations").mkdir(parents=True)
    for run in (hosts[0], hosts[0] / "on-disk"):
        log = open_generation_log(run)
        log.add(generation(999_998))
        for number in range(999_999, 1_000_003):
            assert log.propose(generation(number)).number == number
            copy_generations(hosts[1])
            for known in (0, number - 1):
                newest = open_generation_log(run).newest(known)
                assert newest.number == number
    newest = GenerationLog(hosts[1] / "generations").newest()
    assert newest.number == 1_000_002


def test_the_end_of_the_run_is_recorded_once(hosts: tuple[Path, Path]) -> None:
    first, second = map(open_generation_log, hosts)
    first.propose(generation(1))
    ends = [
        log.record_end(RunResult(code), "done", after=0) for code, log in ((0, first), (1, second))
    ]
    assert ends[0] == ends[1] and ends[0].number == 2 and ends[0].end == RunResult(0)


def test_distrust_of_one_host_reaches_the_other(hosts: tuple[Path, Path]) -> None:
    first, second = map(open_generation_log, hosts)
    assert second.untrusted_reason(1) == ""
    first.mark_untrusted(1, "replicas differ", {"step": 3, "what": "weights", "digests": {}})
    assert second.untrusted_reason(1) == "replicas differ"
    assert [facts["step"] for _, facts in second.divergence_records()] == [3]


def test_a_log_that_lost_a_generation_is_unavailable(
    hosts: tuple[Path, Path], bucket: RunBucket
) -> None:
    log = open_generation_log(hosts[0])
    log.propose(generation(1))
    log.propose(generation(2))
    bucket.remove(*bucket.list("membership/generations"))
    with pytest.raises(FileNotFoundError, match="lacks generation 2"):
        log.newest()
    with pytest.raises(FileNotFoundError):
        log.propose(generation(3))
    with pytest.raises(FileNotFoundError):
        open_generation_log(hosts[1], since=2).newest()


def test_a_damaged_generation_names_its_object(hosts: tuple[Path, Path], bucket: RunBucket) -> None:
    bucket.write("membership/generations/000001.json", b'{"number": 1')
    with pytest.raises(DamagedFileError, match=r"generation 1, is damaged") as caught:
        open_generation_log(hosts[0]).newest()
    assert str(bucket.address) in caught.value.where and str(bucket.address) in caught.value.hint


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_a_store_that_does_not_answer_is_an_unavailable_disk(
    fault: str, proxy: Proxy, hosts: tuple[Path, Path]
) -> None:
    log = open_generation_log(hosts[0])
    log.propose(generation(1))
    proxy.fault = lambda method, path: fault
    for call in (
        log.newest,
        lambda: log.propose(generation(2)),
        lambda: run_folder.open_waiting_room(hosts[0]).register(member()),
    ):
        with pytest.raises(OSError, match="was not"):
            call()
    proxy.fault = lambda method, path: ""
    assert log.propose(generation(2)).number == 2


@pytest.mark.parametrize("fault", ["lost", "slow"])
def test_a_proposal_whose_reply_is_lost_wins(
    fault: str, proxy: Proxy, hosts: tuple[Path, Path]
) -> None:
    proxy.fault = lambda method, path: fault if method == "PUT" else ""
    assert open_generation_log(hosts[0]).propose(generation(1, "mine")).token == "mine"


def test_hosts_meet_in_one_waiting_room(hosts: tuple[Path, Path]) -> None:
    first, second = hosts
    worker, other = member("a/0/1234"), member("b/1/5678")
    run_folder.open_waiting_room(first).register(worker)
    run_folder.open_waiting_room(second).register(other)
    assert (
        run_folder.open_waiting_room(first).members()
        == run_folder.open_waiting_room(second).members()
        == [worker, other]
    )
    run_folder.open_waiting_room(first).register(
        replaced := member("a/0/abcd")
    )  # its predecessor was killed
    assert run_folder.open_waiting_room(second).members() == [replaced, other]
    run_folder.open_waiting_room(first).write_liveness(replaced)
    before = run_folder.open_waiting_room(second).read_liveness([replaced, other])
    run_folder.open_waiting_room(first).write_liveness(replaced)
    assert (
        list(before) == ["a/0/abcd"]
        and run_folder.open_waiting_room(second).read_liveness([replaced, other]) != before
    )
    run_folder.open_waiting_room(first).unregister(replaced, with_liveness=True)
    assert run_folder.open_waiting_room(second).members() == [
        other
    ] and not run_folder.open_waiting_room(second).read_liveness([replaced])
    assert not list(first.glob("waiting/*"))


def test_a_damaged_address_is_an_error(hosts: tuple[Path, Path]) -> None:
    (hosts[0] / STORE_FILE).write_text('{"address": "gs://runs/first"}')
    with pytest.raises(DamagedFileError, match=r"store\.json is damaged"):
        shared_folder(hosts[0], "waiting")
