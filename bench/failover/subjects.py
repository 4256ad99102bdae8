"""The trainings that something happens to in failover.py: Lockstep's, torchrun's, torchft's. Three workers each."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

from support.hosts import HERE as THIS_HOST
from support.hosts import TINY, Host, Network, Training, living

from lockstep.config.resolve import resolve
from lockstep.config.saved_run import to_json
from lockstep.config.schema import ResolvedRun

HERE = Path(__file__).parent
TOP = HERE.parents[1]
WORKERS = 3
AFTER = 20  # steps, before a fault
STEPS = 100_000  # more than any try sees
SHARED = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{TOP / 'src'}:{TOP}",
}  # the environment of the others


def tiny() -> ResolvedRun:
    """The run of all of them."""
    return resolve(None, {key: str(value) for key, value in TINY.items()})


class Subject(ABC):
    """A training that something happens to. `step_s`, after the strike: the median of its steps before."""

    step_s: float

    @abstractmethod
    def ready(self) -> bool:
        """Whether all three workers have trained for a while."""

    @abstractmethod
    def strike(self, chance: random.Random, even: bool) -> dict[str, object]:
        """Cause the fault and return the affected worker. `even`: every second attempt, which may hit the leader."""

    @abstractmethod
    def back(self) -> bool:
        """Whether a step was committed without the affected workers."""

    def restore(self) -> None:
        """Restart the killed agent or host, restore the cut link; by default nothing."""
        return

    @abstractmethod
    def whole(self) -> bool:
        """Whether three workers train."""

    @abstractmethod
    def over(self) -> bool:
        """Whether all processes exited."""

    @abstractmethod
    def close(self) -> None:
        """Kill the remaining processes."""


class Lockstep(Subject):
    """lockstep launch on this machine, or on three hosts with one worker each."""

    def __init__(self, folder: Path, data: Path, *, fault: str, hosts: int) -> None:
        (folder / "run").mkdir()
        (folder / "run" / "data").symlink_to(data)
        self.fault, self.held = fault, ExitStack()
        self.network = self.held.enter_context(Network(hosts)) if hosts > 1 else None
        self.hosts: Sequence[Host] = self.network.hosts if self.network else [THIS_HOST]
        self.training = Training(folder, self.hosts, WORKERS // hosts, STEPS)
        self.held.callback(self.training.close)

    def ready(self) -> bool:
        return self.training.step >= AFTER and len(self.training.newest.members) == WORKERS

    def strike(self, chance: random.Random, even: bool) -> dict[str, object]:
        training = self.training
        self.before = training.newest
        steps = [
            json.loads(line) for line in (training.run / "metrics.jsonl").read_text().splitlines()
        ]
        self.step_s = median(step["seconds"] for step in steps[5:])
        leader, *others = self.before.members
        met = (
            leader
            if self.fault == "leader" or (even and self.fault != "worker")
            else chance.choice(others)
        )
        self.host = next(host for host in self.hosts if host.name == met.host)
        if self.fault == "leader":
            training.kill(met)
            training.kill_agent(self.host)
            training.start_agent(self.host)
        elif self.fault == "host":
            training.kill_host(self.host)
        elif self.fault == "silence":
            self.network.disconnect(self.host)  # type: ignore[union-attr]
        else:
            training.kill(met, number=signal.SIGSTOP if self.fault == "stop" else signal.SIGKILL)
        return {
            "met": met.id.rpartition("/")[0],
            "led": met == leader,
            "at_step": steps[-1]["step"],
        }

    def back(self) -> bool:
        """Whether metrics.jsonl has a step of the next generation."""
        log, number = self.training.log, self.before.number + 1
        return self.training.newest.number >= number and self.training.step > log.read(number).step

    def restore(self) -> None:
        if self.fault == "host":
            self.training.start_agent(self.host)
        elif self.fault == "silence":
            self.network.reconnect(self.host)  # type: ignore[union-attr]

    def whole(self) -> bool:
        newest = self.training.newest
        return (
            newest.number > self.before.number
            and len(newest.members) == WORKERS
            and self.training.step > newest.step
        )

    def over(self) -> bool:
        return all(agent.poll() is not None for agent in self.training.agents.values())

    def close(self) -> None:
        self.held.close()


class Other(Subject):
    """Processes that write steps.jsonl (failover/loop.py); one of them is killed."""

    def __init__(self, folder: Path, data: Path) -> None:
        (folder / "run.json").write_text(json.dumps(to_json(tiny())))
        self.folder = folder
        self.task = [str(folder / "run.json"), str(data), str(folder)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a process that lives in the folder."""
        with open(self.folder / "log", "ab") as log:
            its = {**os.environ, **SHARED, **environ}
            self.processes.append(
                subprocess.Popen(command, cwd=self.folder, env=its, stdout=log, stderr=log)
            )

    def steps(self) -> list[dict[str, float]]:
        """The lines so far, without one that is being written."""
        with suppress(OSError):
            return [
                json.loads(line)
                for line in (self.folder / "steps.jsonl")
                .read_text()
                .rpartition("\n")[0]
                .splitlines()
            ]
        return []

    def last(self) -> list[dict[str, float]]:
        """The lines of the last steps, of all ranks."""
        return self.steps()[-AFTER * WORKERS :]

    def ready(self) -> bool:
        last = self.last()
        together = (
            len({line["group"] for line in last}) == 1
            and len({line["rank"] for line in last}) == WORKERS
        )
        return together and len(last) == AFTER * WORKERS

    def strike(self, chance: random.Random, even: bool) -> dict[str, object]:
        last, rank = self.last(), chance.randrange(WORKERS)
        self.group = last[-1]["group"]
        self.step_s = median(
            b["at_s"] - a["at_s"]
            for a, b in pairwise(line for line in last if line["rank"] == rank)
        )
        os.kill(
            next(int(line["pid"]) for line in reversed(last) if line["rank"] == rank),
            signal.SIGKILL,
        )
        return {"met": f"rank {rank}", "at_step": last[-1]["step"]}

    def back(self) -> bool:
        """Whether the restarted workers passed the newest step before the fault."""
        steps = self.steps()
        reached = max(line["step"] for line in steps if line["group"] == self.group)
        return any(line["step"] > reached for line in steps if line["group"] != self.group)

    def over(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in living(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Torchrun(Other):
    """torchrun restarts all workers from the checkpoint."""

    def __init__(self, folder: Path, data: Path, *, environ: Mapping[str, str]) -> None:
        super().__init__(folder, data)
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(WORKERS),
            "--max-restarts",
            "10",
        ]
        self.start([*torchrun, str(HERE / "with_torchrun.py"), *self.task], environ)

    def whole(self) -> bool:
        return True


class Torchft(Other):
    """The other replicas continue. The killed one is not restarted; the lighthouse stays alive."""

    def __init__(
        self, folder: Path, data: Path, *, python: str, reduce: str, limits: Mapping[str, int]
    ) -> None:
        super().__init__(folder, data)
        script = str(HERE / "with_torchft.py")
        with open(folder / "lighthouse.log", "wb") as log:
            command = [python, script, "lighthouse", json.dumps(limits)]
            self.lighthouse = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **SHARED},
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.lighthouse.stdout
        url = (
            next(line for line in self.lighthouse.stdout if line.startswith(b"http"))
            .decode()
            .strip()
        )
        for rank in range(WORKERS):
            environ = {"RANK": str(rank), "WORLD_SIZE": str(WORKERS), "TORCHFT_LIGHTHOUSE": url}
            self.start([python, script, *self.task, reduce], environ)

    def whole(self) -> bool:
        return False

    def close(self) -> None:
        self.lighthouse.kill()
        self.lighthouse.communicate()
        super().close()
