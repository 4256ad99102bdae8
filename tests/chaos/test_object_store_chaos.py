"""A run in an object store survives its host, with the same bits; nothing secret leaves the host."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from support.hosts import flags
from support.object_store import Proxy, StoreHost, environment, make_bucket, newest_of, s3_server
from support.processes import SUPPORT, processes_in
from support.waiting import wait_until

from lockstep.checkpoint.folder import committed_steps
from lockstep.files import sha256_file
from lockstep.object_store.address import parse_address
from lockstep.object_store.bucket import RunBucket
from lockstep.remote.snapshots import newest, steps_of

RUN, LOOP = "s3://runs/team/first", "s3://runs/team/loop"
STEPS, EVERY = 24, 8
FAULTS = ("503", "slow", "cut", "lost", "torn")
Hosts = tuple[Proxy, StoreHost, StoreHost]
SECRETS = ("very-secret-value", "AKIATEST")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def hosts(server: str, tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts behind one proxy, and an empty bucket; their processes end with the test."""
    make_bucket(server)
    with Proxy(server) as proxy:
        a, b = (StoreHost(tmp_path / name, proxy) for name in "ab")
        yield proxy, a, b
        for host in (a, b):
            host.kill()


def random_faults(seed: int, share: float) -> object:
    choices = random.Random(seed)
    return lambda method, path: (
        choices.choice(FAULTS[: 5 if method == "PUT" else 4]) if choices.random() < share else ""
    )


def training(out: object) -> list[object]:
    return ["train", "--workers", 2, "--out", out, *flags(STEPS, checkpoint__every_steps=EVERY)]


@pytest.mark.long
def test_a_run_whose_host_is_lost_resumes_on_another_one_with_the_same_bits(hosts: Hosts) -> None:
    proxy, a, b = hosts
    a.run(*training("local"))
    reference = a.run("checkpoint", "digest", "local").stdout
    proxy.fault = random_faults(seed=1, share=0.15)
    first = a.start(*training(RUN), "--elastic.heartbeat_timeout_s", "1.5")
    wait_until(
        lambda: steps_of(newest_of(proxy, RUN).files), "a checkpoint in the store", process=first
    )
    a.kill()
    a.output += first.communicate()[0]
    assert (done := b.run(*training(RUN))).returncode == 0, done.stderr
    assert len(proxy.faults) > 5 and "waiting" in done.stderr and "resumes from step" in done.stderr
    proxy.fault = lambda method, path: ""
    assert reference and b.run("checkpoint", "digest", RUN).stdout == reference
    assert [
        line.split()[0] for line in b.run("checkpoint", "list", RUN).stdout.splitlines()[1:]
    ] == ["8", "16", "24"]
    assert b.run("checkpoint", "verify", RUN).stdout.splitlines() == [
        f"step {step} is whole" for step in (8, 16, 24)
    ]
    for out, folder in (("local.safetensors", "local"), ("stored.safetensors", RUN)):
        assert a.run("checkpoint", "export", folder, "--out", out).returncode == 0
    assert sha256_file(a.folder / "local.safetensors") == sha256_file(
        a.folder / "stored.safetensors"
    )
    uploaded = [event for event in read_events(b.folder) if event["event"] == "uploaded"]
    assert {event["step"] for event in uploaded} >= {24}
    # Damage in the store is found, and the checkpoint before it is whole.
    with mock.patch.dict(os.environ, environment(proxy.server, "unused")):
        address = parse_address(RUN)
        assert address
        bucket = RunBucket(address)
        snapshot = newest(bucket)
        assert snapshot
        blob = (
            f"blobs/{snapshot.files['checkpoints/step-00000024/tensors-00000.safetensors'][0][0]}"
        )
        bucket.write(blob, bucket.read(blob)[:-1])
        contents = b"".join(
            bucket.read(name) for name in [*bucket.list("blobs"), *bucket.list("snapshots")]
        )
    verified = b.run("checkpoint", "verify", RUN)
    assert (
        verified.returncode == 3
        and "step-00000024 is damaged" in verified.stdout
        and "step 16 is whole" in verified.stdout
    )
    assert b.run("checkpoint", "digest", RUN).returncode == 3
    local = b"".join(
        path.read_bytes() for host in (a, b) for path in host.folder.rglob("*") if path.is_file()
    )
    for secret in SECRETS:
        assert secret not in a.output + b.output and secret.encode() not in contents + local
    tokens = [path.read_bytes() for path in a.folder.parent.rglob("token")]
    assert tokens and not any(token in contents for token in tokens)


