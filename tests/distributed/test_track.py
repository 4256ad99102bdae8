"""Tracker output, read with the backends' readers after restarts, kills, full disks, outages."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.launching import run_command, run_lockstep
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from lockstep.errors import ConfigError, DataError, LockstepError, UsageError
from lockstep.files import add_checksum, write_json
from lockstep.record import events
from lockstep.record.backends import wandb_records, without_secrets
from lockstep.record.metrics import append_json, read_metrics
from lockstep.record.tracker import BackgroundTracker, Tracker

SCRIPT = Path(__file__).parents[1] / "support" / "track_actions.py"


def tracker_of(folder: Path, *backends: str, from_step: int | None = 0) -> Tracker:
    """Open the tracker of the leader."""
    return Tracker(folder, leader=True, from_step=from_step, track=list(backends))


def play(
    folder: Path, actions: str, env: Mapping[str, str] | None = None, **options: Any
) -> tuple[int, str]:
    """Return exit code and output of a process that performs `actions` on a Tracker."""
    with start_playing(folder, actions, env, **options) as process:
        output, _ = process.communicate()
    return process.returncode, output


def start_playing(
    folder: Path, actions: str, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, str(SCRIPT), str(folder)]
    process = subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | dict(env or {}),
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps([options, actions]) + "\n")
    process.stdin.flush()
    return process


def steps(tracker: Tracker, first: int, last: int) -> None:
    for step in range(first, last + 1):
        tracker.step(step, {"loss": 1 / step, "tokens": 10 * step, "seconds": 0.5})


def tensorboard(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return the points of a tag as TensorBoard shows them."""
    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def losses(first: int, last: int) -> list[tuple[int, Any]]:
    return [(step, pytest.approx(1 / step)) for step in range(first, last + 1)]


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return all rows in the offline files of Weights & Biases, in upload order."""
    rows: list[dict[str, Any]] = []
    for message in wandb_messages(folder):
        if message.WhichOneof("record_type") == "history":
            items = message.history.item
            rows.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in items
                }
            )
    return rows


def wandb_messages(folder: Path) -> Iterator[Any]:
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(path, path.stat().st_size):
            yield wandb_internal_pb2.Record.FromString(record)


def evaluate(tracker: Tracker, step: int, values: dict[str, float]) -> None:
    """Write a line as an evaluator does, and send it."""
    append_json(tracker.evaluations, {"step": step, **values})
    tracker.forward_evaluations()


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Tracker(
        tmp_path / "run", leader=False, from_step=0, track=["tensorboard", "wandb:offline"]
    ) as tracker:
        tracker.step(1, {"loss": 1.0})
        tracker.step(7, {"loss": 1.0})
        tracker.forward_evaluations()
        tracker.sync()
    assert list(tmp_path.iterdir()) == []


def test_disabled_packages_are_not_imported() -> None:
    code = "import sys, lockstep.record.tracker, lockstep.record.progress\nprint({'torch', 'wandb', 'tensorboard'} & set(sys.modules))"
    assert run_command([sys.executable, "-c", code], check=True).stdout == "set()\n"


def test_event_log_has_every_start_and_skips_torn_lines(tmp_path: Path) -> None:
    for start in (1, 2):
        events.append_event(tmp_path, "start", workers=start, loss=float("nan"))
        with open(tmp_path / "events.jsonl", "a") as file:
            file.write('{"time": "2026-')
    events.append_event(tmp_path, "end")
    lines = events.read_events(tmp_path)
    assert [line["event"] for line in lines] == ["start", "start", "end"]
    assert [line.get("workers") for line in lines] == [1, 2, None]
    assert math.isnan(lines[0]["loss"]) and lines[0]["time"].endswith("+00:00")


def test_run_has_one_tracker_and_a_kill_releases_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.record.tracker.LOCK_TIMEOUT_S", 0.0)
    with start_playing(tmp_path, "steps 1 9, wait", from_step=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(UsageError, match="another process is recording this run") as caught:
            tracker_of(tmp_path, from_step=3)
        assert str(tmp_path) in caught.value.where and caught.value.hint
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == 9, (
            "the second tracker changed nothing"
        )
        process.kill()
        process.wait()
    with tracker_of(tmp_path, from_step=3) as tracker:
        steps(tracker, 4, 5)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_damaged_tracker_json_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "tracker.json").write_text("{")
    with pytest.raises(DataError, match="is damaged") as caught:
        tracker_of(tmp_path)
    assert "move it aside" in caught.value.hint
    (tmp_path / "tracker.json").unlink()
    tracker_of(tmp_path).close()


@pytest.mark.parametrize("backend", ["tensorboard", "wandb:offline"])
def test_missing_package_is_an_error_with_the_package_to_install(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = backend.partition(":")[0]
    for module in ("wandb", "wandb.proto.wandb_internal_pb2", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"{name} is not installed") as caught:
        tracker_of(tmp_path, backend)
    assert (
        f"track.{name}" in caught.value.where
        and "pip install 'lockstep-train[track]'" in caught.value.hint
    )
    tracker_of(tmp_path).close()


def test_tensorboard_has_each_step_once_after_a_kill(tmp_path: Path) -> None:
    # Flushed up to 3, killed at 10, resumed at 6: 4 to 6 may be lost, 7 to 10 are repeated.
    actions = "steps 1 3, evaluate 3, sync, steps 4 6, evaluate 6, steps 7 10, kill"
    code, _ = play(tmp_path, actions, from_step=0, track=["tensorboard"])
    assert code == -signal.SIGKILL
    (events,) = (tmp_path / "tensorboard").iterdir()
    with open(events, "ab") as file:
        file.write(
            b"\x40\x00\x00\x00\x00\x00\x00\x00torn"
        )  # a record of 64 bytes, torn at its fourth
    with tracker_of(tmp_path, "tensorboard", from_step=6) as tracker:
        steps(tracker, 7, 12)
    assert tensorboard(tmp_path, "train/loss") == losses(1, 12)
    assert tensorboard(tmp_path, "train/tokens")[-1] == (12, 120)
    assert tensorboard(tmp_path, "validation/bleu") == [(3, 1.5), (6, 3.0)]


OWN_BACKEND = """
import json

