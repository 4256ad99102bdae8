"""The environment of a worker under an agent, and the state folder that both share.

An agent starts workers with these variables:

    LOCKSTEP_WORKER_ENV       JSON: the fields of WorkerEnv
    LOCKSTEP_SHARED_TERMINAL  1: one command started all hosts, and they share its terminal

Files of slot 3 in the state folder, on a local disk, which outlive the agent and the worker:

    3.json         pid and start time of its worker, written before the worker runs
    3.exit_report  how it exited (exit_report.ExitReport), written by the worker
    3.board        its current phase and step (status_board.py)
    agent.lock     held by the one agent of this host and run
    agent.json     how that agent started its workers, for the agent that adopts them
    file_digests.* digests of the prepared data, for all workers of the host (data/manifest.py)
"""

import functools
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.files import add_checksum, read_json, verify_checksum, write_json
from lockstep.log import log
from lockstep.runtime import status_board

WORKER_ENV = "LOCKSTEP_WORKER_ENV"
SHARED_TERMINAL = "LOCKSTEP_SHARED_TERMINAL"


@dataclass(frozen=True)
class WorkerEnv:
    """Settings that a worker receives from the agent of its host."""

    folder: str  # run folder, absolute
    state: str  # state folder of this host for this run
    host: str  # name of the host, unique in the run
    slot: int  # number of this worker on its host, from 0
    slots: int  # workers of its host
    expected_workers: int  # of all hosts: the first generation waits for them
    min_workers: int  # training waits until there are this many
    max_workers: int  # that train at once; further ones wait to join
    address: str  # of this host, on which its servers listen
    # Newest generation before this start: ignore an earlier end of the run.
    after_generation: int = 0
    agent_pid: int = 0  # this worker exits with this agent; 0: it outlives its agent
    drain: bool = False  # SIGUSR1 makes this host leave, and the others continue
    folder_id: str = ""  # identifies the run folder (elastic/run_folder.py); "": any folder
    known_generation: int = 0  # newest generation at the start: an older log is not this run's
    # Of a user's own loop: must be equal on all workers.
    flags: dict[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()  # of `lockstep`, which start this worker

    def environ(self) -> dict[str, str]:
        return {WORKER_ENV: json.dumps(asdict(self))}

    @property
    def is_child(self) -> bool:
        """Whether the agent started this very process, not one of its workers."""
        return self.agent_pid == os.getppid()


def read_worker_env(environ: Mapping[str, str]) -> WorkerEnv | None:
    """Return the WorkerEnv of this process; None without an agent. UsageError when it is
    invalid."""
    text = environ.get(WORKER_ENV)
    if not text:
        return None
    try:
        return WorkerEnv(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"invalid {WORKER_ENV}: {error}", "environment", "unset it; only agents set it"
        ) from None


def state_folder(run: Path, host: str, *, temporary: bool = False) -> Path:
    """Create the state folder of this host, mode 700, on a local disk: the run's disk may hang.
    In /tmp (or $LOCKSTEP_TMP), regardless of TMPDIR: an agent started by cron must find the state
    of one started at a terminal. In the run folder if that is `temporary`."""
    if temporary:
        (run / "state").mkdir(exist_ok=True)
        return run / "state"
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    parent = Path(os.environ.get("LOCKSTEP_TMP") or "/tmp") / f"lockstep-{os.getuid()}"
    for folder in (parent, parent / f"{name}-{host}"):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot create {folder}: {error.strerror}",
                "state folder of agents and workers, in LOCKSTEP_TMP or /tmp",
                "set LOCKSTEP_TMP to a folder on a local disk",
            ) from None
        if folder.stat().st_uid != os.getuid():
            raise UsageError(
                f"{folder} belongs to another user",
                "state folder of agents and workers",
                "remove it, as its owner or as root",
            )
    return parent / f"{name}-{host}"


@functools.cache
def loopback_network() -> str:
    """Return an id of this loopback network: boot id and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def is_loopback_reachable(loopback: str) -> bool:
    """Whether a loopback address is reachable. If not, a refused connection proves nothing."""
    return loopback in ("", loopback_network())


def start_words() -> list[str]:
    """Return the words of `lockstep` that start this process as a worker once more."""
    if worker_env := read_worker_env(os.environ):
        return list(worker_env.words)
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if Path(sys.argv[0]).name == "lockstep" or (spec and spec.name == "lockstep.__main__"):
        return sys.argv[1:]
    file = str(getattr(main, "__file__", ""))
    if not spec and not file:  # an interpreter, or a notebook
        return []
    # Not the whole path: the run may be replayed on another machine.
    target = ["-m", spec.name] if spec else [os.path.relpath(file)]
    return ["run", *target, "--", *sys.argv[1:]]


# Processes by slot.


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, identified by pid and start time: the kernel reuses pids."""

    pid: int
    started: int  # clock ticks after boot, which do not depend on the wall clock
    log_offset: int = 0  # length of its log when it started

    @property
    def alive(self) -> bool:
        """Whether it is running; False for a zombie."""
        try:
            state, started = process_stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return started == self.started and state not in "ZX"


def process_stat(pid: int) -> tuple[str, int]:
    """Return (state, start time in ticks after boot) of a process (proc(5)). FileNotFoundError."""
    # The name before it may contain anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def identify_process(pid: int, log_offset: int = 0) -> ProcessIdentity:
    return ProcessIdentity(pid, process_stat(pid)[1], log_offset)


def write_worker_process(state: Path, slot: int, process: ProcessIdentity) -> None:
    write_json(state / f"{slot}.json", add_checksum(asdict(process)))


def exit_report_path(state: Path, slot: int) -> Path:
    return state / f"{slot}.exit_report"


def running_workers(state: Path) -> dict[int, ProcessIdentity]:
    running = {}
    for path in sorted(state.glob("*.json")):
        if not path.stem.isdecimal():
            continue
        try:
            process: ProcessIdentity | None = ProcessIdentity(**verify_checksum(read_json(path)))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError) as error:
            process = process_of_board(path.with_suffix(".board"))
            result = (
                f"found worker pid {process.pid} by its status board"
                if process
                else "no worker is known to run in this slot"
            )
            log.warning("%s is damaged (%s); %s", path, error, result)
        if process and process.alive:
            running[int(path.stem)] = process
    return running


def process_of_board(path: Path) -> ProcessIdentity | None:
    """Return the running process that has the status board at `path` mapped, if any."""
    try:
        pid = status_board.read_status(path).pid
        mapped = any(
            line.split(maxsplit=5)[5:] == [str(path.resolve())]
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        )
        return identify_process(pid) if mapped else None
    except OSError:
        return None