def read_events(folder: Path) -> list[dict[str, object]]:
    (path,) = [path for path in folder.rglob("events.jsonl") if "cache" in path.parts]
    return [json.loads(line) for line in path.read_text().splitlines()]


def loop(*words: object) -> list[object]:
    return ["run", "--workers", 1, SUPPORT / "stored_loop.py", "--pause_s", 0.05, *words]


@pytest.mark.long
def test_a_stopped_run_is_released_and_continues_elsewhere_at_once(hosts: Hosts) -> None:
    proxy, a, b = hosts
    first = a.start(*loop("--steps", 1000))
    wait_until(
        lambda: steps_of(newest_of(proxy, LOOP).files), "a checkpoint in the store", process=first
    )
    first.send_signal(signal.SIGTERM)
    output = first.communicate()[0]
    stopped = newest_of(proxy, LOOP)
    assert first.returncode == 75 and stopped.released, output
    last = steps_of(stopped.files)[-1]
    done = b.run(*loop("--steps", last + 2))
    assert (
        done.returncode == 0
        and "waiting" not in done.stderr
        and steps_of(newest_of(proxy, LOOP).files)[-1] == last + 2
    )


@pytest.mark.long
def test_a_killed_mirror_stops_the_run_and_the_same_host_continues_its_copy(hosts: Hosts) -> None:
    proxy, a, _ = hosts
    first = a.start(*loop("--steps", 1000))
    wait_until(
        lambda: steps_of(newest_of(proxy, LOOP).files), "a checkpoint in the store", process=first
    )
    first.kill()
    wait_until(lambda: not processes_in(a.folder), "the end of the workers")
    first.communicate()
    assert not newest_of(proxy, LOOP).released
    (copy,) = (a.folder / "cache").glob("*/loop")
    ahead = committed_steps(copy / "checkpoints")[-1]
    assert (
        ahead % 3 or ahead > steps_of(newest_of(proxy, LOOP).files)[-1]
    )  # saved when it was stopped
    done = a.run(*loop("--steps", ahead + 1))
    assert (
        done.returncode == 0
        and "waiting" not in done.stderr
        and "reading snapshot" not in done.stderr
    )
    assert {ahead, ahead + 1} <= set(steps_of(newest_of(proxy, LOOP).files))


@pytest.mark.long
def test_a_run_that_was_taken_over_stops_its_workers(hosts: Hosts) -> None:
    proxy, a, b = hosts
    first = a.start(*loop("--steps", 1000))
    wait_until(
        lambda: steps_of(newest_of(proxy, LOOP).files), "a checkpoint in the store", process=first
    )
    alive = b.run(*loop())
    assert alive.returncode == 2 and "already running" in alive.stderr
    first.send_signal(signal.SIGSTOP)  # the mirror alone, as if its host did not reach the store
    assert b.run(*loop("--steps", steps_of(newest_of(proxy, LOOP).files)[-1] + 1)).returncode == 0
    taken = newest_of(proxy, LOOP)
    first.send_signal(signal.SIGCONT)
    output = first.communicate()[0]
    assert first.returncode == 77 and "taken over" in output and not processes_in(a.folder)
    assert newest_of(proxy, LOOP) == taken
