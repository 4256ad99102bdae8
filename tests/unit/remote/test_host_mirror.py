"""Hosts that share no disk: one publishes, the others follow, and the generation log decides which."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from support import checkpoints
from support.object_store import Proxy
from support.store_fixtures import stored, stored_steps

from lockstep.checkpoint.commands import verify
from lockstep.checkpoint.folder import committed_steps, folder_name, retire, set_aside
from lockstep.elastic.generation_log import (
    Generation,
    GenerationLog,
    Member,
    RunResult,
    open_generation_log,
)
from lockstep.elastic.run_folder import create_run_folder, read_token
from lockstep.errors import CheckpointError, DamagedFileError, StoreError, UsageError
from lockstep.object_store.bucket import RunBucket
from lockstep.remote import host_mirror, upload, working_copy
from lockstep.remote.host_mirror import HostMirror
from lockstep.remote.snapshots import newest
from lockstep.remote.upload import Mirror
from lockstep.remote.working_copy import (
    IDENTITY,
    copy_generations,
    fetch_checkpoint,
    joined_copy,
    owned_copy,
    refresh_copy,
    wait_until_published,
)

Start = Callable[[str], HostMirror]


@pytest.fixture
def start(bucket: RunBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that starts a host of a given name."""
    monkeypatch.setenv("LOCKSTEP_STORE_BEAT_S", "0.1")
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    hosts: dict[str, ExitStack] = {}

    def start(name: str) -> HostMirror:
        hosts.pop(name, ExitStack()).close()  # as if its process had exited
        hosts[name] = ExitStack()
        with mock.patch.dict("os.environ", {"LOCKSTEP_STORE_CACHE": str(tmp_path / name)}):
            copy, files = hosts[name].enter_context(joined_copy(bucket, name))
            return HostMirror(copy, bucket, name, files)

    yield start
    for stack in hosts.values():
        stack.close()


def form(host: HostMirror, number: int, *names: str) -> None:
    """Form a generation with one worker on each host, the first of which has rank 0."""
    members = tuple(Member(f"{name}/0/{number:04x}", name, 0, 7, "10.0.0.1:2000") for name in names)
    open_generation_log(host.folder).propose(
        Generation(number, f"t{number}", members, "", 0, "test")
    )


def start_pair(start: Start) -> tuple[HostMirror, HostMirror]:
    """Start two hosts, which form generation 1."""
    a, b = start("a"), start("b")
    form(a, 1, "a", "b")
    return a, b


def poll(*hosts: HostMirror) -> None:
    for host in hosts:
        copy_generations(host.folder)
        host.follower.next_s = 0.0
        host.poll()
        assert not host.problem


def train(host: HostMirror, *steps: int) -> None:
    """As rank 0: save checkpoints, and write metrics up to the last step."""
    for step in steps:
        checkpoints.save(host.folder / "checkpoints", step)
    (host.folder / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}}}\n' for step in range(1, steps[-1] + 1))
    )


def test_hosts_have_one_token_and_one_run_id(start: Start, bucket: RunBucket) -> None:
    a, b = start("a"), start("b")
    assert create_run_folder(a.folder, "a") == create_run_folder(b.folder, "b")
    assert read_token(a.folder) == read_token(b.folder) and a.folder != b.folder
    assert (a.folder / "run_id.json").read_text() == (b.folder / "run_id.json").read_text()
    assert (a.folder / "token").stat().st_mode & 0o777 == 0o600


def test_the_host_of_rank_0_publishes_and_the_others_follow(
    start: Start, bucket: RunBucket
) -> None:
    a, b = start("a"), start("b")
    poll(a, b)
    assert newest(bucket) is None
    form(a, 1, "a", "b")
    train(a, 10)
    (a.folder / "data").mkdir()
    (a.folder / "data/text.bin").write_text("large")
    poll(a, b)
    assert stored_steps(bucket) == [10] and stored(bucket).generation == 1
    assert (b.folder / "metrics.jsonl").read_bytes() == (a.folder / "metrics.jsonl").read_bytes()
    assert not committed_steps(b.folder / "checkpoints") and not (b.folder / "data").exists()
    assert {"token", "store.json"} & stored(bucket).files.keys() == set()


