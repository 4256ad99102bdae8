"""Hosts for tests, and a training on them with injected faults and a check of the result.

    with Network(3) as network:                 three hosts: network namespaces on one switch; needs root
        training = Training(folder, network.hosts)
        training.wait_for_step(10)
        training.kill(training.leader)
        training.assert_same_bits(undisturbed)  same bits, each step once, nothing left

A namespace exists as long as a process runs in it. Each has a holder process, which exits with this
process, so nothing is left behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.forking import ForkedPopen
from support.launching import lockstep_command, run_command, run_lockstep
from support.waiting import wait_until

from lockstep.checkpoint.commands import digest_line
from lockstep.elastic import fault_injection as fault
from lockstep.elastic.generation_log import Generation, GenerationLog, Member
from lockstep.runtime import status_board as board
from lockstep.runtime.status_board import Status
from lockstep.runtime.worker_env import ProcessIdentity, process_stat, running_workers, state_folder

NOWHERE = "02:00:00:00:00:01"  # a hardware address that no interface has
SUBNET = "10.77.0."
SWITCH = f"{SUBNET}254"
LISTEN_STATE = "0A"  # in /proc/net/tcp
LINE_BYTES = 4096  # more than two lines of metrics
# Eight micro-batches of a tiny model: a step of three workers takes 70 ms on two cores.
TINY = {
    "data.pairs": 3000,
    "data.held_out": 50,
    "tokenizer.vocab_size": 500,
    "model.dim": 32,
    "model.encoder_layers": 1,
    "model.decoder_layers": 1,
    "model.ffn_dim": 64,
    "batch.tokens": 256,
    "parallel.bucket_bytes": 50_000,  # several buckets
    "evaluate.at_end": 0,
    "checkpoint.every_steps": 10,
    "track.every_s": 0,
}


def flags(steps: int, **values: object) -> list[str]:
    """Return the command line flags of a tiny run; `elastic__heartbeat_timeout_s=1.5` sets elastic.heartbeat_timeout_s."""
    given = {
        "steps": steps,
        **TINY,
        **{name.replace("__", "."): value for name, value in values.items()},
    }
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def nested(values: dict[str, object]) -> dict[str, object]:
    """Return dotted keys as the tables of a run file."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


# Hosts.


@dataclass(frozen=True)
class Host:
    """A place for an agent and its workers; `enter` is the prefix of commands that run there."""

    name: str = "here"
    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()
    holder: int = 0

    def ports(self) -> list[int]:
        """Return the listening ports above 1023; [] for this machine itself, which other processes
        use too.
        """
        lines = (
            Path(f"/proc/{self.holder}/net/tcp").read_text().splitlines()[1:] if self.holder else []
        )
        rows = [line.split() for line in lines]
        ports = [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN_STATE]
        return [port for port in ports if port > 1023]


HERE = Host()


class Network:
    """Context manager: `size` hosts at 10.77.0.1, 10.77.0.2, ... on one switch, which has the
    address SWITCH.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            self.switch, *pids = [stack.enter_context(namespace()) for _ in range(self.size + 1)]
            ip(
                self.switch,
                "link add hub type bridge",
                "link set hub up",
                f"addr add {SWITCH}/24 dev hub",
                "link set lo up",
            )
            self.hosts = []
            for number, pid in enumerate(pids, 1):
                address = f"{SUBNET}{number}"
                ip(
                    self.switch,
                    f"link add to{number} type veth peer name eth0 netns {pid}",
                    f"link set to{number} master hub up",
                )
                ip(pid, f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up")
                self.hosts.append(Host(chr(96 + number), address, enter(pid), pid))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def _port(self, host: Host) -> str:
        return f"to{self.hosts.index(host) + 1}"

    def disconnect(self, host: Host) -> None:
        """Take down the host's port of the switch."""
        ip(self.switch, f"link set {self._port(host)} down")

    def reconnect(self, host: Host) -> None:
        """Bring the port up again."""
        ip(self.switch, f"link set {self._port(host)} up")

    def drop_packets(self, source: Host, target: Host) -> None:
        """Drop all packets from `source` to `target`; the other direction works."""
        ip(source.holder, f"neigh replace {target.address} lladdr {NOWHERE} dev eth0 nud permanent")

    def restore_packets(self, source: Host, target: Host) -> None:
        """Undo `drop_packets`."""
        ip(source.holder, f"neigh del {target.address} dev eth0")

    def limit_rate(self, host: Host, rate: str = "1mbit") -> None:
        """Limit the rate of the host's link, in each direction."""
        for pid, name in ((self.switch, self._port(host)), (host.holder, "eth0")):
            command = f"tc qdisc replace dev {name} root tbf rate {rate} burst 16kb latency 400ms"
            subprocess.run([*enter(pid), *command.split()], check=True)


