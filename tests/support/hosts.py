"""Hosts for tests, and a training over them that is disturbed and then judged.

    with Network(3) as network:                 three hosts: network namespaces on one switch, as root
        training = Training(folder, network.hosts)
        training.wait_for_step(10)
        training.kill(training.leader)
        training.judge(undisturbed)             the same bits, each step once, nothing left over

A namespace lives as long as a process in it. Each has a keeper, which ends when this process does: nothing has a name, nothing is left.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.checkpoint.commands import digest_line
from lockstep.elastic import fault_injection as fault
from lockstep.elastic.generation_log import Arbiter, Member, Record
from lockstep.runtime import status_board as board
from lockstep.runtime.status_board import Doing
from lockstep.runtime.worker_env import Sitter, look, sitters, state_folder

NOWHERE = "02:00:00:00:00:01"  # a hardware address that nobody has
LISTENS = "0A"  # in /proc/net/tcp
LINE_BYTES = 4096  # more than two lines of metrics
# Eight micro-batches of a model so small that a step takes three workers on two cores 70 ms.
TINY = {
    "data.pairs": 3000,
    "data.held_out": 50,
    "tokens.vocabulary": 500,
    "model.width": 32,
    "model.encoder_layers": 1,
    "model.decoder_layers": 1,
    "model.feed_forward": 64,
    "batch.tokens": 256,
    "parallel.bucket_bytes": 50_000,  # several buckets
    "evaluate.at_end": 0,
    "save.every_steps": 10,
    "track.log_every": 5,
}


def flags(steps: int, **values: object) -> list[str]:
    """The words for a tiny run; `heal__silent_s=1.5` for heal.silent_s."""
    given = {"steps": steps, **TINY, **{name.replace("__", "."): value for name, value in values.items()}}
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


# Hosts.


@dataclass(frozen=True)
class Host:
    """A place for an agent and its workers; `enter` is what a command begins with to run there."""

    name: str = "here"
    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()
    keeper: int = 0

    def ports(self) -> list[int]:
        """The ports above 1023 on which something listens there; not asked of this machine, on which others live too."""
        lines = Path(f"/proc/{self.keeper}/net/tcp").read_text().splitlines()[1:] if self.keeper else []
        rows = [line.split() for line in lines]
        ports = [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS]
        return [port for port in ports if port > 1023]


HERE = Host()


class Network:
    """`size` hosts at 10.77.0.1, 10.77.0.2, ... on a switch of their own, as long as it is entered."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> Network:
        with ExitStack() as held:
            self.switch, *pids = [held.enter_context(namespace()) for _ in range(self.size + 1)]
            ip(self.switch, "link add hub type bridge", "link set hub up")
            self.hosts = []
            for number, pid in enumerate(pids, 1):
                address = f"10.77.0.{number}"
                ip(self.switch, f"link add to{number} type veth peer name eth0 netns {pid}", f"link set to{number} master hub up")
                ip(pid, f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up")
                self.hosts.append(Host(chr(96 + number), address, enter(pid), pid))
            self.held = held.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.held.close()

    def _port(self, host: Host) -> str:
        return f"to{self.hosts.index(host) + 1}"

    def cut(self, host: Host) -> None:
        """Pull the host's cable out of the switch."""
        ip(self.switch, f"link set {self._port(host)} down")

    def mend(self, host: Host) -> None:
        """Plug it in again."""
        ip(self.switch, f"link set {self._port(host)} up")

    def drop(self, source: Host, target: Host) -> None:
        """Lose all that `source` sends to `target`; the other way works."""
        ip(source.keeper, f"neigh replace {target.address} lladdr {NOWHERE} dev eth0 nud permanent")

    def deliver(self, source: Host, target: Host) -> None:
        """Lose it no longer."""
        ip(source.keeper, f"neigh del {target.address} dev eth0")

    def shape(self, host: Host, rate: str = "1mbit") -> None:
        """Let so much through the host's cable, each way."""
        for pid, name in ((self.switch, self._port(host)), (host.keeper, "eth0")):
            command = f"tc qdisc replace dev {name} root tbf rate {rate} burst 16kb latency 400ms"
            subprocess.run([*enter(pid), *command.split()], check=True)


class namespace:
    """The number of a process that keeps a new network namespace, as long as this is entered."""

    def __enter__(self) -> int:
        self.keeper = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self.keeper.stdin and self.keeper.stdout
        with suppress(BrokenPipeError):
            self.keeper.stdin.write(b"?")
        if not self.keeper.stdout.read(1):
            raise PermissionError("no network namespace can be made here")
        return self.keeper.pid

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.keeper.communicate()


def enter(pid: int) -> tuple[str, ...]:
    """What a command begins with to run in the network of `pid`."""
    return "nsenter", f"--net=/proc/{pid}/ns/net", "--"


def ip(pid: int, *commands: str) -> None:
    """Run `ip` commands in the network of `pid`."""
    subprocess.run([*enter(pid), "ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)


def why_no_hosts() -> str:
    """Why hosts cannot be made here; "" where they can."""
    try:
        with Network(1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces: {error}"


# A training.


@dataclass(frozen=True)
class Truth:
    """What a run that nothing happened to has come to: its digest, and loss and norm of each step."""

    digest: str
    steps: list[tuple[int, float, float]]


@dataclass
class Training:
    """A tiny run under an agent on each of `hosts`, started at once, with everything it makes in `folder`, also its processes' homes.

    workers  on each host
    words    of lockstep launch, besides: ("--min", "3")
    script   a user's own loop, FILE.py:FUNCTION, that takes --steps; "": the tiny run
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
    known: Record | None = None

    def __post_init__(self) -> None:
        self.run = self.folder / "run"
        self.log = Arbiter(self.run / "generations")
        tables = [f'[[host]]\nname = "{one.name}"\naddress = "{one.address}"\nworkers = {self.workers}\n' for one in self.hosts]
        (self.folder / "hosts.toml").write_text("\n".join(tables))
        for host in self.hosts if self.start is None else self.start:
            self.start_agent(host)

    def start_agent(self, host: Host = HERE) -> None:
        """Start the agent of a host, or another one in its place."""
        what = [self.script] if self.script else []
        values = ["--steps", str(self.steps)] if self.script else flags(self.steps, **self.values)
        words = [*what, "--hosts", "hosts.toml", "--host", host.name, "--out", "run", *self.words]
        command = [*host.enter, sys.executable, "-m", "lockstep", "launch", *words]
        environ = {name: value for name, value in os.environ.items() if name == "LOCKSTEP_TMP" or not name.startswith("LOCKSTEP_")}
        with open(self.folder / f"{host.name}.out", "ab") as output:
            self.agents[host.name] = subprocess.Popen(
                [*command, *values],
                cwd=self.folder,
                env=environ | {fault.DRILL: "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    # -- what it is doing ---------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Committed steps, as far as the metrics have them: the newest whole line says. Costs the same however many there are."""
        with suppress(OSError), open(self.run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LINE_BYTES))
            for line in reversed(file.read().splitlines(keepends=True)):
                if line.startswith(b"{") and line.endswith(b"}\n"):
                    return int(json.loads(line)["step"])
        return 0

    @property
    def shown(self) -> int:
        """The newest step on a screen, which is not in the run folder."""
        shown = "".join(path.read_text(errors="replace") for path in self.folder.glob("*.out"))
        return max([0, *(int(step.replace(",", "")) for step in re.findall(r"^step ([\d,]+)  loss", shown, re.MULTILINE))])

    @property
    def newest(self) -> Record:
        """The newest generation."""
        self.known = self.log.newest(self.known.number if self.known else 0) or self.known
        assert self.known, "no generation yet"
        return self.known

    @property
    def generations(self) -> list[Record]:
        """All of them, in order."""
        return [self.log.read(number) for number in range(1, self.newest.number + 1)]

    @property
    def leader(self) -> Member:
        """Who leads now."""
        return self.newest.members[0]

    def member(self, slot: int, host: Host = HERE) -> Member:
        """Who sits there, in the newest generation."""
        return next(one for one in self.newest.members if (one.host, one.slot) == (host.name, slot))

    def sitting(self, host: Host = HERE) -> dict[int, Sitter]:
        """Slot -> the worker that its agent has written down, in a generation or not yet."""
        return sitters(self.state(host))

    def zygote(self, host: Host = HERE) -> int:
        """The number of the agent's zygote."""
        agent = self.agents[host.name].pid
        found = [int(word) for word in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
        return next(pid for pid in found if Path(f"/proc/{pid}/comm").read_text() == "lockstep-zygote\n")

    def state(self, host: Host = HERE) -> Path:
        """The host's own folder."""
        return state_folder(self.run, host.name)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        path = self.run / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, filter(None, lines)) if event["event"] == name]

    def doing(self, slot: int, host: Host = HERE) -> Doing:
        """What its worker does, by its board."""
        return board.look(self.state(host) / f"{slot}.board")

    def orders_obeyed(self) -> list[tuple[str, int]]:
        """(place, step) of each fault that came to be."""
        return [(place, int(step)) for place, step in re.findall(r"obeying \w+ at (\w+) of step (\d+)", self.text())]

    def text(self) -> str:
        """All that the agents and workers have shown."""
        logs = [*self.folder.glob("*.out"), *self.run.glob("logs/*-[1-9].log")]
        return "\n".join(path.read_text(errors="replace") for path in logs)

    def says(self, pattern: str) -> bool:
        """Whether a line that the agents or workers have shown fits."""
        return re.search(pattern, self.text()) is not None

    # -- waiting ------------------------------------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], timeout_s: float = 60.0, *, what: str = "") -> float:
        """Wait until `done()`; how many seconds it took."""
        began_s = time.monotonic()
        while not done():
            waited = f"{what or 'what was waited for'} did not come"
            assert time.monotonic() < began_s + timeout_s, f"{waited} in {timeout_s:g} s\n{self.story()}"
            assert any(agent.poll() is None for agent in self.agents.values()) or done(), f"{waited} before the end\n{self.story()}"
            time.sleep(0.005)
        return time.monotonic() - began_s

    def wait_for_step(self, step: int, timeout_s: float = 60.0) -> float:
        """Wait until `step` is committed."""
        return self.wait(lambda: self.step >= step, timeout_s, what=f"step {step}")

    def wait_until_back(self, since: Record, count: int | None = None, timeout_s: float = 60.0) -> float:
        """Wait until a generation after `since`, of any size or of `count` workers, has done a step."""

        def back() -> bool:
            now = self.newest
            return now.number > since.number and len(now.members) == (count or len(now.members)) and self.step > now.step

        return self.wait(back, timeout_s, what=f"a step of a generation after {since.number}")

    def wait_until_whole(self, since: Record) -> float:
        """Wait until a generation after `since` has all workers, and has done a step."""
        return self.wait_until_back(since, self.workers * len(self.hosts))

    def wait_until_it_waits(self, slot: int, host: Host = HERE) -> float:
        """Wait until the worker in `slot` has left its group."""
        return self.wait(lambda: self.doing(slot, host).phase == "joining", what=f"the end of the group of slot {slot}")

    def story(self) -> str:
        """What happened so far, for whom a test fails."""
        told = [
            f"{number}: {record.reason} (step {record.step}, {len(record.members)})"
            for number, record in list(enumerate(self.generations, 1))[-30:]
        ]
        tails = [f"-- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(self.folder.glob("*.out"))]
        return "\n".join([f"step {self.step}", *told, *tails])

    # -- disturbing ---------------------------------------------------------------------------------------------------------

    def kill(self, *members: Member | Sitter, number: int = signal.SIGKILL) -> None:
        """Send workers a signal."""
        for one in members:
            with suppress(ProcessLookupError):
                os.kill(one.pid, number)

    def kill_agent(self, host: Host = HERE, number: int = signal.SIGKILL) -> None:
        """Send the agent a signal, and wait for its end when it is SIGKILL."""
        self.agents[host.name].send_signal(number)
        if number == signal.SIGKILL:
            self.agents[host.name].wait()

    def kill_host(self, host: Host) -> None:
        """A host loses its power: all that runs there is killed, the agent first."""
        self.kill_agent(host)
        self.kill(*self.sitting(host).values())

    def order(self, slot: int, what: fault.What, host: Host = HERE, **where: Any) -> None:
        """Order a fault of the worker in `slot`."""
        fault.order(self.state(host), slot, what, **where)

    def withdraw(self, slot: int, host: Host = HERE) -> None:
        """Take an order back."""
        (self.state(host) / f"{slot}.fault").unlink(missing_ok=True)

    def obeyed(self, slot: int, host: Host = HERE) -> bool:
        """Whether the order has been taken."""
        return not (self.state(host) / f"{slot}.fault").exists()

    def strike(self, slot: int, what: fault.What, host: Host = HERE, **where: Any) -> None:
        """Order a fault and wait until it is there."""
        self.order(slot, what, host, **where)
        self.wait(lambda: self.obeyed(slot, host), what=f"{what} at {where}")

    # -- judging ------------------------------------------------------------------------------------------------------------

    def end(self, timeout_s: float = 120.0) -> dict[str, int]:
        """Wait for all agents; their exit codes."""
        until_s = time.monotonic() + timeout_s
        return {name: agent.wait(max(0.1, until_s - time.monotonic())) for name, agent in self.agents.items()}

    def stop(self) -> None:
        """Ask the run to save and stop, as a person does, from the first host. Its agents end with 75."""
        command = [*self.hosts[0].enter, sys.executable, "-m", "lockstep", "launch", "--stop", "run"]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)

    def judge(self, truth: Truth, *, code: int = 0, timeout_s: float = 120.0) -> None:
        """Wait for the end: all went well, the bits are those of the undisturbed run, every step is there once, and nothing is left."""
        codes = self.end(timeout_s)
        assert set(codes.values()) == {code}, f"{codes}\n{self.story()}"
        assert read_steps(self.run) == truth.steps, self.story()
        assert digest_line(self.run, None) == truth.digest, self.story()
        self.leaves_nothing()

    def leaves_nothing(self) -> None:
        """No process, port or file of those that come and go."""
        assert not living(self.folder), f"{[Path(f'/proc/{pid}/cmdline').read_text() for pid in living(self.folder)]} live on"
        assert not [host.ports() for host in self.hosts if host.ports()]
        assert not list((self.run / "waiting").glob("*"))
        left = Counter(path.name for host in self.hosts for path in self.state(host).iterdir())
        assert set(left) == {"agent.lock"}, left

    def close(self) -> None:
        """End what is left, by its number."""
        for pid in living(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents.values():
            agent.wait()


def read_steps(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, norm) of each line of the metrics."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["norm"]) for line in lines]


def living(folder: Path) -> list[int]:
    """The processes whose working folder is `folder`, whoever started them."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and os.readlink(entry / "cwd") == str(folder):
                found += [int(entry.name)] if look(int(entry.name))[0] != "Z" else []
    return found


def undisturbed(folder: Path, steps: int, **values: object) -> Truth:
    """What the run comes to when nothing happens to it: one worker, for its bits are those of any number."""
    command = [sys.executable, "-m", "lockstep", "train", "--workers", "1", "--out", "run", *flags(steps, **values)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return Truth(digest_line(folder / "run", None), read_steps(folder / "run"))
