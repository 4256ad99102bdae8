"""One command starts all hosts by ssh, with a real client and real servers in network namespaces:
signals and exit codes.

All other tests with several hosts run the same command on each host.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from support.docs_commands import make_folder, run_page
from support.fault_matrix import Reference
from support.hosts import SUBNET, Network, Training, flags, living, read_steps, why_no_hosts
from support.launching import ROOT, run_command
from support.object_store import environment, s3_server
from support.stored_hosts import RUN
from support.waiting import wait_until

from lockstep.checkpoint.commands import digest_line
from lockstep.elastic.generation_log import GenerationLog
from lockstep.record.events import read_events

STEPS = 60
CREDENTIALS = {name: value for name, value in environment("", "").items() if "KEY" in name}
SERVER = Path(__file__).parents[1] / "support" / "ssh_server.py"


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """A run on two hosts, each with an ssh server; not started yet."""
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
    (keys / "ssh").write_text(
        f'#!/bin/sh\nexec {client} -F none {options} "$@"\n'
    )  # nothing from the user's own configuration
    (keys / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{keys}:{os.environ['PATH']}")
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path / "training"))
    with Network(2) as network, ExitStack() as stack:
        for host in network.hosts:
            command = [*host.enter, sys.executable, str(SERVER), str(keys), host.address]
            # What a host knows by itself: the credentials of a store, and where its copies are.
            own = {
                **CREDENTIALS,
                "LOCKSTEP_STORE_CACHE": str(tmp_path / "training" / f"cache-{host.name}"),
            }
            server = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | own)
            )
            stack.callback(server.kill)
            assert server.stdout and server.stdout.readline() == b"listening\n"
        created = Training(tmp_path / "training", network.hosts, workers=1, steps=STEPS, start=())
        hosts = created.folder / "hosts.toml"
        hosts.write_text(f"ssh = true\n{hosts.read_text()}")
        stack.callback(created.close)
        yield created


def launch(training: Training, *words: str, out: str = "run") -> subprocess.Popen[bytes]:
    """Start all hosts from the first one."""
    command = [
        *training.hosts[0].enter,
        sys.executable,
        "-m",
        "lockstep",
        "launch",
        "--hosts",
        "hosts.toml",
        "--out",
        out,
        *words,
        *flags(STEPS),
    ]
    with open(training.folder / "ssh.out", "ab") as output:
        training.agents["ssh"] = subprocess.Popen(
            command, cwd=training.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    return training.agents["ssh"]


def test_a_run_started_by_ssh_stops_resumes_recovers_and_has_the_same_bits(
    training: Training, reference: Reference
) -> None:
    launcher = launch(training)
    training.wait_for_step(8)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 75, training.report()
    saved = training.step
    launch(training, "--with-evaluator")
    training.wait_for_step(saved + 4)
    before = training.newest
    training.kill(training.member(0, training.hosts[1]))
    training.wait_until_whole(before)
    training.assert_same_bits(reference(STEPS))
    shown = re.findall(
        r"^step +(\d+)/\d+  loss", (training.folder / "ssh.out").read_text(), re.MULTILINE
    )
    assert len(shown) == len(set(shown)) > STEPS // 10, "the shared terminal shows each step once"
    assert len(training.events("evaluator started")) == 1, training.events("evaluator started")


@pytest.mark.long
def test_the_run_continues_after_its_launcher_is_killed(
    training: Training, reference: Reference
) -> None:
    launcher = launch(training)
    training.wait_for_step(8)
    before = training.newest
    for process in (*psutil.Process(launcher.pid).children(), launcher):
        process.kill()
    wait_until(lambda: not living(training.folder), "the end", 60, report=training.report)
    end, truth = training.newest, reference(STEPS)
    assert end.number == before.number + 1 and end.end and end.end.code == 0, training.report()
    assert (
        read_steps(training.run) == truth.steps and digest_line(training.run, None) == truth.digest
    )
    training.assert_nothing_left()


@pytest.mark.long
def test_hosts_started_by_ssh_meet_in_a_store(
    training: Training, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = training.hosts[0]
    with s3_server(first.address, first.enter) as server:
        settings = {
            "AWS_ENDPOINT_URL": server,
            "AWS_REGION": "us-east-1",
            "LOCKSTEP_STORE_BEAT_S": "1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        doctor = [
            *first.enter,
            sys.executable,
            "-m",
            "lockstep",
            "doctor",
            "--hosts",
            "hosts.toml",
            "--out",
            RUN,
        ]
        done = run_command(doctor, cwd=training.folder)
        assert done.returncode == 0 and done.stdout.count("storing 1 MiB") == 2, (
            done.stdout + done.stderr
        )
        launcher = launch(training, out=RUN)
        copies = training.folder / "cache-b"
        wait_until(
            lambda: any(read_steps(path.parent) for path in copies.glob("*/hosts/metrics.jsonl")),
            "a step",
            process=launcher,
        )
        worker = next(
            generation.members[1]
            for path in copies.glob("*/hosts/generations")
            if (generation := GenerationLog(path).newest()).members
        )
        os.kill(worker.pid, signal.SIGKILL)
        assert launcher.wait(120) == 0, training.report()
        log = (training.folder / "ssh.out").read_text()
        assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in log
        words = [*first.enter, sys.executable, "-m", "lockstep", "checkpoint", "digest", RUN]
        environ = (
            os.environ | CREDENTIALS | {"LOCKSTEP_STORE_CACHE": str(training.folder / "reader")}
        )
        assert (
            subprocess.check_output(words, env=environ, text=True).strip()
            == reference(STEPS).digest
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["doctor", "--out", "run", "--wait", "20"], "a run can start on these hosts"),
        (["bench", "comm", "--out", "comm.json", "--sizes", "1 KiB, 1 MiB"], "other host: latency"),
    ],
    ids=["doctor", "bench comm"],
)
def test_one_command_examines_all_hosts_and_prints_one_report(
    training: Training, words: list[str], expected: str
) -> None:
    command = [
        *training.hosts[0].enter,
        sys.executable,
        "-m",
        "lockstep",
        *words,
        "--hosts",
        "hosts.toml",
    ]
    done = run_command(command, cwd=training.folder)
    assert done.returncode == 0 and done.stdout.count(expected) == 1, done.stdout + done.stderr


@pytest.mark.long
def test_the_commands_of_the_guide_run_on_two_hosts(training: Training) -> None:
    make_folder(training.folder)
    run_page("guides/several-hosts.md", training.folder, training.hosts[0].enter)
    run = training.folder / "shared" / "runs" / "own"
    assert {entry["host"] for entry in read_events(run) if entry["event"] == "worker started"} == {
        "a",
        "b",
    }


@pytest.mark.long
def test_the_commands_of_two_machines_run_from_keys_to_the_first_step(training: Training) -> None:
    page = (ROOT / "docs" / "guides" / "two-machines.md").read_text()
    [hosts] = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    make_folder(training.folder)
    (training.folder / "hosts.toml").write_text(hosts.replace("10.0.0.", SUBNET))
    run_page("guides/two-machines.md", training.folder, training.hosts[0].enter)
    run = training.folder / "shared" / "runs" / "first"
    started = [entry for entry in read_events(run) if entry["event"] == "worker started"]
    assert sorted(entry["host"] for entry in started) == ["ada", "ada", "grace", "grace"]
    assert len(read_steps(run)) == 100