class Lines:
    def __init__(self, folder, cursor, *, run, run_id):
        self.path, self.rows = folder / "own.jsonl", [{"from": cursor.step, "run_id": run_id, "run": run}]

    def add(self, axis, step, values, now):
        if step == 8 and not self.path.with_name("failed").exists():
            self.path.with_name("failed").touch()
            raise ConnectionError("the server is down")
        self.rows.append({axis: step, **values})

    def flush(self):
        with open(self.path, "a") as file:
            file.write("".join(json.dumps(row) + chr(10) for row in self.rows))
        self.rows = []

    def close(self, failed):
        pass

class Incomplete:
    def add(self, axis, step, values, now): ...
"""


def test_a_backend_of_the_user_has_each_step_once_after_an_error_and_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_backend.py").write_text(OWN_BACKEND)
    monkeypatch.chdir(tmp_path)
    options = {"from_step": 0, "track": ["own_backend:Lines"], "run": {"data": {"api_key": "k"}}}
    actions = "steps 1 3, evaluate 3, sync, steps 4 9, sync, steps 10 12, kill"
    code, output = play(tmp_path / "run", actions, **options)
    assert (
        code == -signal.SIGKILL
        and output.count("own_backend:Lines failed (ConnectionError: the server is down)") == 1
    ), output
    code, output = play(tmp_path / "run", "steps 13 14", **options | {"from_step": 12})
    assert code == 0, output
    written = [
        json.loads(line) for line in (tmp_path / "run" / "own.jsonl").read_text().splitlines()
    ]
    opened = [row for row in written if "from" in row]
    assert [row["train"] for row in written if "train" in row] == list(range(1, 15))
    assert [(row["validation"], row["bleu"]) for row in written if "validation" in row] == [
        (3, 1.5)
    ]
    assert [row["from"] for row in opened] == [0, 3, 9] and len(
        {row["run_id"] for row in opened}
    ) == 1
    assert {row["run"]["data"]["api_key"] for row in opened} == {"(hidden)"}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own_backend:", "Empty module name|no attribute|has no attribute"),
        ("absent:Lines", "No module named 'absent'"),
        ("own_backend:Other", "has no attribute 'Other'"),
        ("own_backend:Incomplete", "no method flush, close"),
    ],
)
def test_a_backend_that_cannot_be_loaded_is_refused(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_backend.py").write_text(OWN_BACKEND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_backend", raising=False)
    with pytest.raises(ConfigError, match=problem) as caught:
        tracker_of(tmp_path / "run", name)
    assert caught.value.where == "track.backend" and caught.value.hint


def test_training_refuses_such_a_backend_before_it_prepares_data(tmp_path: Path) -> None:
    done = run_lockstep(
        "train", "--workers", "2", "--out", "run", "--track.backend", "absent:Lines", cwd=tmp_path
    )
    assert done.returncode == 2 and "No module named 'absent'" in done.stderr
    assert not (tmp_path / "run" / "data").exists()


def test_tensorboard_rewinds_with_the_run(tmp_path: Path) -> None:
    with tracker_of(tmp_path, "tensorboard") as tracker:
        steps(tracker, 1, 10)
        for step in (2, 8):
            evaluate(tracker, step, {"bleu": float(step)})
    for from_step in (5, 5, 7):
        with tracker_of(tmp_path, "tensorboard", from_step=from_step) as tracker:
            steps(tracker, from_step + 1, 9)
            assert tensorboard_after_flush(tracker) == losses(1, 9)
    assert tensorboard(tmp_path, "validation/bleu") == [(2, 2.0), (8, 8.0)]


def tensorboard_after_flush(tracker: Tracker) -> list[tuple[int, float]]:
    tracker.sync()
    return tensorboard(tracker.folder, "train/loss")


def test_tensorboard_reads_starts_in_order_despite_wrong_clocks(tmp_path: Path) -> None:
    for first in range(1, 12, 2):
        with tracker_of(tmp_path, "tensorboard", from_step=first - 1) as tracker:
            steps(tracker, first, first + 3)
        newest = max((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        ahead = newest.name.split(".")
        ahead[3] = str(int(ahead[3]) + 3600)  # as from a machine whose clock is an hour ahead
        newest.rename(newest.with_name(".".join(ahead)))
    assert tensorboard(tmp_path, "train/loss") == losses(1, 14)


def test_backend_enabled_later_gets_the_whole_history(tmp_path: Path) -> None:
    with tracker_of(tmp_path) as tracker:
        steps(tracker, 1, 10)
        evaluate(tracker, 5, {"bleu": 20.5})
    with tracker_of(tmp_path, "tensorboard", from_step=8) as tracker:
        steps(tracker, 9, 11)
    assert tensorboard(tmp_path, "train/loss") == losses(1, 11)
    assert tensorboard(tmp_path, "validation/bleu") == [(5, 20.5)]


def test_full_disk_loses_no_point_and_no_step(tmp_path: Path) -> None:
    actions = "steps 1 50, sync, limit 12000, steps 51 400, sync, steps 401 402"
    code, output = play(
        tmp_path,
        f"{actions}, limit, sync, steps 403 404",
        from_step=0,
        track=["tensorboard"],
    )
    assert code == 0, output
    assert output.count("tensorboard failed") == 1, output
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(
        range(1, 405)
    )
    assert tensorboard(tmp_path, "train/loss") == losses(1, 404)


def test_evaluations_of_another_process_are_sent_once_at_their_step(tmp_path: Path) -> None:
    evaluations = tmp_path / "evaluations.jsonl"
    with tracker_of(tmp_path, "tensorboard") as tracker:
        steps(tracker, 1, 20)
        evaluations.write_bytes(
            b'{"step": 10, "bleu": 1.5, "signature": "x", "best": true}\n{"step": 15, "bl'
        )
        tracker.forward_evaluations()
        tracker.forward_evaluations()
        with open(evaluations, "ab") as file:
            file.write(b'eu": 2.5}\nno json\n{"step": 20, "bleu": 3.5}\n')
        tracker.forward_evaluations()
    for _ in range(2):
        with tracker_of(tmp_path, "tensorboard", from_step=20) as tracker:
            tracker.forward_evaluations()
    assert tensorboard(tmp_path, "validation/bleu") == [(10, 1.5), (15, 2.5), (20, 3.5)]
    with pytest.raises(KeyError):
        tensorboard(tmp_path, "validation/best")


def test_evaluator_forwards_its_lines_after_the_training(tmp_path: Path) -> None:
    with tracker_of(tmp_path, "tensorboard") as tracker:
        steps(tracker, 1, 5)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "evaluations.jsonl").write_bytes(b'{"step": 5, "bleu": 9.5}\n')
    with tracker_of(tmp_path, "tensorboard", from_step=None) as tracker:
        tracker.forward_evaluations()
    assert tensorboard(tmp_path, "validation/bleu") == [(5, 9.5)]
    assert tensorboard(tmp_path, "train/loss") == losses(1, 5)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_training_waits_for_an_evaluator_that_forwards_its_lines(tmp_path: Path) -> None:
    evaluator = tracker_of(tmp_path, from_step=None)
    end = threading.Timer(0.3, evaluator.close)
    end.start()
    with tracker_of(tmp_path) as tracker:
        assert evaluator.lock is None, "it released the lock"
        steps(tracker, 1, 1)
        with pytest.raises(UsageError, match="another process is recording this run"):
            tracker_of(tmp_path, from_step=None)
    end.join()


def assert_uploaded_once(folder: Path, last: int) -> None:
    """Assert that the upload has each step once, with rising row numbers and one run id."""
    uploaded = rows(folder)
    train = [row for row in uploaded if "train/step" in row]
    assert [row["train/step"] for row in train] == list(range(1, last + 1))
    assert [row["train/loss"] for row in train] == [1 / step for step in range(1, last + 1)]
    numbers = [row["_step"] for row in uploaded]
    assert numbers == sorted(set(numbers)), "a server drops a row whose number it has seen"
    ids = {
        message.run.run_id
        for message in wandb_messages(folder)
        if message.WhichOneof("record_type") == "run"
    }
    assert ids == {json.loads((folder / "tracker.json").read_text())["wandb_id"]}


def test_wandb_has_one_run_with_each_step_once_and_a_validation_axis(tmp_path: Path) -> None:
    run = {
        "optim": {"learning_rate": 0.5},
        "service": {"api_key": "s3cr3t-1", "url": "https://me:s3cr3t-2@host/x"},
    }
    options: dict[str, Any] = {"track": ["wandb:offline:p"], "run": run}
    env = {"WANDB_API_KEY": "s3cr3t-" + "3" * 33}
    first = "steps 1 10, evaluate 5, steps 11 12"
    assert play(tmp_path, first, env, from_step=0, **options) == (0, "closed\n")
    assert play(tmp_path, "steps 9 14, evaluate 10", env, from_step=8, **options) == (
        0,
        "closed\n",
    )
    assert_uploaded_once(tmp_path, 14)
    assert [
        (row["validation/step"], row["validation/bleu"])
        for row in rows(tmp_path)
        if "validation/step" in row
    ] == [(5, 2.5), (10, 5)]
    axes = {
        (m.metric.name or m.metric.glob_name): m.metric
        for m in wandb_messages(tmp_path)
        if m.WhichOneof("record_type") == "metric"
    }
    assert (
        axes["train/*"].step_metric == "train/step"
        and axes["validation/*"].step_metric == "validation/step"
    )
    assert axes["lockstep/step"].options.hidden
    starts = [
        message.run
        for message in wandb_messages(tmp_path)
        if message.WhichOneof("record_type") == "run"
    ]
    config = {item.key: json.loads(item.value_json) for item in starts[0].config.update}
    assert config["optim"] == {"learning_rate": 0.5} and config["service"] == {
        "api_key": "(hidden)",
        "url": "https://host/x",
    }
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 8 and not [path for path in files if b"s3cr3t" in path.read_bytes()]


def test_wandb_gets_the_rows_that_a_kill_lost(tmp_path: Path) -> None:
    # wandb's process buffers rows for seconds: after this kill its file has no row.
    actions = "steps 1 10, evaluate 5, sync, kill"
    code, _ = play(tmp_path, actions, from_step=0, track=["wandb:offline"])
    assert code == -signal.SIGKILL
    assert play(tmp_path, "steps 9 14, evaluate 10", from_step=8, track=["wandb:offline"]) == (
        0,
        "closed\n",
    )
    assert_uploaded_once(tmp_path, 14)
    assert [row["validation/step"] for row in rows(tmp_path) if "validation/step" in row] == [5, 10]


def test_killed_wandb_does_not_stop_the_run_and_catches_up_later(tmp_path: Path) -> None:
    actions = "steps 1 5, kill-wandb, steps 6 10, sync, steps 11 12"
    code, output = play(tmp_path, actions, from_step=0, track=["wandb:offline"])
    assert code == 0 and output.count("wandb failed") == 1, output
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 13))
    assert play(tmp_path, "steps 11 14", from_step=10, track=["wandb:offline"]) == (
        0,
        "closed\n",
    )
    assert_uploaded_once(tmp_path, 14)


class Server:
    """A fake wandb module in online mode, with the server's summary of an earlier start."""

    Settings = dict
    errors = SimpleNamespace(UsageError=KeyError)

    def __init__(self, summary: dict[str, Any], step: int) -> None:
        self.summary, self.step, self.url = summary, step, "https://host/run"
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.init_options: dict[str, Any] = {}

    def init(self, **options: Any) -> Server:
        self.init_options = options
        return self

    def define_metric(self, *names: str, **options: Any) -> None: ...

    def finish(self, **options: Any) -> None: ...

    def log(self, row: dict[str, Any], *, step: int, commit: bool) -> None:
        self.rows.append((step, row))


