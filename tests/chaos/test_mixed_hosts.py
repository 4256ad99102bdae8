"""Incompatible hosts: different code, different kernels, one folder started twice.

Real processes, real agents.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.forking import ForkedPopen
from support.hosts import Host, Network, Training, living, why_no_hosts
from support.launching import lockstep_command
from support.waiting import wait_until

from lockstep.elastic.generation_log import GenerationLog

LOOP = Path(__file__).parents[1] / "support" / "small_loop.py"
EDITED = LOOP.read_text().replace("SCALE = 1.0\n", "SCALE = 1.001\n")
OTHER_KERNELS = {"MKL_CBWR": "COMPATIBLE"}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Training]]:
    """Start trainings of small_loop.py on hosts of one worker, and kill what they leave."""
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    (tmp_path / "loop.py").write_text(LOOP.read_text())
    started: list[Training] = []

    def start_training(*hosts: Host, **values: Any) -> Training:
        started.append(
            Training(tmp_path, hosts, workers=1, script="loop.py:train", steps=5000, **values)
        )
        return started[-1]

    yield start_training
    for training in started:
        training.close()


def run_by_environment(folder: Path, text: str, environ: dict[str, str]) -> list[tuple[int, str]]:
    """Run small_loop.py as rank 0 and, with other source code and environment, as rank 1; return
    (exit code, output) of each.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    started = []
    for rank, (code, extra) in enumerate([(LOOP.read_text(), {}), (text, environ)]):
        (folder / str(rank)).mkdir(parents=True)
        (folder / str(rank) / "small_loop.py").write_text(code)
        command = [sys.executable, str(folder / str(rank) / "small_loop.py")]
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | world | ranks | extra,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def test_different_code_and_kernels_are_refused_and_named(tmp_path: Path) -> None:
    for code, output in run_by_environment(tmp_path / "mixed", EDITED, OTHER_KERNELS):
        assert code and "the workers of this start would compute different bits: " in output, output
        assert (
            "own loop is 'small_loop.py, sources " in output
            and "on rank 0 (" in output
            and "on rank 1 (" in output
        )
        assert "MKL_CBWR is 'not set' on rank 0" in output and "'COMPATIBLE' on rank 1" in output
    assert not (tmp_path / "mixed" / "run" / "metrics.jsonl").exists()
    for code, output in run_by_environment(tmp_path / "alike", LOOP.read_text(), {}):
        assert code == 0, output


@pytest.mark.long  # the test above has the refusal at a start
def test_a_host_with_different_code_or_kernels_cannot_join(
    start: Callable[..., Training], tmp_path: Path
) -> None:
    hosts = [Host("a"), Host("b")]
    training = start(*hosts, start=hosts[:1])
    training.wait_for_step(5)
    before = training.newest

    def refused(host: Host, message: str) -> None:
        training.start_agent(host)
        agent = training.agents.pop("b")
        training.wait(lambda: agent.poll() is not None, what="the refusal")
        assert agent.returncode == 2 and training.wrote(message) and training.newest == before, (
            training.report()
        )

    (tmp_path / "loop.py").write_text(EDITED)
    refused(
        hosts[1],
        r"own loop is 'loop.py, sources \w+' there and 'loop.py, sources \w+' here \(there: b/0, here: a/0\)",
    )
    (tmp_path / "loop.py").write_text(LOOP.read_text())
    refused(
        Host("b", enter=("env", "MKL_CBWR=COMPATIBLE")),
        r"MKL_CBWR is 'COMPATIBLE' there and 'not set' here",
    )
    training.stop()
    assert training.end() == {"a": 75}


class SharedFolder:
    """Two hosts that share a folder, each started as a single host: without a hosts file, at
    127.0.0.1.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, GenerationLog(folder / "run" / "generations")
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, host: Host, name: str) -> subprocess.Popen[bytes]:
        """Start the run on a host named `name`, with its own temporary folder."""
        temporary = self.folder / f"tmp-{host.name}"
        temporary.mkdir(exist_ok=True)
        words = [
            "launch",
            "loop.py:train",
            "--out",
            "run",
            "--host",
            name,
            "--workers",
            "1",
            "--steps",
            "5000",
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_TMP": str(temporary)}
        with open(self.folder / f"{host.name}.out", "wb") as output:
            command = [*host.enter, *lockstep_command(*words)]
            self.agents.append(
                ForkedPopen(
                    command,
                    cwd=self.folder,
                    env=environ,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        return self.agents[-1]

    def wait_for(self, result: Callable[[], bool], what: str) -> None:
        wait_until(result, what, 90, report=self.report)

    def report(self) -> str:
        paths = self.folder.glob("*.out")
        return str({path.name: path.read_text(errors="replace")[-3000:] for path in paths})

    def step(self) -> int:
        """Return the number of committed steps."""
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def newest(self) -> int:
        """Return the number of the newest generation."""
        return self.log.newest().number

    def end(self) -> None:
        """Kill the processes that are left."""
        for pid in living(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait()


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_a_second_host_is_refused_while_the_first_trains_and_can_resume_after_it_died(
    tmp_path: Path,
) -> None:
    (tmp_path / "loop.py").write_text(LOOP.read_text())
    with Network(2) as network:
        here, there = network.hosts
        shared = SharedFolder(tmp_path)
        try:
            first = shared.start(here, "a")
            shared.wait_for(lambda: shared.step() >= 15, "step 15")
            generation = shared.newest()
            for name in ("b", "a"):  # another host, also with the same name
                second = shared.start(there, name)
                shared.wait_for(lambda second=second: second.poll() is not None, "the refusal")  # type: ignore[misc]
                output = (tmp_path / f"{there.name}.out").read_text()
                assert (
                    second.returncode == 2 and "another training is running on host a" in output
                ), output
                assert shared.newest() == generation and first.poll() is None
            before = shared.step()
            shared.wait_for(lambda: shared.step() > before, "a step after the refusals")

            for pid in living(tmp_path):  # a power loss of the first host
                os.kill(pid, signal.SIGKILL)
            first.wait()
            shared.start(there, "b")
            before = shared.step()
            shared.wait_for(
                lambda: shared.newest() > generation and shared.step() > before,
                "a step of the other host",
            )
            assert {member.host for member in shared.log.read(generation + 1).members} == {"b"}
            starts = [
                line
                for line in map(
                    json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines()
                )
                if line["event"] == "began"
            ]
            assert starts[-1]["step"] >= 10 and starts[-1]["workers"][0].startswith("b/0/")
        finally:
            shared.end()
