"""Hosts that do not fit together: other code, other kernels, a folder that two of them start. Real processes, real agents."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.hosts import Host, Network, Training, living, why_no_hosts

from lockstep.elastic.generation_log import Arbiter

LOOP = Path(__file__).parents[1] / "support" / "small_loop.py"
EDITED = LOOP.read_text().replace("SCALE = 1.0\n", "SCALE = 1.001\n")
OTHER_KERNELS = {"MKL_CBWR": "COMPATIBLE"}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Training]]:
    """Starts trainings of small_loop.py on hosts of one worker, and ends what they leave."""
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    (tmp_path / "loop.py").write_text(LOOP.read_text())
    started: list[Training] = []

    def start_one(*hosts: Host, **values: Any) -> Training:
        started.append(Training(tmp_path, hosts, workers=1, script="loop.py:train", steps=5000, **values))
        return started[-1]

    yield start_one
    for one in started:
        one.close()


def run_by_environment(folder: Path, text: str, environ: dict[str, str]) -> list[tuple[int, str]]:
    """Run small_loop.py as rank 0 and, with another text and environment in a folder of its own, as rank 1; (exit code, output) of each."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = str(one.getsockname()[1])
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    started = []
    for rank, (code, more) in enumerate([(LOOP.read_text(), {}), (text, environ)]):
        (folder / str(rank)).mkdir(parents=True)
        (folder / str(rank) / "small_loop.py").write_text(code)
        command = [sys.executable, str(folder / str(rank) / "small_loop.py")]
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(
            subprocess.Popen(
                command, cwd=folder, env=os.environ | place | ranks | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [one.communicate(timeout=120)[0] for one in started]
    return [(one.returncode, output) for one, output in zip(started, outputs, strict=True)]


def test_other_code_and_other_kernels_on_one_worker_of_a_start_are_refused_by_name(tmp_path: Path) -> None:
    for code, output in run_by_environment(tmp_path / "mixed", EDITED, OTHER_KERNELS):
        assert code and "the workers of this start would compute other bits: " in output, output
        assert "own loop is 'small_loop.py, sources " in output and "on rank 0 (" in output and "on rank 1 (" in output
        assert "MKL_CBWR is 'not set' on rank 0" in output and "'COMPATIBLE' on rank 1" in output
    assert not (tmp_path / "mixed" / "run" / "metrics.jsonl").exists()
    for code, output in run_by_environment(tmp_path / "alike", LOOP.read_text(), {}):
        assert code == 0, output


def test_a_host_with_other_code_or_other_kernels_cannot_join(start: Callable[..., Training], tmp_path: Path) -> None:
    hosts = [Host("a"), Host("b")]
    one = start(*hosts, start=hosts[:1])
    one.wait_for_step(5)
    before = one.newest

    def refused(host: Host, says: str) -> None:
        one.start_agent(host)
        agent = one.agents.pop("b")
        one.wait(lambda: agent.poll() is not None, what="the refusal")
        assert agent.returncode == 2 and one.says(says) and one.newest == before, one.story()

    (tmp_path / "loop.py").write_text(EDITED)
    refused(hosts[1], r"own loop is 'loop.py, sources \w+' there and 'loop.py, sources \w+' here \(there: b/0, here: a/0\)")
    (tmp_path / "loop.py").write_text(LOOP.read_text())
    refused(Host("b", enter=("env", "MKL_CBWR=COMPATIBLE")), r"MKL_CBWR is 'COMPATIBLE' there and 'not set' here")
    one.stop()
    assert one.end() == {"a": 75}


class SharedFolder:
    """Two hosts that see one folder, each started as if it were alone: without a hosts file, at 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, Arbiter(folder / "run" / "generations")
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, host: Host, name: str) -> subprocess.Popen[bytes]:
        """Start the run on a host that calls itself `name`, with a temporary folder of its own."""
        place = self.folder / f"tmp-{host.name}"
        place.mkdir(exist_ok=True)
        words = ["launch", "loop.py:train", "--out", "run", "--host", name, "--workers", "1", "--steps", "5000"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_TMP": str(place)}
        with open(self.folder / f"{host.name}.out", "wb") as output:
            command = [*host.enter, sys.executable, "-m", "lockstep", *words]
            self.agents.append(
                subprocess.Popen(command, cwd=self.folder, env=environ, stdout=output, stderr=output, start_new_session=True)
            )
        return self.agents[-1]

    def wait_for(self, done: Callable[[], bool], what: str) -> None:
        """Wait until `done()`."""
        until_s = time.monotonic() + 90
        while not done():
            shown = {path.name: path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.out")}
            assert time.monotonic() < until_s, f"{what} did not come: {shown}"
            time.sleep(0.05)

    def step(self) -> int:
        """Committed steps."""
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def newest(self) -> int:
        """The newest generation's number."""
        record = self.log.newest()
        return record.number if record else 0

    def end(self) -> None:
        """End all that is left."""
        for pid in living(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait()


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_two_hosts_that_start_one_folder_as_if_alone_do_not_fight_and_a_dead_one_can_be_followed(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP.read_text())
    with Network(2) as network:
        here, there = network.hosts
        shared = SharedFolder(tmp_path)
        try:
            first = shared.start(here, "a")
            shared.wait_for(lambda: shared.step() >= 15, "step 15")
            generation = shared.newest()
            for name in ("b", "a"):  # another host, also one that has the same name
                second = shared.start(there, name)
                shared.wait_for(lambda second=second: second.poll() is not None, "the refusal")  # type: ignore[misc]
                told = (tmp_path / f"{there.name}.out").read_text()
                assert second.returncode == 2 and "another training is running on host a" in told, told
                assert shared.newest() == generation and first.poll() is None
            before = shared.step()
            shared.wait_for(lambda: shared.step() > before, "a step after the refusals")

            for pid in living(tmp_path):  # the first host loses its power
                os.kill(pid, signal.SIGKILL)
            first.wait()
            shared.start(there, "b")
            before = shared.step()
            shared.wait_for(lambda: shared.newest() > generation and shared.step() > before, "a step of the other host")
            assert {member.host for member in shared.log.read(generation + 1).members} == {"b"}
            began = [line for line in map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines()) if line["event"] == "began"]
            assert began[-1]["step"] >= 10 and began[-1]["workers"][0].startswith("b/0/")
        finally:
            shared.end()