def test_online_cursor_comes_from_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ['{"step": 2, "bleu": 1.0}\n', '{"step": 4, "bleu": 2.0}\n']
    with tracker_of(tmp_path) as tracker:
        steps(tracker, 1, 6)
    (tmp_path / "evaluations.jsonl").write_text("".join(lines))
    # Killed while online: the server has four of the six sent steps and one evaluation.
    cursor = {"step": 6, "evaluations_bytes": 50, "rows": 8}
    write_json(tmp_path / "tracker.json", add_checksum({"wandb_id": "abc", "wandb": cursor}))
    server = Server({"lockstep/step": 4, "lockstep/evaluations": len(lines[0])}, step=5)
    monkeypatch.setitem(sys.modules, "wandb", server)
    with tracker_of(tmp_path, "wandb", from_step=5) as tracker:
        steps(tracker, 6, 7)
    assert server.init_options["id"] == "abc" and server.init_options["resume"] == "allow"
    assert [row.get("train/step", row.get("validation/step")) for _, row in server.rows] == [
        5,
        4,
        6,
        7,
    ]
    assert [step for step, _ in server.rows] == [6, 7, 8, 9], "above all row numbers of the server"
    assert server.rows[1][1]["validation/bleu"] == 2.0


@pytest.fixture
def closed_server() -> Iterator[str]:
    """The address of a server that refuses all connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_wandb_server_that_is_down_does_not_stop_the_run(
    tmp_path: Path, closed_server: str
) -> None:
    env = {"WANDB_BASE_URL": closed_server, "WANDB_API_KEY": "k" * 40, "WANDB_INIT_TIMEOUT": "1"}
    code, output = play(tmp_path, "steps 1 3", env, from_step=0, track=["wandb"])
    assert code == 0 and output.count("wandb cannot be opened") == 1 and "k" * 40 not in output, (
        output
    )
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_wandb_without_a_login_is_an_error_before_the_first_step(
    tmp_path: Path, closed_server: str
) -> None:
    env = {
        "WANDB_BASE_URL": closed_server,
        "WANDB_API_KEY": "",
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / "none"),
    }
    code, output = play(tmp_path / "run", "steps 1 3", env, from_step=0, track=["wandb"])
    assert (
        code == 2
        and "ConfigError: Weights & Biases cannot be used" in output
        and "wandb login" in output
    ), output


@pytest.mark.parametrize(
    ("key", "hidden"),
    [
        ("api_key", True),
        ("HF_TOKEN", True),
        ("password", True),
        ("auth", True),
        ("tokens", False),
        ("author", False),
        ("key_bytes", False),
    ],
)
def test_without_secrets(key: str, hidden: bool) -> None:
    assert without_secrets({"part": {key: "value"}}) == {
        "part": {key: "(hidden)" if hidden else "value"}
    }


class Broken:
    """A writer whose methods all fail, as on a lost network mount."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def fail(*args: Any) -> None:
            raise ConnectionError("gone")

        return fail


