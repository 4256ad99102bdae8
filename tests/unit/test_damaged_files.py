"""Damaged and non-regular files of a run: each is refused by name or tolerated, without a traceback."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checkpoints import save

from lockstep.agent import lock as agent_lock
from lockstep.checkpoint import commands, commit
from lockstep.checkpoint.evaluations import best_steps
from lockstep.checkpoint.folder import committed_steps
from lockstep.checkpoint.shards import ShardWriter
from lockstep.checkpoint.store import CheckpointStore
from lockstep.elastic import control
from lockstep.elastic.generation_log import Generation, GenerationLog, Member
from lockstep.elastic.run_folder import (
    create_run_folder,
    folder_error,
    make_token,
    open_waiting_room,
    read_token,
)
from lockstep.errors import CheckpointError, DamagedFileError, LockstepError, UsageError
from lockstep.files import add_checksum, read_json, try_lock, verify_checksum
from lockstep.models.load_translator import read_run
from lockstep.record import events, metrics
from lockstep.runtime import status_board as board
from lockstep.runtime import worker_env as seat
from lockstep.runtime.processes import open_worker_log
from lockstep.tasks.evaluate import finished_step

ME = Member("here/0/a", "here", 0, os.getpid(), "127.0.0.1:4000")
RECORD = Generation(1, "token", (ME,), "127.0.0.1:4001", 0, "for the test")
QUESTION = {"split": "validation", "beams": 1, "average": 0, "lowercase": False}


@pytest.fixture(autouse=True)
def within_five_seconds() -> Iterator[None]:
    """Fail the test when a read hangs."""

    def give_up(*_: object) -> None:
        raise TimeoutError("a read of the file hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with one of each file, and a state folder inside."""
    folder = tmp_path / "run"
    create_run_folder(folder, "here")
    GenerationLog(folder / "generations").propose(RECORD)
    save(folder / "checkpoints", 10)
    for step in (1, 2):
        metrics.append_json(folder / "metrics.jsonl", {"step": step, "loss": 1.0})
    metrics.append_json(folder / "evaluations.jsonl", {"step": 10, "loss": 1.0, **QUESTION})
    (folder / "best.json").write_text(json.dumps({"step": 10}))
    (folder / "finished.json").write_text(json.dumps({"step": 10}))
    events.append_event(folder, "began")
    (folder / "state").mkdir()
    return folder


