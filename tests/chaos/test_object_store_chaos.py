"""A run in an object store survives its host, with the same bits; nothing secret leaves the host."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from support.hosts import flags
from support.launching import one_thread, run_lockstep, start_lockstep
from support.object_store import Proxy, environment, s3_server
from support.processes import processes_in
from support.waiting import wait_until

from lockstep.files import sha256_file
from lockstep.remote.address import parse_address
from lockstep.remote.bucket import RunBucket
from lockstep.remote.snapshots import newest
from lockstep.remote.upload import steps_of

RUN = "s3://runs/team/first"
STEPS, EVERY = 24, 8
FAULTS = ("503", "slow", "cut", "lost", "torn")
SECRETS = ("very-secret-value", "AKIATEST")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


class Host:
    """A host: a working directory, and a cache for its copies."""

    def __init__(self, folder: Path, proxy: Proxy) -> None:
        folder.mkdir()
        self.folder, self.output = folder, ""
        self.options = {"cwd": folder, "env": one_thread(**environment(proxy.address, folder / "cache"))}

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        done = run_lockstep(*words, **self.options)
        self.output += done.stdout + done.stderr
        return done

    def start(self, *words: object) -> subprocess.Popen[str]:
        return start_lockstep(*words, **self.options)

    def kill(self) -> None:
        """Lose the host: all its processes at once."""
        while pids := processes_in(self.folder):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


def random_faults(seed: int, share: float) -> object:
    choices = random.Random(seed)
    return lambda method, path: choices.choice(FAULTS[: 5 if method == "PUT" else 4]) if choices.random() < share else ""


def training(out: object) -> list[object]:
    return ["train", "--workers", 2, "--out", out, *flags(STEPS, checkpoint__every_steps=EVERY)]


def stored_steps(proxy: Proxy) -> list[int]:
    with mock.patch.dict(os.environ, environment(proxy.server, "unused")):
        address = parse_address(RUN)
        assert address
        snapshot = newest(RunBucket(address))
    return steps_of(snapshot.files) if snapshot else []


def test_a_run_whose_host_is_lost_resumes_on_another_one_with_the_same_bits(server: str, tmp_path: Path) -> None:
    with Proxy(server) as proxy:
        a, b = Host(tmp_path / "a", proxy), Host(tmp_path / "b", proxy)
        a.run(*training("local"))
        reference = a.run("checkpoint", "digest", "local").stdout
        proxy.fault = random_faults(seed=1, share=0.15)
        first = a.start(*training(RUN), "--elastic.heartbeat_timeout_s", "1.5")
        wait_until(lambda: stored_steps(proxy), "a checkpoint in the store", process=first)
        a.kill()
        a.output += first.communicate()[0]
        assert (done := b.run(*training(RUN))).returncode == 0, done.stderr
        assert len(proxy.faults) > 5 and "waiting" in done.stderr and "resumes from step" in done.stderr
        proxy.fault = lambda method, path: ""
        assert reference and b.run("checkpoint", "digest", RUN).stdout == reference
        assert [line.split()[0] for line in b.run("checkpoint", "list", RUN).stdout.splitlines()[1:]] == ["8", "16", "24"]
        assert b.run("checkpoint", "verify", RUN).stdout.splitlines() == [f"step {step} is whole" for step in (8, 16, 24)]
        for out, folder in (("local.safetensors", "local"), ("stored.safetensors", RUN)):
            assert a.run("checkpoint", "export", folder, "--out", out).returncode == 0
        assert sha256_file(a.folder / "local.safetensors") == sha256_file(a.folder / "stored.safetensors")
        uploaded = [event for event in read_events(tmp_path / "b") if event["event"] == "uploaded"]
        assert {event["step"] for event in uploaded} >= {24}
        # Damage in the store is found, and the checkpoint before it is whole.
        with mock.patch.dict(os.environ, environment(server, "unused")):
            address = parse_address(RUN)
            assert address
            bucket = RunBucket(address)
            snapshot = newest(bucket)
            assert snapshot
            blob = f"blobs/{snapshot.files['checkpoints/step-00000024/tensors-00000.safetensors'][0][0]}"
            bucket.put(blob, bucket.get(blob)[:-1])
            contents = b"".join(bucket.get(name) for name in [*bucket.list("blobs"), *bucket.list("snapshots")])
        verified = b.run("checkpoint", "verify", RUN)
        assert verified.returncode == 3 and "step-00000024 is damaged" in verified.stdout and "step 16 is whole" in verified.stdout
        assert b.run("checkpoint", "digest", RUN).returncode == 3
    local = b"".join(path.read_bytes() for host in (a, b) for path in host.folder.rglob("*") if path.is_file())
    for secret in SECRETS:
        assert secret not in a.output + b.output and secret.encode() not in contents + local
    tokens = [path.read_bytes() for path in tmp_path.rglob("token")]
    assert tokens and not any(token in contents for token in tokens)


def read_events(folder: Path) -> list[dict[str, object]]:
    (path,) = [path for path in folder.rglob("events.jsonl") if "cache" in path.parts]
    return [json.loads(line) for line in path.read_text().splitlines()]