class namespace:
    """Context manager for a new network namespace; returns the pid of its holder process."""

    def __enter__(self) -> int:
        self.holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self.holder.stdin and self.holder.stdout
        with suppress(BrokenPipeError):
            self.holder.stdin.write(b"?")
        if not self.holder.stdout.read(1):
            raise PermissionError("cannot create a network namespace here")
        return self.holder.pid

    def __exit__(self, *error: object) -> None:
        self.holder.communicate()


def enter(pid: int) -> tuple[str, ...]:
    """Return the prefix of commands that run in the network namespace of `pid`."""
    return "nsenter", f"--net=/proc/{pid}/ns/net", "--"


def ip(pid: int, *commands: str) -> None:
    """Run `ip` commands in the network namespace of `pid`."""
    subprocess.run(
        [*enter(pid), "ip", "-batch", "-"], input="\n".join(commands), text=True, check=True
    )


def why_no_hosts() -> str:
    """Return why network namespaces cannot be created here; "" if they can."""
    try:
        with Network(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces: {error}"


# A training.


@dataclass(frozen=True)
class Truth:
    """The result of an undisturbed run: its folder, its digest, and (step, loss, norm) of each step."""

    run: Path
    digest: str
    steps: list[tuple[int, float, float | None]]


@dataclass
class Training:
    """A tiny run under an agent on each of `hosts`, started at once.

    `folder` contains all its files and is its working directory.

    workers  on each host
    words    more arguments of lockstep launch, such as ("--min", "3")
    script   a user's own loop, FILE.py:FUNCTION, with a parameter --steps; "": the tiny run
    """

    folder: Path
    hosts: Sequence[Host] = (HERE,)
    workers: int = 3
    steps: int = 40
    words: Sequence[str] = ()
    values: dict[str, object] = field(default_factory=dict)
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    start: Sequence[Host] | None = None
    script: str = ""
    known: Generation | None = None

    def __post_init__(self) -> None:
        self.run = self.folder / "run"
        self.log = GenerationLog(self.run / "generations")
        tables = [
            f'[[host]]\nname = "{host.name}"\naddress = "{host.address}"\nworkers = {self.workers}\n'
            for host in self.hosts
        ]
        (self.folder / "hosts.toml").write_text("\n".join(tables))
        for host in self.hosts if self.start is None else self.start:
            self.start_agent(host)

    def start_agent(self, host: Host = HERE) -> None:
        """Start the agent of a host, or a new one after its exit."""
        what = [self.script] if self.script else []
        values = ["--steps", str(self.steps)] if self.script else flags(self.steps, **self.values)
        words = [*what, "--hosts", "hosts.toml", "--host", host.name, "--out", "run", *self.words]
        command = [*host.enter, *lockstep_command("launch", *words, *values)]
        environ = {
            name: value
            for name, value in os.environ.items()
            if name == "LOCKSTEP_TMP" or not name.startswith("LOCKSTEP_")
        }
        with open(self.folder / f"{host.name}.out", "ab") as output:
            self.agents[host.name] = ForkedPopen(
                command,
                cwd=self.folder,
                env=environ | {fault.DRILL_VARIABLE: "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    # -- status ------------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The last step in the metrics, from the last complete line; takes constant time."""
        with suppress(OSError), open(self.run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LINE_BYTES))
            for line in reversed(file.read().splitlines(keepends=True)):
                if line.startswith(b"{") and line.endswith(b"}\n"):
                    return int(json.loads(line)["step"])
        return 0

    @property
    def shown(self) -> int:
        """The last step printed to a terminal, which does not need the run folder."""
        text = "".join(path.read_text(errors="replace") for path in self.folder.glob("*.out"))
        return max(
            [
                0,
                *(
                    int(step.replace(",", ""))
                    for step in re.findall(r"^step +([\d,]+)/[\d,]+  loss", text, re.MULTILINE)
                ),
            ]
        )

    @property
    def newest(self) -> Generation:
        """The newest generation; AssertionError if there is none."""
        newest = self.log.newest(self.known.number if self.known else 0)
        self.known = newest if newest.number else self.known
        assert self.known, "no generation yet"
        return self.known

    @property
    def generations(self) -> list[Generation]:
        """All generations, in order."""
        return [self.log.read(number) for number in range(1, self.newest.number + 1)]

    @property
    def leader(self) -> Member:
        """Rank 0 of the newest generation."""
        return self.newest.members[0]

    def member(self, slot: int, host: Host = HERE) -> Member:
        """Return the member in a slot, in the newest generation."""
        return next(
            member
            for member in self.newest.members
            if (member.host, member.slot) == (host.name, slot)
        )

    def processes(self, host: Host = HERE) -> dict[int, ProcessIdentity]:
        """Return slot -> worker process that the agent has recorded, whether or not it is in a
        generation.
        """
        return running_workers(self.state(host))

    def forkserver(self, host: Host = HERE) -> int:
        """Return the pid of the agent's forkserver."""
        agent = self.agents[host.name].pid
        children = [
            int(word) for word in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        ]
        return next(
            pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "lockstep-forker\n"
        )

    def state(self, host: Host = HERE) -> Path:
        """Return the state folder of a host."""
        return state_folder(self.run, host.name)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name."""
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, filter(None, lines)) if event["event"] == name]

    def doing(self, slot: int, host: Host = HERE) -> Status:
        """Return the status on the worker's board."""
        return board.read_status(self.state(host) / f"{slot}.board")

    def injected_faults(self) -> list[tuple[str, int]]:
        """Return (point, step) of each fault that was carried out."""
        return [
            (point, int(step))
            for point, step in re.findall(r"injecting \w+ at (\w+) of step (\d+)", self.text())
        ]

    def text(self) -> str:
        """Return the output of all agents and workers."""
        logs = [*self.folder.glob("*.out"), *self.run.glob("logs/*-[1-9].log")]
        return "\n".join(path.read_text(errors="replace") for path in logs)

    def wrote(self, pattern: str) -> bool:
        """Return whether the output of the agents and workers matches."""
        return re.search(pattern, self.text()) is not None

    # -- waiting ------------------------------------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], timeout_s: float = 120.0, *, what: str = "") -> float:
        """Wait until `done()`; return the seconds."""
        return wait_until(
            done, what or "the condition", timeout_s, running=self.is_running, report=self.report
        )

    def is_running(self) -> bool:
        return any(agent.poll() is None for agent in self.agents.values())

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> float:
        """Wait until `step` is committed."""
        return self.wait(lambda: self.step >= step, timeout_s, what=f"step {step}")

    def wait_until_back(
        self, since: Generation, count: int | None = None, timeout_s: float = 120.0
    ) -> float:
        """Wait until a generation after `since`, of any size or of `count` workers, has committed a
        step.
        """

        def back() -> bool:
            now = self.newest
            return (
                now.number > since.number
                and len(now.members) == (count or len(now.members))
                and self.step > now.step
            )

        return self.wait(back, timeout_s, what=f"a step of a generation after {since.number}")

    def wait_until_whole(self, since: Generation) -> float:
        """Wait until a generation after `since` has all workers and has committed a step."""
        return self.wait_until_back(since, self.workers * len(self.hosts))

    def wait_until_joining(self, slot: int, host: Host = HERE) -> float:
        """Wait until the worker in `slot` has left its process group."""
        return self.wait(
            lambda: self.doing(slot, host).phase == "joining",
            what=f"the end of the group of slot {slot}",
        )

    def report(self) -> str:
        """Describe what happened so far, for a failing test."""
        generations = [
            f"{number}: {record.reason} (step {record.step}, {len(record.members)})"
            for number, record in list(enumerate(self.generations, 1))[-30:]
        ]
        tails = [
            f"-- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.folder.glob("*.out"))
        ]
        return "\n".join([f"step {self.step}", *generations, *tails])

    # -- faults --------------------------------------------------------------------------------------------------------------

    def kill(self, *members: Member | ProcessIdentity, number: int = signal.SIGKILL) -> None:
        """Send workers a signal."""
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member.pid, number)

    def kill_agent(self, host: Host = HERE, number: int = signal.SIGKILL) -> None:
        """Send the agent a signal; wait for its exit after SIGKILL."""
        self.agents[host.name].send_signal(number)
        if number == signal.SIGKILL:
            self.agents[host.name].wait()

    def kill_host(self, host: Host) -> None:
        """Kill all processes of a host, the agent first, as a power loss does."""
        self.kill_agent(host)
        self.kill(*self.processes(host).values())

    def request_fault(
        self, slot: int, what: fault.FaultKind, host: Host = HERE, **where: Any
    ) -> None:
        """Request a fault of the worker in `slot`."""
        fault.request_fault(self.state(host), slot, what, **where)

    def withdraw_fault(self, slot: int, host: Host = HERE) -> None:
        """Withdraw a request."""
        (self.state(host) / f"{slot}.fault").unlink(missing_ok=True)

    def fault_taken(self, slot: int, host: Host = HERE) -> bool:
        """Return whether the worker has taken the request."""
        return not (self.state(host) / f"{slot}.fault").exists()

    def inject_fault(
        self, slot: int, what: fault.FaultKind, host: Host = HERE, **where: Any
    ) -> None:
        """Request a fault and wait until the worker has taken it."""
        self.request_fault(slot, what, host, **where)
        self.wait(lambda: self.fault_taken(slot, host), what=f"{what} at {where}")

    # -- results ------------------------------------------------------------------------------------------------------------

    def end(self, timeout_s: float = 120.0) -> dict[str, int]:
        """Wait for all agents; return their exit codes."""
        until_s = time.monotonic() + timeout_s
        return {
            name: agent.wait(max(0.1, until_s - time.monotonic()))
            for name, agent in self.agents.items()
        }

    def stop(self) -> None:
        """Ask the run to save and stop, as a user does, from the first host.

        Its agents exit with 75.
        """
        command = [*self.hosts[0].enter, *lockstep_command("launch", "--stop", "run")]
        run_command(command, cwd=self.folder, check=True)

    def assert_same_bits(self, truth: Truth, *, code: int = 0, timeout_s: float = 120.0) -> None:
        """Wait for the end; assert the exit code, the bits and steps of the undisturbed run, and
        that nothing is left.
        """
        codes = self.end(timeout_s)
        assert set(codes.values()) == {code}, f"{codes}\n{self.report()}"
        assert read_steps(self.run) == truth.steps, self.report()
        assert digest_line(self.run, None) == truth.digest, self.report()
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """Assert that no process, port or temporary file is left."""
        assert not living(self.folder), (
            f"{[Path(f'/proc/{pid}/cmdline').read_text() for pid in living(self.folder)]} are still running"
        )
        assert not [host.ports() for host in self.hosts if host.ports()]
        assert not list((self.run / "waiting").glob("*"))
        left = Counter(path.name for host in self.hosts for path in self.state(host).iterdir())
        assert set(left) == {"agent.lock"}, left

    def close(self) -> None:
        """Kill the processes that are left."""
        for pid in living(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents.values():
            agent.wait()


def read_steps(run: Path) -> list[tuple[int, float, float | None]]:
    """Return (step, loss, norm) of each line of the metrics. None: an inner step of DiLoCo."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line.get("norm")) for line in lines]


def living(folder: Path) -> list[int]:
    """Return the pids of all processes whose working directory is `folder`."""
    pids = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and os.readlink(entry / "cwd") == str(folder):
                pids += [int(entry.name)] if process_stat(int(entry.name))[0] != "Z" else []
    return pids


def undisturbed(folder: Path, steps: int, **values: object) -> Truth:
    """Run undisturbed and return the result.

    One worker: its bits are those of any number of workers.
    """
    words = ("--workers", 1, "--out", "run", *flags(steps, **values))
    run_lockstep("train", *words, cwd=folder, check=True)
    return truth_of(folder / "run")


def truth_of(run: Path) -> Truth:
    return Truth(run, digest_line(run, None), read_steps(run))
