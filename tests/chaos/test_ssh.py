"""One command starts all hosts by ssh, a real client and real servers in network namespaces: signals and exit codes come through.

The other way, the same command on each host, is what all other tests of several hosts use.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from support.hosts import Network, Training, Truth, flags, living, read_steps, undisturbed, why_no_hosts

from lockstep.checkpoint.commands import digest_line

STEPS = 60
SERVER = Path(__file__).parents[1] / "support" / "ssh_server.py"


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """What the run comes to undisturbed, on one worker."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), STEPS)


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """A run on two hosts, each with an ssh server; nothing is started yet."""
    asyncssh = pytest.importorskip("asyncssh")
    client = shutil.which("ssh")
    if why_not := ("" if client else "no ssh client") or why_no_hosts():
        pytest.skip(why_not)
    keys = tmp_path / "keys"
    (tmp_path / "training").mkdir()
    keys.mkdir()
    for name in ("host", "user"):
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(keys / name))
        key.write_public_key(str(keys / f"{name}.pub"))
        (keys / name).chmod(0o600)
    settings = {
        "IdentityFile": keys / "user",
        "UserKnownHostsFile": keys / "known",
        "StrictHostKeyChecking": "accept-new",
        "LogLevel": "ERROR",
    }
    options = " ".join(f"-o {name}={value}" for name, value in settings.items())
    (keys / "ssh").write_text(f'#!/bin/sh\nexec {client} -F none {options} "$@"\n')  # nothing of the person who tests
    (keys / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{keys}:{os.environ['PATH']}")
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path / "training"))
    with Network(2) as network, ExitStack() as held:
        for host in network.hosts:
            command = [*host.enter, sys.executable, str(SERVER), str(keys), host.address]
            server = held.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            held.callback(server.kill)
            assert server.stdout and server.stdout.readline() == b"listening\n"
        training = Training(tmp_path / "training", network.hosts, workers=1, steps=STEPS, start=())
        hosts = training.folder / "hosts.toml"
        hosts.write_text(f"ssh = true\n{hosts.read_text()}")
        held.callback(training.close)
        yield training


def launch(one: Training, *words: str) -> subprocess.Popen[bytes]:
    """Start all hosts from the first."""
    command = [
        *one.hosts[0].enter,
        sys.executable,
        "-m",
        "lockstep",
        "launch",
        "--hosts",
        "hosts.toml",
        "--out",
        "run",
        *words,
        *flags(STEPS),
    ]
    with open(one.folder / "ssh.out", "ab") as output:
        one.agents["ssh"] = subprocess.Popen(command, cwd=one.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    return one.agents["ssh"]


def test_a_run_that_is_started_by_ssh_is_stopped_healed_and_ends_with_its_bits(one: Training, truth: Truth) -> None:
    launcher = launch(one)
    one.wait_for_step(8)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 75, one.story()
    saved = one.step
    launch(one, "--with-evaluator")
    one.wait_for_step(saved + 4)
    before = one.newest
    one.kill(one.member(0, one.hosts[1]))
    one.wait_until_whole(before)
    one.judge(truth)
    shown = re.findall(r"^step (\d+)  loss", (one.folder / "ssh.out").read_text(), re.MULTILINE)
    assert len(shown) == len(set(shown)) > STEPS // 10, "one screen shows a step once"
    assert len(one.events("evaluator started")) == 1, one.events("evaluator started")


@pytest.mark.skipif(os.environ.get("LOCKSTEP_CHAOS") != "1", reason="the long part: LOCKSTEP_CHAOS=1")
def test_a_launcher_that_is_killed_leaves_the_run_to_itself(one: Training, truth: Truth) -> None:
    launcher = launch(one)
    one.wait_for_step(8)
    before = one.newest
    for process in (*psutil.Process(launcher.pid).children(), launcher):
        process.kill()
    until_s = time.monotonic() + 60
    while living(one.folder):
        assert time.monotonic() < until_s, one.story()
        time.sleep(0.05)
    end = one.newest
    assert end.number == before.number + 1 and end.end and end.end.code == 0, one.story()
    assert read_steps(one.run) == truth.steps and digest_line(one.run, None) == truth.digest
    one.leaves_nothing()