def test_training_continues_when_a_backend_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tracker_of(tmp_path, "tensorboard") as tracker:
        for first in (1, 3, 5):
            tracker.backends["tensorboard"].writer = Broken()  # type: ignore[attr-defined]
            steps(tracker, first, first)
            evaluate(tracker, first, {"bleu": 1.0})
            steps(tracker, first + 1, first + 1)
            tracker.sync()
    assert tensorboard(tmp_path, "train/loss") == losses(1, 6)
    assert tensorboard(tmp_path, "validation/bleu") == [(1, 1.0), (3, 1.0), (5, 1.0)]
    assert sum("tensorboard failed" in record.message for record in caplog.records) == 1, (
        "each problem is logged once"
    )


def test_background_tracker_records_the_same_without_blocking(tmp_path: Path) -> None:
    with (
        tracker_of(tmp_path, "tensorboard") as tracker,
        BackgroundTracker(tracker) as record,
    ):
        gate, values = threading.Event(), {"loss": 0.0}
        record._thread.submit(gate.wait, 30)  # a hung disk
        for step in range(1, 101):
            values["loss"] = 1 / step
            record.step(step, values)
        assert read_metrics(tmp_path / "metrics.jsonl") == []
        gate.set()
        record.sync()
        assert [
            (line["step"], line["loss"]) for line in read_metrics(tmp_path / "metrics.jsonl")
        ] == losses(1, 100)
        record.step(101, {"loss": 1 / 101})
    assert [
        (line["step"], line["loss"]) for line in read_metrics(tmp_path / "metrics.jsonl")
    ] == losses(1, 101)
    assert tensorboard(tmp_path, "train/loss") == losses(1, 101)


def test_background_errors_are_raised_by_the_next_call_and_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(LockstepError, match="step 3 was logged after step 1"):
        with (
            tracker_of(tmp_path) as tracker,
            BackgroundTracker(tracker) as record,
        ):
            record.step(1, {"loss": 1.0})
            record.step(3, {"loss": 1.0})
    with (
        tracker_of(tmp_path, from_step=1) as tracker,
        pytest.raises(LockstepError, match="step 3 was logged after step 1"),
    ):
        with BackgroundTracker(tracker) as record:
            record.step(3, {"loss": 1.0})
            record.sync()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]