def test_a_new_host_of_rank_0_publishes_all_checkpoints(start: Start, bucket: RunBucket) -> None:
    a, b = start_pair(start)
    train(a, 10, 20)
    poll(a, b)
    form(b, 2, "b")
    train(b, 30)
    poll(b)
    assert stored_steps(bucket) == [10, 20, 30] and stored(bucket).generation == 2
    assert verify(b.folder) == (True, [f"step {step} is whole" for step in (10, 20, 30)])
    train(a, 40)  # a was cut off, and does not know generation 2
    a.poll()
    a.poll()
    assert stored_steps(bucket) == [10, 20, 30] and stored(bucket).generation == 2 and not a.problem
    poll(a)
    assert (
        a.mirror is None
        and (a.folder / "metrics.jsonl").read_bytes() == (b.folder / "metrics.jsonl").read_bytes()
    )
    form(b, 3, "a", "b")
    poll(a, b)
    assert stored(bucket).generation == 3 and b.mirror is None


def test_a_host_that_was_killed_while_it_took_over_starts_from_all_checkpoints(
    start: Start, bucket: RunBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = start_pair(start)
    train(a, 10)
    poll(a, b)
    form(b, 2, "b")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(host_mirror, "Mirror", mock.Mock(side_effect=KeyboardInterrupt))
        poll(b)
    assert committed_steps(start("b").folder / "checkpoints") == [10]


def test_rank_0_that_writes_metrics_is_not_disturbed(start: Start, bucket: RunBucket) -> None:
    a, b = start_pair(start)
    train(a, 10)
    poll(a)
    with open(b.folder / "tracker.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        poll(b)
        assert not (b.folder / "metrics.jsonl").exists()
    poll(b)
    assert (b.folder / "metrics.jsonl").exists()


def test_each_host_has_the_events_of_all_that_published(start: Start, bucket: RunBucket) -> None:
    a, b = start("a"), start("b")
    for host in (a, b):
        (host.folder / "events.jsonl").write_text(f'{{"event": "started {host.host}"}}\n')
    form(a, 1, "a", "b")
    poll(a)
    assert a.mirror and a.mirror.publish()
    poll(b, b)
    lines = (b.folder / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["started b", "started a"]


def test_a_start_reads_the_newest_snapshot_unless_it_has_put_it(
    start: Start, bucket: RunBucket
) -> None:
    a = start("a")
    form(a, 1, "a")
    train(a, 10)
    poll(a)
    train(a, 20)  # not published before it was killed
    c = start("c")
    assert (
        committed_steps(c.folder / "checkpoints") == [10] and (c.folder / "metrics.jsonl").exists()
    )
    assert (
        GenerationLog(c.folder / "generations").newest() == open_generation_log(a.folder).newest()
    )
    a = start("a")
    assert committed_steps(a.folder / "checkpoints") == [10, 20]
    form(c, 2, "c")
    train(c, 15)
    poll(c)
    refresh_copy(a.folder)
    assert committed_steps(a.folder / "checkpoints") == [10, 15] and list(
        a.folder.glob("checkpoints/*20.abandoned")
    )
    assert (a.folder / "metrics.jsonl").read_text().count("\n") == 15


def test_a_start_deletes_checkpoints_that_the_run_no_longer_keeps(
    start: Start, bucket: RunBucket
) -> None:
    a, b = start_pair(start)
    train(a, 10)
    poll(a, b)
    form(b, 2, "b")
    train(b, 20, 30)
    poll(b)
    for step in (10, 20):
        assert retire(b.folder / "checkpoints", step)
    train(b, 40)
    poll(b)
    a = start("a")
    assert committed_steps(a.folder / "checkpoints") == [30, 40] and not list(
        a.folder.glob("checkpoints/*abandoned*")
    )


def test_a_checkpoint_of_rank_0_reaches_a_host_that_scores_it(
    start: Start,
    bucket: RunBucket,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = start_pair(start)
    train(a, 10, 20)
    monkeypatch.setattr(working_copy, "FINAL_BEATS", 1)
    wait_until_published(a.folder, 20)
    assert "step 20 is not in s3://runs/team/first yet" in caplog.text
    poll(a)
    caplog.clear()
    wait_until_published(a.folder, 20)
    assert not caplog.text and fetch_checkpoint(a.folder) == fetch_checkpoint(b.folder) == 20
    assert fetch_checkpoint(b.folder, 20) == 20 and verify(b.folder) == (True, ["step 20 is whole"])
    train(a, 30)
    assert fetch_checkpoint(a.folder) == 30
    with pytest.raises(CheckpointError, match="the store has no checkpoint of step 30"):
        fetch_checkpoint(b.folder, 30)


def test_a_damaged_checkpoint_is_no_start(
    start: Start, bucket: RunBucket, caplog: pytest.LogCaptureFixture
) -> None:
    a = start("a")
    form(a, 1, "a")
    train(a, 10)
    poll(a)
    name, size = stored(bucket).files["checkpoints/step-00000010/tensors-00000.safetensors"][0]
    bucket.write(f"blobs/{name}", b"\xff" * size)
    with pytest.raises(CheckpointError, match="no checkpoint in the store is whole"):
        start("b")
    train(a, 20)
    poll(a)
    assert (
        committed_steps(start("b").folder / "checkpoints") == [20]
        and "step-00000010 is damaged" in caplog.text
    )


def test_a_run_that_returned_to_an_earlier_step_keeps_no_later_checkpoint(
    start: Start, bucket: RunBucket
) -> None:
    a, b = start_pair(start)
    train(a, 10, 20, 30)
    poll(a, b)
    b = start("b")
    late = start("a")  # before b publishes: its copy keeps all steps
    for step in (20, 30):  # lockstep launch --resume 10 on b
        set_aside(b.folder / "checkpoints" / folder_name(step), "abandoned")
    checkpoints.save(b.folder / "checkpoints", 20, value=99)  # saved before b publishes
    form(b, 2, "b")
    poll(b)
    assert stored_steps(bucket) == [10, 20], "30 is not downloaded again"
    published = stored(bucket).files
    set_aside(
        late.folder / "checkpoints" / folder_name(30), "abandoned"
    )  # as a worker does that joins at step 25
    form(b, 3, "a", "b")
    poll(late)
    assert stored_steps(bucket) == [10, 20] and stored(bucket).generation == 3
    tensors = "checkpoints/step-00000020/tensors-00000.safetensors"
    assert stored(bucket).files[tensors] == published[tensors], (
        "the step of the run that was left is replaced"
    )
    assert bytes([99]) * 64 in (late.folder / tensors).read_bytes()


def test_the_end_is_released_by_the_host_of_rank_0(start: Start, bucket: RunBucket) -> None:
    a, b = start_pair(start)
    poll(a, b)
    train(a, 10)
    open_generation_log(b.folder).record_end(RunResult(0), "done", after=0)
    b.finish()
    assert not stored(bucket).released
    a.finish()
    assert stored(bucket).released and stored_steps(bucket) == [10]
    later = start("a")
    later.finish()  # an end before its start
    assert later.mirror is None


def test_a_drained_host_releases_nothing(start: Start, bucket: RunBucket) -> None:
    a = start("a")
    form(a, 1, "a", "b")
    poll(a)
    a.finish()
    assert not stored(bucket).released


def test_an_outage_of_the_store_is_a_warning(
    start: Start,
    proxy: Proxy,
    bucket: RunBucket,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = start_pair(start)
    poll(a, b)
    proxy.fault = lambda method, path: "cut"
    b.follower.next_s = 0.0
    for host in (a, b, b):
        host.poll()
    assert b.problem and caplog.text.count("the store is tried again") == 2, "once on each host"
    monkeypatch.setattr(upload, "FINAL_BEATS", 1)
    with pytest.raises(StoreError, match="the end of the run was not uploaded"):
        a.finish()
    proxy.fault = lambda method, path: ""
    train(a, 10)
    poll(a, b)
    assert stored_steps(bucket) == [10] and (b.folder / "metrics.jsonl").exists()


def test_a_run_of_one_host_and_a_run_of_several_are_not_mixed(
    start: Start, bucket: RunBucket, tmp_path: Path
) -> None:
    with owned_copy(bucket, "single") as (copy, ownership):
        assert Mirror(copy, ownership).publish(released=True)
    with pytest.raises(UsageError, match="is one of a single host"):
        start("a")
    bucket.remove(*bucket.list("snapshots"), *bucket.list("blobs"))
    start("a")
    with pytest.raises(UsageError, match="is one of several hosts"), owned_copy(bucket, "single"):
        pass


def test_other_objects_a_lost_store_and_a_second_agent_are_refused(
    start: Start, bucket: RunBucket
) -> None:
    bucket.write("photos/cat.jpg", b"x")
    with pytest.raises(UsageError, match="holds no run, but 1 other names: photos"):
        start("a")
    bucket.remove("photos/cat.jpg")
    a = start("a")
    train(a, 10)
    with (
        mock.patch.dict("os.environ", {"LOCKSTEP_STORE_CACHE": str(a.folder.parents[1])}),
        pytest.raises(UsageError, match="already running"),
        joined_copy(bucket, "a"),
    ):
        pass
    for identity in (
        b"{",
        b"[]",
        b'{"token": 5, "run_id": []}',
        b'{"token": "../../x", "run_id": "00000000"}',
        b"\xff",
    ):
        bucket.write(IDENTITY, identity)
        with pytest.raises(DamagedFileError, match="identity of the run is damaged"):
            start("b")
    bucket.remove(IDENTITY)
    with pytest.raises(UsageError, match="is empty, and this host has a copy"):
        start("a")


def test_a_new_host_does_not_start_anew_when_the_snapshots_are_gone(
    start: Start, bucket: RunBucket
) -> None:
    a = start("a")
    form(a, 1, "a")
    train(a, 10)
    poll(a)
    bucket.remove(*bucket.list("snapshots"))
    with pytest.raises(CheckpointError, match="blobs of a run and no snapshot"):
        start("b")
    assert a.mirror and a.mirror.publish()
    assert committed_steps(start("b").folder / "checkpoints") == [10]


def test_a_generation_that_is_no_text_is_an_error_that_is_tried_again(
    start: Start, bucket: RunBucket
) -> None:
    a = start("a")
    form(a, 1, "a")
    bucket.write("membership/generations/000002.json", b"\xff\xfe")
    with pytest.raises(DamagedFileError, match=r"generation 2, is damaged"):
        open_generation_log(a.folder).newest()
    copy_generations(a.folder)
    with pytest.raises(DamagedFileError, match=r"generation 2, is damaged"):
        a.generations.newest()


def test_any_failure_of_a_poll_is_a_warning_and_of_the_end_an_error(
    start: Start,
    bucket: RunBucket,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = start("a")
    form(a, 1, "a")
    poll(a)
    train(a, 10)
    monkeypatch.setattr(
        a, "read_generations", mock.Mock(side_effect=IndexError("list index out of range"))
    )
    a.poll()
    a.poll()
    assert caplog.text.count("the mirror failed: IndexError: list index out of range") == 1
    with pytest.raises(IndexError):
        a.finish()


def test_a_copy_of_another_run_is_set_aside(start: Start, bucket: RunBucket) -> None:
    a = start("a")
    train(a, 10)
    identity = json.loads(bucket.read(IDENTITY))
    bucket.write(IDENTITY, json.dumps({**identity, "token": "0" * 64}).encode())
    assert not committed_steps(start("a").folder / "checkpoints")
    assert committed_steps(Path(f"{a.folder}.old") / "checkpoints") == [10]
