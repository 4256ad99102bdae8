"""A tiny run on hosts without a shared disk, which meet in an object store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.forking import ForkedPopen
from support.hosts import Host, flags, read_steps
from support.launching import lockstep_command, run_command
from support.object_store import environment
from support.processes import processes_in
from support.waiting import wait_until

from lockstep.elastic.generation_log import NO_GENERATION, Generation, GenerationLog

RUN = "s3://runs/team/hosts"


@dataclass
class StoredTraining:
    """Agents of one run, with a folder for all files of each host.

    server  address of the store
    workers of each host
    nodes   MIN:MAX, as a scheduler starts the agents; "": with a list of the hosts
    """

    folder: Path
    hosts: Sequence[Host]
    server: str
    steps: int
    workers: int = 1
    nodes: str = ""
    values: dict[str, object] = field(default_factory=dict)
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, host: Host, *words: str) -> None:
        """Start the agent of a host."""
        (self.folder / host.name).mkdir(exist_ok=True)
        tables = [
            f'[[host]]\nname = "{one.name}"\naddress = "{one.address}"\nworkers = {self.workers}\n'
            for one in self.hosts
        ]
        (self.folder / host.name / "hosts.toml").write_text("\n".join(tables))
        listed, counted = (
            ["--hosts", "hosts.toml"],
            ["--nodes", self.nodes, "--workers", str(self.workers), "--address", host.address],
        )
        sizes = [*(counted if self.nodes else listed), "--host", host.name]
        command = ["launch", *sizes, "--out", RUN, *words, *flags(self.steps, **self.values)]
        with open(self.folder / f"{host.name}.out", "ab") as output:
            self.agents[host.name] = ForkedPopen(
                self.command(host, *command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                **self.options(host),
            )

    def run(self, host: Host, *words: str) -> str:
        """Run a command on a host; return its output."""
        return self.messages(host, *words, code=0)[0]

    def messages(self, host: Host, *words: str, code: int) -> tuple[str, str]:
        """Run a command on a host, which ends with `code`; return its output and its messages."""
        done = run_command(self.command(host, *words), **self.options(host))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    def command(self, host: Host, *words: str) -> list[str]:
        return [*host.enter, *lockstep_command(*words)]

    def options(self, host: Host) -> dict[str, object]:
        folder = self.folder / host.name
        environ = {
            **os.environ,
            **environment(self.server, folder / "cache"),
            "LOCKSTEP_STORE_BEAT_S": "1",
            "OMP_NUM_THREADS": "1",
        }
        (folder / "tmp").mkdir(exist_ok=True, parents=True)
        return {
            "cwd": folder,
            "env": environ | {"LOCKSTEP_TMP": str(folder / "tmp")},
            "start_new_session": True,
        }

    def copy(self, host: Host) -> Path:
        """Return the working copy of a host."""
        (copy,) = (self.folder / host.name / "cache").glob("*/hosts")
        return copy

    def newest(self, host: Host) -> Generation:
        """Return the newest generation that a host knows."""
        paths = list((self.folder / host.name / "cache").glob("*/hosts/generations"))
        return GenerationLog(paths[0]).newest() if paths else NO_GENERATION

    def leader_of(self, host: Host) -> str:
        """Return the host of rank 0 in the newest generation with members that a host knows."""
        log = GenerationLog(self.copy(host) / "generations")
        records = (log.read(number) for number in range(self.newest(host).number, 0, -1))
        return next(record.members[0].host for record in records if record.members)

    def step(self, host: Host) -> int:
        """Return the last step in the metrics of a host."""
        paths = list((self.folder / host.name / "cache").glob("*/hosts/metrics.jsonl"))
        lines = [
            line
            for path in paths
            for line in path.read_bytes().splitlines(keepends=True)
            if line.endswith(b"}\n")
        ]
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def lose(self, host: Host) -> None:
        """Kill all processes of a host, and lose its disk."""
        while pids := processes_in(self.folder / host.name):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        self.agents.pop(host.name).wait()
        shutil.rmtree(self.folder / host.name)

    def wait(self, done: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
        wait_until(done, what, timeout_s, running=self.is_running, report=self.report)

    def is_running(self) -> bool:
        return any(agent.poll() is None for agent in self.agents.values())

    def end(self, timeout_s: float = 180.0) -> dict[str, int]:
        """Wait for all agents; return their exit codes."""
        until_s = time.monotonic() + timeout_s
        return {
            name: agent.wait(max(0.1, until_s - time.monotonic()))
            for name, agent in self.agents.items()
        }

    def steps_of(self, host: Host) -> list[tuple[int, float, float | None]]:
        return read_steps(self.copy(host))

    def report(self) -> str:
        tails = [
            f"-- {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in sorted(self.folder.glob("*.out"))
        ]
        logs = [
            f"-- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in self.folder.glob("*/cache/*/hosts/logs/*")
        ]
        return "\n".join([*tails, *logs])

    def close(self) -> None:
        """Kill what is left."""
        for host in self.hosts:
            for pid in processes_in(self.folder / host.name):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents.values():
            agent.wait()
