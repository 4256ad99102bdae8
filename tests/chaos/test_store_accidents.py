"""Accidents of a run in an object store: another host finds every step that the run announced.

Each row is an accident during or after a training. Then the exit code of the run is not 0, or a host
with an empty cache resumes at the step that was announced, or is refused. No row ends in a traceback.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from support.object_store import (
    Proxy,
    StoreHost,
    environment,
    make_bucket,
    newest_of,
    no_fault,
    s3_server,
    send,
)
from support.processes import SUPPORT
from support.waiting import wait_until

from lockstep.files import add_checksum
from lockstep.object_store.address import parse_address
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.snapshots import name_of, steps_of
from lockstep.runtime.processes import prctl

RUN = "s3://runs/team/loop"
STEPS = 12  # a checkpoint every 3 steps
PAUSE_S = 0.2
TIMEOUT_S = 400
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
ODD_NAMES = [
    "line\nbreak",
    'quote"',
    "back\\u d83d\\ud83d",
    "\x1b[31mred",
    "~",
    "%2e%2e",
    "c" * 255,
]


@dataclass
class Scene:
    """A run on host `a`; `b` has an empty cache. bucket: the store, past the proxy"""

    proxy: Proxy
    a: StoreHost
    b: StoreHost
    bucket: RunBucket
    trains: bool  # with torch; else a process that only saves checkpoints
    process: subprocess.Popen[str] | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self, host: StoreHost, steps: int, pause_s: float = PAUSE_S) -> subprocess.Popen[str]:
        if not self.trains:
            return host.start_writer(RUN, steps, pause_s)
        return host.start(
            "run",
            "--workers",
            1,
            SUPPORT / "stored_loop.py",
            "--steps",
            steps,
            "--pause_s",
            pause_s,
        )

    def run(self, host: StoreHost, steps: int) -> tuple[int, str]:
        process = self.start(host, steps)
        output = process.communicate(timeout=TIMEOUT_S)[0]
        return process.returncode, output

    @property
    def copy(self) -> Path:
        (copy,) = (self.a.folder / "cache").glob("*/loop")
        return copy

    @property
    def newest_number(self) -> int:
        return newest_of(self.proxy, RUN).number

    def delete(self, *folders: str) -> None:
        for folder in folders:
            self.bucket.remove(*self.bucket.list(folder))

    def refuse(self, reply: str, *methods: str, word: str = "") -> None:
        """Let the store refuse these requests from now on, until the end of the run."""
        self.proxy.fault = lambda method, path: reply if method in methods and word in path else ""

    def now_and_then(self, reply: str, method: str) -> None:
        choices = random.Random(3)
        self.proxy.fault = lambda given, path: (
            reply if given == method and choices.random() < 0.25 else ""
        )

    def repeat(self, action: Callable[[], object], pause_s: float = 0.2) -> None:
        """Repeat an action until the end of the run."""

        def loop() -> None:
            while not self.ended.wait(pause_s):
                action()

        threading.Thread(target=loop, daemon=True).start()


# The accidents.


def name_that_is_not_utf8(scene: Scene) -> None:
    (scene.copy / os.fsdecode(b"caf\xe9.txt")).write_text("stray")


def folder_that_is_not_utf8(scene: Scene) -> None:
    folder = scene.copy / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "notes.txt").write_text("stray")


def odd_names(scene: Scene) -> None:
    for name in ODD_NAMES:
        (scene.copy / name).write_text("stray")


def stray_files_in_checkpoints(scene: Scene) -> None:
    def add() -> None:
        for folder in scene.copy.glob("checkpoints/step-????????"):
            with suppress(OSError):
                (folder / ".nfs0001").write_text("stray")
                (folder / "notes.txt").write_text("stray")

    scene.repeat(add, 0.01)


def pipe_in_the_folder(scene: Scene) -> None:
    os.mkfifo(scene.copy / "pipe")


def unreadable_file(scene: Scene) -> None:
    (scene.copy / "notes.txt").write_text("stray")
    (scene.copy / "notes.txt").chmod(0)


def unreadable_folder(scene: Scene) -> None:
    (scene.copy / "notes").mkdir()
    (scene.copy / "notes/a.txt").write_text("stray")
    (scene.copy / "notes").chmod(0)


def last_checkpoint_is_damaged_here(scene: Scene) -> None:
    damaged: list[Path] = []

    def fault(method: str, path: str) -> str:
        folder = scene.copy / f"checkpoints/step-{STEPS:08d}"
        if not damaged and (folder / "COMMITTED").exists():
            tensors = folder / "tensors-00000.safetensors"
            tensors.write_bytes(tensors.read_bytes()[:-1] + b"\xff")
            damaged.append(tensors)
        return "" if damaged else "503"

    scene.proxy.fault = fault


def stray_snapshots(scene: Scene) -> None:
    for name in ("snapshots/5", "snapshots/notes.txt", "snapshots/9999999999"):
        scene.bucket.write(name, b"stray")


def truncated_blobs(scene: Scene) -> None:
    for name in scene.bucket.list("blobs"):
        scene.bucket.write(name, scene.bucket.read(name)[:-1])


def outage(scene: Scene) -> None:
    until_s = time.monotonic() + 3
    scene.proxy.fault = lambda method, path: "503" if time.monotonic() < until_s else ""


def expire_old_blobs(scene: Scene) -> None:
    """As a lifecycle rule of two days at the end of a long run, until its last step."""

    def expire() -> None:
        if not (scene.copy / f"checkpoints/step-{STEPS:08d}").exists():
            scene.bucket.remove(*scene.bucket.list("blobs")[:2])

    scene.repeat(expire)


def expire_snapshots_at_once(scene: Scene) -> None:
    scene.repeat(lambda: scene.delete("snapshots"), 0.0)


def files_of_one_time(scene: Scene) -> None:
    """As on a host whose clock is set back."""

    def set_back() -> None:
        for path in scene.copy.rglob("*"):
            with suppress(OSError):
                os.utime(path, (0, 0))

    scene.repeat(set_back, 0.01)


def second_start(scene: Scene) -> None:
    code, output = scene.run(scene.b, STEPS)
    assert code == 2 and "already running" in output


def takeover(scene: Scene) -> None:
    assert scene.process
    scene.process.send_signal(signal.SIGSTOP)
    assert scene.run(scene.b, STEPS)[0] == 0
    scene.process.send_signal(signal.SIGCONT)


def other_types(scene: Scene) -> None:
    value = json.loads(scene.bucket.read(name_of(scene.newest_number)))
    del value["sha256"]
    changed = value | {"beat_s": float("inf"), "released": False}
    scene.bucket.write(name_of(scene.newest_number), json.dumps(add_checksum(changed)).encode())


def flipped_bit(scene: Scene) -> None:
    name = name_of(scene.newest_number)
    scene.bucket.write(name, scene.bucket.read(name).replace(b"step-00000012", b"step-00000002"))


def torn_snapshot(scene: Scene) -> None:
    name = name_of(scene.newest_number)
    content = scene.bucket.read(name)
    scene.bucket.write(name, content[: len(content) // 2])


def deleted_bucket(scene: Scene) -> None:
    scene.refuse("denied", "GET", "PUT", "POST")

    def delete() -> bool:
        scene.delete("blobs", "snapshots")
        return send(f"{scene.proxy.server}/runs", "DELETE")

    wait_until(delete, "the deletion of the bucket")
    scene.proxy.fault = no_fault


@dataclass(frozen=True)
class Accident:
    """
    during   what happens during the training, after its first checkpoint
    after    what happens after its end
    code     exit code of the run; after 0 another host resumes from the last step
    refused  words of the error of another host, which exits with 3 instead; "": it resumes
    pause_s  of a step of the run
    """

    during: Callable[[Scene], object] | None = None
    after: Callable[[Scene], object] | None = None
    code: int = 0
    refused: str = ""
    pause_s: float = PAUSE_S


ACCIDENTS = {
    # names
    "a file name that is not UTF-8": Accident(name_that_is_not_utf8),
    "a folder name that is not UTF-8": Accident(folder_that_is_not_utf8),
    "odd names": Accident(odd_names),
    "stray files in checkpoints": Accident(stray_files_in_checkpoints),
    "a named pipe": Accident(pipe_in_the_folder),
    "stray objects among the snapshots": Accident(stray_snapshots),
    # rights
    "an unreadable file": Accident(unreadable_file),
    "an unreadable folder": Accident(unreadable_folder),
    "puts are denied": Accident(lambda scene: scene.refuse("denied", "PUT"), code=3),
    "gets are denied": Accident(lambda scene: scene.refuse("denied", "GET"), code=3),
    "listings are denied": Accident(
        lambda scene: scene.refuse("denied", "GET", word="?list-type"), code=3
    ),
    "deletions are denied": Accident(lambda scene: scene.refuse("denied", "POST", "DELETE")),
    # deletions
    "all snapshots are deleted": Accident(lambda scene: scene.delete("snapshots")),
    "all blobs are deleted": Accident(lambda scene: scene.delete("blobs")),
    "all objects are deleted": Accident(lambda scene: scene.delete("snapshots", "blobs")),
    "the bucket is deleted": Accident(deleted_bucket, code=3),
    "all snapshots are deleted after the end": Accident(
        None, lambda scene: scene.delete("snapshots"), refused="no snapshot"
    ),
    "all blobs are deleted after the end": Accident(
        None, lambda scene: scene.delete("blobs"), refused="is missing"
    ),
    # answers
    "an outage": Accident(outage),
    "503 until the end": Accident(lambda scene: scene.refuse("503", "PUT", "GET"), code=3),
    "lost replies": Accident(lambda scene: scene.now_and_then("lost", "PUT")),
    "blobs that are confirmed and not stored": Accident(
        lambda scene: scene.refuse("swallowed", "PUT", word="/blobs/"), code=3
    ),
    # torn and changed objects
    "torn uploads": Accident(lambda scene: scene.now_and_then("torn", "PUT")),
    "truncated blobs": Accident(truncated_blobs),
    "a damaged checkpoint on the host": Accident(last_checkpoint_is_damaged_here, code=3),
    "a torn last snapshot": Accident(None, torn_snapshot),
    "a last snapshot with a flipped bit": Accident(
        None, flipped_bit, refused="checksum does not fit"
    ),
    "a last snapshot with other types": Accident(None, other_types, refused="beat_s is Infinity"),
    # clocks
    "a skewed clock": Accident(lambda scene: scene.refuse("skewed", "PUT", "GET", "POST"), code=3),
    "files of one time": Accident(files_of_one_time),
    # owners
    "a second start": Accident(second_start, pause_s=2.0),
    "a takeover": Accident(takeover, code=77),
    # expiry
    "blobs that expire": Accident(expire_old_blobs),
    "snapshots that expire at once": Accident(expire_snapshots_at_once, code=3),
}
SHORT = ("a file name that is not UTF-8", "an unreadable file", "a last snapshot with other types")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def scene(server: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    make_bucket(server)
    address = parse_address(RUN)
    assert address
    with (
        Proxy(server) as proxy,
        mock.patch.dict(os.environ, environment(server, tmp_path / "none")),
    ):
        a, b = (StoreHost(tmp_path / name, proxy) for name in "ab")
        for host in (a, b):
            host.options["env"] |= {"LOCKSTEP_STORE_BEAT_S": "0.5"}
            host.options["preexec_fn"] = obey_rights
        scene = Scene(proxy, a, b, RunBucket(address), request.param)
        yield scene
        scene.ended.set()
        for host in (a, b):
            host.kill()


def obey_rights() -> None:
    """Let a process of root obey the rights of files."""
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        prctl(PR_CAPBSET_DROP, capability)


CASES = [
    *(
        pytest.param(False, name, marks=[] if name in SHORT else pytest.mark.long)
        for name in ACCIDENTS
    ),
    *(pytest.param(True, name, marks=pytest.mark.long) for name in SHORT),
]


@pytest.mark.parametrize(("scene", "name"), CASES, indirect=["scene"])
def test_after_an_accident_the_run_fails_or_another_host_resumes(name: str, scene: Scene) -> None:
    accident = ACCIDENTS[name]
    process = scene.process = scene.start(scene.a, STEPS, accident.pause_s)
    wait_until(
        lambda: steps_of(newest_of(scene.proxy, RUN).files),
        "a checkpoint in the store",
        TIMEOUT_S,
        process=process,
    )
    if accident.during:
        accident.during(scene)
    output = process.communicate(timeout=TIMEOUT_S)[0]
    scene.ended.set()
    scene.proxy.fault = no_fault
    if accident.after:
        accident.after(scene)
    announced = [int(step) for step in re.findall(r"uploaded step (\d+)", output)]
    code, other = scene.run(scene.b, STEPS + 1) if not process.returncode else (None, "")
    resumed = [int(step) for step in re.findall(r"resumes from step (\d+)", other)]
    print(
        f"{name}: exit code {process.returncode}, announced {announced}; another host: {code}, resumes from {resumed}"
    )
    assert "Traceback" not in output + other, output + other
    assert process.returncode == accident.code, output
    if accident.code:
        return
    assert announced[-1] == STEPS, output
    if accident.refused:
        assert code == 3 and accident.refused in other, other
    else:
        assert code == 0 and resumed == [STEPS], other