def place(kind: str, path: Path) -> None:
    """Put something other than a regular file at `path`."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)


READERS: dict[str, Callable[[Path], object]] = {
    "run.json": read_run,
    "metrics.jsonl": lambda run: metrics.MetricsFile(run / "metrics.jsonl", 2),
    "events.jsonl": events.read_events,
    "best.json": lambda run: read_json(run / "best.json"),
    "evaluations.jsonl": lambda run: metrics.read_metrics(run / "evaluations.jsonl"),
    "finished.json": finished_step,
    "tracker.json": lambda run: read_json(run / "tracker.json"),
    "tracker.lock": lambda run: try_lock(run / "tracker.lock"),
    "token": read_token,
    "generations/000001.json": control.read_newest,
    "generations/000002.json": agent_lock.newest_generation,
    "logs/here-1.log": lambda run: open_worker_log(run, 1, "here"),
    "checkpoints/step-00000010/manifest.json": commands.digest_line,
    "checkpoints/step-00000010/facts.json": commands.digest_line,
    "checkpoints/step-00000010/tensors-00000.safetensors": lambda run: commands.export(
        run, None, run / "out"
    ),
    "state/agent.lock": lambda run: try_lock(run / "state" / "agent.lock"),
    "state/0.board": lambda run: board.read_status(run / "state" / "0.board"),
}


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket"])
def test_non_regular_files_are_refused_at_once_with_three_parts(run: Path, kind: str) -> None:
    for name, read in READERS.items():
        path = run / name
        before = path.read_bytes() if path.is_file() else None
        place(kind, path)
        with pytest.raises(LockstepError) as error:
            read(run)
        message = str(error.value)
        assert error.value.where and error.value.hint, name
        assert "not a regular file" in message, (name, message)
        path.rmdir() if kind == "folder" else path.unlink()
        if before is not None:
            path.write_bytes(before)
            path.chmod(0o600)


def test_pipe_in_place_of_the_marker_is_not_a_checkpoint(run: Path) -> None:
    place("pipe", run / "checkpoints" / "step-00000010" / "COMMITTED")
    assert committed_steps(run / "checkpoints") == []
    assert not commands.verify(run)[0]


def test_unreadable_file_loses_only_its_own_content(run: Path) -> None:
    place("pipe", run / "events.jsonl")
    place("pipe", run / "waiting" / "here-0-b.json")
    place("pipe", run / "waiting" / "here-0-a.sign")
    place("pipe", run / "evaluators" / "here.json")
    assert not events.append_event(run, "began")
    assert (
        list(open_waiting_room(run).members()) == []
        and open_waiting_room(run).read_liveness([ME]) == {}
    )
    with pytest.raises(OSError, match="not a regular file"):
        open_waiting_room(run).write_liveness(ME)
    assert control.running_evaluators(run) == []


# Manifests with names outside of the checkpoint.


def save_with_manifest(folder: Path, step: int, files: dict[str, object]) -> Path:
    """Write a committed checkpoint whose manifest lists these files, with a matching marker."""
    path = save(folder, step)
    manifest = json.dumps({"format": 1, "step": step, "files": files}).encode()
    (path / "manifest.json").write_bytes(manifest)
    (path / "COMMITTED").write_bytes(commit.marker_content(step, manifest))
    return path


def record(content: bytes) -> dict[str, object]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


OUTSIDE = ["/etc/hostname", "../outside", "..", ".", "", "a/b", "manifest.json", "COMMITTED"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_manifest_that_lists_an_outside_file_is_damaged_for_every_reader(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    folder = tmp_path / "checkpoints"
    save_with_manifest(folder, 20, {"facts.json": record(b"{}\n"), name: record(b"secret")})
    store = CheckpointStore(folder)
    message = "which is not a file of this folder"
    assert any(message in problem for problem in commit.find_damage(folder / "step-00000020", 20))
    for read in (
        lambda: store.load(20),
        lambda: commands.digest_line(folder, 20),
        lambda: commands.export(folder, 20, tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read()
    save(folder, 10)
    newest = store.load_newest()
    assert newest and newest.step == 10 and (folder / "step-00000020.damaged").is_dir()
    assert (tmp_path / "outside").read_bytes() == b"secret"


MANIFESTS = [
    b"[]",
    b"{}",
    b'{"format": 1, "files": []}',
    b'{"format": 1, "files": {"a": 1}}',
    b"[" * 99999,
    b"\xff",
]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=len)
def test_malformed_manifest_is_damaged_even_with_a_matching_marker(
    tmp_path: Path, manifest: bytes
) -> None:
    path = save(tmp_path, 20)
    (path / "manifest.json").write_bytes(manifest)
    (path / "COMMITTED").write_bytes(commit.marker_content(20, manifest))
    assert any("is malformed" in problem for problem in commit.find_damage(path, 20))
    with pytest.raises(CheckpointError, match="damaged"):
        CheckpointStore(tmp_path).load_newest()


def test_checkpoint_without_facts_is_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, 20)
    name = "tensors-00000.safetensors"
    save_with_manifest(tmp_path / "again", 20, {name: record((path / name).read_bytes())})
    with pytest.raises(CheckpointError, match=r"does not list facts.json"):
        CheckpointStore(tmp_path / "again").load(20)
    assert (
        commit.find_damage(tmp_path / "again" / path.name, 20)[0]
        == "the manifest does not list facts.json"
    )


def test_link_in_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 20) / "tensors-00000.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    message = f"{path.name} is a symbolic link, not a regular file"
    assert commit.find_damage(path.parent, 20) == [message]
    with pytest.raises(CheckpointError, match=message):
        CheckpointStore(tmp_path / "checkpoints").load(20)


PARTS = [
    '{"files": {"../../outside": {"bytes": 6, "sha256": ""}}}',
    '{"files": {"/tmp/x": {}}}',
    "{",
    "[]",
    '{"files": [1]}',
    '{"files": {"a": {}}}',
]


@pytest.mark.parametrize("content", PARTS)
def test_shard_list_with_an_outside_file_moves_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    part = ShardWriter(0, 2, {}, lambda: 1, lambda: "")
    path = part.folder(folder, 20, 1, 1)
    path.mkdir()
    (path / "part.json").write_text(content)
    with (
        commit.Attempt(folder, 20) as attempt,
        pytest.raises(CheckpointError, match=r"part of writer 1 of step 20 is damaged"),
    ):
        part.collect(attempt, folder, 20)
    assert (tmp_path / "outside").read_bytes() == b"secret"


def test_worker_loads_the_hashed_bytes_of_a_changing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 20) / "tensors-00000.safetensors"

    def then_change(function: Callable[..., object]) -> Callable[..., object]:
        """Wrap `function` so that the file changes right after it has been read."""

        def call(*args: object) -> object:
            result = function(*args)
            if args[0] in (path, path.parent):
                with open(path, "r+b") as opened:
                    opened.seek(-64, os.SEEK_END)
                    opened.write(bytes(64))
            return result

        return call

    for name in ("read_verified", "find_damage"):
        monkeypatch.setattr(commit, name, then_change(getattr(commit, name)))
    loaded = CheckpointStore(tmp_path).load(20)
    assert loaded.tensors["model.00000"].numpy().tobytes() == bytes([20]) * 64


# Other files of a run.


@pytest.mark.parametrize(
    "content", ["", "{", "[" * 100_000, "[1]", '{"step": "x"}', '{"step": 1'], ids=len
)
def test_damaged_best_json_is_ignored_and_the_best_step_kept(
    run: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "best.json").write_text(content)
    assert best_steps(run) == [10]
    assert "best.json cannot be read" in caplog.text and "step 10" in caplog.text
    (run / "evaluations.jsonl").unlink()
    save(run / "checkpoints", 20)
    assert best_steps(run) == [10, 20]  # either may be the best: both stay


def test_best_step_of_the_evaluations_is_kept_beside_that_of_best_json(run: Path) -> None:
    (run / "best.json").write_text('{"step": 11}')
    metrics.append_json(run / "evaluations.jsonl", {"step": 12, "split": "validation"})  # damaged
    assert best_steps(run) == [10, 11]
    (run / "best.json").unlink()
    assert best_steps(run) == [10]


def test_damaged_finished_json_is_named(run: Path) -> None:
    (run / "finished.json").write_text("{")
    with pytest.raises(DamagedFileError, match=r"finished.json is damaged[\s\S]*remove it"):
        finished_step(run)


@pytest.mark.parametrize("content", ["", "{", "[]", "pipe"])
def test_damaged_divergence_record_does_not_make_a_generation_trusted(
    run: Path, content: str
) -> None:
    log = GenerationLog(run / "generations")
    log.mark_untrusted(
        1, "the weights differ", {"step": 3, "what": "weights", "digests": {"a": "1"}}
    )
    path = run / "generations" / "000001.suspects.json"
    assert log.untrusted_reason(1) == "the weights differ" and len(log.divergence_records()) == 1
    place("pipe", path) if content == "pipe" else path.write_text(content)
    assert "generation 1 differ" in log.untrusted_reason(1)
    assert log.divergence_records() == []


def test_every_flipped_bit_of_a_generation_is_detected_and_named(run: Path) -> None:
    path = run / "generations" / "000001.json"
    intact = path.read_bytes()
    log = GenerationLog(run / "generations")
    for bit in range(0, len(intact) * 8, 9):  # each of the eight in turn
        flipped = bytearray(intact)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert log.read(1) == RECORD  # a bit of the white space
        except DamagedFileError:
            continue
    path.write_bytes(intact[:100])
    message = r"000001.json, the record of generation 1, is damaged[\s\S]*stop the workers[\s\S]*generations aside"
    for read in (agent_lock.newest_generation, control.read_newest):
        with pytest.raises(DamagedFileError, match=message):
            read(run)
    assert "record of generation 1, is damaged" in folder_error(
        seat.WorkerEnv(str(run), "", "here", 0, 1, 1, 1, 1, "127.0.0.1")
    )


def test_flipped_bit_of_a_divergence_record_is_detected(run: Path) -> None:
    log = GenerationLog(run / "generations")
    log.mark_untrusted(
        1, "the weights differ", {"step": 3, "what": "weights", "digests": {"a": "1"}}
    )
    path = run / "generations" / "000001.suspects.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 2'))
    assert log.divergence_records() == [] and "is damaged" in log.untrusted_reason(1)


@pytest.mark.parametrize(
    "changed",
    [
        {"address": "127.0.0.1:400p"},
        {"address": "127.0.0.1"},
        {"slot": "0"},
        {"port": 1},
        {"address": "a:0"},
    ],
)
def test_waiting_room_skips_entries_that_cannot_be_members(
    run: Path, changed: dict[str, object]
) -> None:
    open_waiting_room(run).register(ME)
    (run / "waiting" / "here-1-b.json").write_text(json.dumps({**vars(ME), **changed}))
    (run / "waiting" / "here-2-c.json").write_text("[")
    assert list(open_waiting_room(run).members()) == [ME]


@pytest.mark.parametrize("content", [b"", b"\n", b"0" * 63, b"0" * 65, b"\xff" * 64, b"G" * 64])
def test_malformed_token_is_refused_by_name(run: Path, content: bytes) -> None:
    (run / "token").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"the run's token is damaged[\s\S]*remove the file"):
        read_token(run)
    with pytest.raises(DamagedFileError):
        create_run_folder(run, "here")
    assert "token is damaged" in folder_error(
        seat.WorkerEnv(str(run), "", "here", 0, 1, 1, 1, 1, "127.0.0.1")
    )


def test_new_token_is_flushed_before_it_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("fsync", "link"):
        called = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, called=called, name=name: (calls.append(name), called(*args))[1]
        )
    make_token(tmp_path)
    assert calls == ["fsync", "link", "fsync"] and len(read_token(tmp_path)) == 64


# The state folder of a host.


def test_a_live_worker_with_a_damaged_file_is_found_by_its_status_board(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = run / "state"
    for slot, content in enumerate(["", "{", "[1, 2]", '{"pid": 1}']):
        (state / f"{slot}.json").write_text(content)
    assert seat.running_workers(state) == {}
    assert (
        "0.json is damaged" in caplog.text
        and "no worker is known to run in this slot" in caplog.text
    )
    own_board = board.StatusBoard(state / "1.board")
    assert own_board.pid and seat.running_workers(state) == {1: seat.identify_process(os.getpid())}
    stranger = "import sys; from pathlib import Path; from lockstep.runtime.status_board import StatusBoard; StatusBoard(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", stranger, str(state / "2.board")], check=True)
    assert set(seat.running_workers(state)) == {1}  # the worker of slot 2 has exited


def test_status_board_that_its_process_does_not_write_is_ignored(run: Path) -> None:
    state = run / "state"
    (state / "0.json").write_text("{")
    original = board.StatusBoard(state / "0.board")
    copied = (state / "0.board").read_bytes()
    (state / "0.board").unlink()
    (state / "0.board").write_bytes(copied)
    assert isinstance(original._memory, mmap.mmap) and seat.running_workers(state) == {}


def test_damaged_record_of_an_agent_is_ignored(run: Path) -> None:
    state = run / "state"
    agent_lock.write_record(state, {"pid": 1, "after": 12, "lives_on": True, "mark": ""})
    assert agent_lock.read_record(state)["after"] == 12
    content = (state / "agent.json").read_bytes()
    for damaged in (content.replace(b"12", b"72"), content[:-3], b"[" * 100_000, b"[1]"):
        (state / "agent.json").write_bytes(damaged)
        assert agent_lock.read_record(state) == {}


def test_record_of_an_agent_is_replaced_and_never_torn(run: Path) -> None:
    state = run / "state"
    agent_lock.write_record(state, {"pid": 1})
    with open(state / "agent.json") as opened:
        agent_lock.write_record(state, {"pid": 2})
        assert json.load(opened)["pid"] == 1
    assert agent_lock.read_record(state) == {"pid": 2}


def test_checksum_detects_changes_and_is_not_part_of_the_value() -> None:
    value = add_checksum({"a": [1, 2.5], "b": None})
    assert verify_checksum(json.loads(json.dumps(value))) == {"a": [1, 2.5], "b": None}
    for changed in (
        {**value, "b": 0},
        {"a": 1},
        {**value, "sha256": hashlib.sha256().hexdigest()},
        [value],
        "x",
    ):
        with pytest.raises(ValueError, match=r"checksum|no JSON object"):
            verify_checksum(changed)


def test_token_is_not_readable_by_others(run: Path) -> None:
    (run / "token").chmod(0o644)
    with pytest.raises(UsageError, match="can be read by other users"):
        read_token(run)
