"""Hosts that do not fit together: other code, other kernels. Real processes, real agents."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, Training

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
