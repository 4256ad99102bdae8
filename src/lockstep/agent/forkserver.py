"""Start the workers of an agent: a process imports torch once and forks them within milliseconds.

Importing torch takes two seconds, a fork five milliseconds. So `train` and `run` start a forkserver
before they read the run, and the agent takes it over. The forkserver does not touch a GPU and
starts no thread: a fork would copy the locks of other threads but not the threads.

A worker is forked twice. The intermediate process exits at once, and the kernel makes the agent, a
subreaper (prctl(2)), the worker's parent. So the agent gets the worker's exit code, and workers
survive a killed forkserver. The worker blocks at a gate, a pipe, until the agent has recorded its
process. If the agent dies before that, the pipe loses its writer and the worker exits.

If importing leaves threads or CUDA behind, no worker can be forked after it. Then a forkserver that
imports nothing starts them, and each worker imports everything after execve(2). A forkserver that
exited or hangs is replaced.

    forkserver -> agent     {"ready": true} or {"unusable": REASON}, once
    agent -> forkserver     the fields of WorkerSpec, with three file descriptors: stdout, stderr,
                            gate
    forkserver -> agent     {"pid": 4711} or {"error": REASON}, for each request
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.log import ANNOUNCE_S, log
from lockstep.runtime.processes import PR_SET_NAME, die_with_parent, now_s, prctl
from lockstep.runtime.sources import load_function

if TYPE_CHECKING:  # the forkserver and its workers do without
    from lockstep.agent.slots import AgentTimeouts, EventLog
    from lockstep.runtime.worker_env import WorkerEnv

MODULE = "lockstep.agent.forkserver"
MAX_MESSAGE_BYTES = (1 << 17) - 1  # the kernel's limit for one argument of execve(2)
# Constructing the first optimizer imports torch._dynamo.
PRELOAD = ("torch", "torch._dynamo", "lockstep.cli.main", "lockstep.cli.worker", "lockstep.session")
RECIPE_PRELOAD = (*PRELOAD, "lockstep.recipes")  # of the recipes; scripts need no text packages
FIXED_PRELOAD = ("torch", "lockstep.cli.main", "lockstep.elastic.runtime")  # of a fixed group
# Variables of the forkserver and its workers; the user's own settings win.
# numpy's OpenBLAS starts a thread for each core when it is loaded.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
RETRY_S = 1.0  # after a worker could not be started at all
MAX_FAILURES = 2  # forkservers in a row that exited before they were ready, or hung
# glibc returns large blocks to the kernel at every free, and each step allocates the same ones
# again: keeping them saves page faults (mallopt(3)).
MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
# torch.cuda.is_available() in a module that the forkserver imports must not initialize CUDA: no
# fork could use it.
CUDA_SETTINGS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True)
class WorkerProgram:
    """Program of the workers of a run."""

    argv: tuple[str, ...]  # arguments for `entry`
    restart_argv: tuple[str, ...] | None = None  # arguments for a restarted worker; None: the same
    # "module:function", called as function(argv); it returns the exit code
    entry: str = "lockstep.cli.main:main"
    preload: tuple[str, ...] = PRELOAD  # modules that the forkserver imports
    script: str = ""  # the user's "FILE.py:FUNCTION", which the forkserver imports too; "": none


@dataclass(frozen=True)
class WorkerSpec:
    """Program and environment of one worker."""

    entry: str
    argv: Sequence[str]
    # Variables added to those of the forkserver.
    environ: Mapping[str, str] = field(default_factory=dict)
    agent: int = 0  # pid of the agent that the worker ends with; 0: it outlives its agent


# In the agent.


@dataclass
class PendingWorker:
    """A requested worker. Once it has a `pid`, it is blocked at its gate: a byte lets it run."""

    slot: int
    spec: WorkerSpec
    out: int  # its stdout
    err: int
    pid: int = 0
    gate_writer: int = -1  # the agent's end of the gate; if it is closed, the worker exits
    method: str = ""  # how it was started

    def close(self) -> None:
        """Close the worker's descriptors, not the gate's writer, which keeps it blocked."""
        os.close(self.out)
        os.close(self.err)


class WorkerPool:
    """The workers that one agent is starting, and its forkserver."""

    def __init__(self, program: WorkerProgram, events: EventLog, timeouts: AgentTimeouts) -> None:
        self.program = program
        self.events = events
        self.timeouts = timeouts
        self.pending: dict[int, PendingWorker] = {}
        self.forkserver: Forkserver | None = None
        self.imports = True  # in the forkserver
        self.announced = False  # that they take long
        self.failures = 0
        self.retry_at_s = 0.0
        self.start_forkserver()

    def request(self, worker_env: WorkerEnv, out: int, err: int, *, restarted: bool) -> None:
        program = self.program
        argv = (program.restart_argv if restarted else None) or program.argv
        spec = WorkerSpec(program.entry, argv, worker_env.environ(), worker_env.agent_pid)
        self.pending[worker_env.slot] = PendingWorker(
            worker_env.slot, spec, os.dup(out), os.dup(err)
        )

    def poll(self) -> list[PendingWorker]:
        """Watch the forkserver, and return the workers that have started."""
        if now_s() >= self.retry_at_s:
            self.watch_forkserver()
            for worker in self.pending.values():
                self.start(worker)
        started = [worker for worker in self.pending.values() if worker.pid]
        for worker in started:
            del self.pending[worker.slot]
            worker.close()
        return started

    def cancel(self) -> None:
        for worker in self.pending.values():
            worker.close()
        self.pending = {}

    def close(self) -> None:
        """Kill the forkserver. Workers keep running."""
        self.cancel()
        if self.forkserver:
            self.forkserver.kill()

    def descriptors(self) -> list[int]:
        """Return the file descriptors that become readable when `poll` has something to do."""
        return [self.forkserver.socket.fileno()] if self.forkserver else []

    def pids(self) -> set[int]:
        return {self.forkserver.process.pid} if self.forkserver else set()

    def start(self, worker: PendingWorker) -> None:
        if not self.forkserver or not self.forkserver.ready:
            return
        try:
            gate, gate_writer = os.pipe()
            try:
                worker.pid = self.forkserver.fork(
                    worker.spec, (worker.out, worker.err, gate), self.timeouts.fork_s
                )
                worker.gate_writer = gate_writer
                worker.method = "forked by the forkserver" if self.imports else "spawned"
                self.failures = 0
            except OSError:
                os.close(gate_writer)  # it may have forked one without a reply, which exits now
                raise
            finally:
                os.close(gate)
        except TimeoutError:
            self.replace_forkserver(
                f"it did not fork within {self.timeouts.fork_s:g} s", failed=True
            )
        except ConnectionError:
            self.replace_forkserver("it exited", failed=False)
        except OSError as error:
            self.retry_later(f"cannot start a worker for slot {worker.slot}", error)

    def retry_later(self, what: str, error: OSError) -> None:
        self.events.warn(what, error)
        self.retry_at_s = now_s() + RETRY_S

    # -- the forkserver ----------------------------------------------------------------------------

    def start_forkserver(self) -> None:
        try:
            self.forkserver = start_forkserver(self.program, imports=self.imports)
        except OSError as error:
            self.forkserver = None
            self.retry_later("cannot start the forkserver", error)

    def watch_forkserver(self) -> None:
        """Replace a forkserver that exited, cannot fork, or is not ready in time."""
        if self.forkserver is None:
            return self.start_forkserver()
        try:
            message = self.forkserver.receive()
        except TimeoutError:
            if self.forkserver.ready:
                return
            waited_s = now_s() - self.forkserver.started_s
            if waited_s > ANNOUNCE_S and self.imports and not self.announced:
                self.announced = True
                log.info(
                    "importing torch%s", f" and {self.program.script}" * bool(self.program.script)
                )
            if waited_s > self.timeouts.import_s:
                self.replace_forkserver(
                    f"it was not ready within {self.timeouts.import_s:g} s", failed=True
                )
        except ConnectionError:
            self.replace_forkserver("it exited", failed=not self.forkserver.ready)
        else:
            if "unusable" in message:
                self.forkserver.kill()
                self.stop_imports(message["unusable"])
                self.start_forkserver()

    def replace_forkserver(self, reason: str, *, failed: bool) -> None:
        """Replace a forkserver that exited or hangs; after several failures, by one without
        imports."""
        assert self.forkserver is not None
        self.forkserver.kill()
        self.events.add("forkserver ended", reason)
        self.failures += failed
        if self.failures >= MAX_FAILURES and self.imports:
            self.stop_imports(f"{reason}, {self.failures} times before it started a worker")
        self.retry_at_s = now_s() + (RETRY_S if self.failures > MAX_FAILURES else 0.0)
        self.start_forkserver()

    def stop_imports(self, reason: str) -> None:
        self.imports = False
        self.events.add("no forkserver", reason)
        log.info("workers are spawned without a forkserver, each imports everything: %s", reason)


class Forkserver:
    """The agent's handle of a forkserver process. OSError if the process cannot be started.
    imports: it imports the modules of `program`; else each worker does
    ready: it can start workers."""

    def __init__(self, program: WorkerProgram, *, imports: bool) -> None:
        self.ready, self.started_s = False, now_s()
        self.given = (program.preload, program.script, imports, dict(os.environ))
        settings = {**MALLOC_SETTINGS, **CUDA_SETTINGS, **ONE_THREAD}
        self.socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        modules = json.dumps([program.preload, program.script] if imports else None)
        with child_socket:
            try:
                self.process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        MODULE,
                        "forkserver",
                        str(child_socket.fileno()),
                        modules,
                        str(os.getpid()),
                    ],
                    env={**settings, **os.environ, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[child_socket.fileno()],
                    start_new_session=True,
                )
            except OSError:
                self.socket.close()
                raise

    def fork(self, spec: WorkerSpec, descriptors: Sequence[int], timeout_s: float) -> int:
        """Start a worker and return its pid. OSError if that fails, or as of `receive`.
        descriptors: stdout, stderr and gate."""
        message = json.dumps(asdict(spec)).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            raise OSError(None, f"a command of {len(message)} bytes")
        socket.send_fds(self.socket, [message], list(descriptors))
        reply = self.receive(timeout_s)
        if "error" in reply:
            raise OSError(None, reply["error"])
        return int(reply["pid"])

    def receive(self, timeout_s: float = 0.0) -> dict[str, Any]:
        """Return the next message. TimeoutError: there is none. ConnectionError: it has exited."""
        if not select.select([self.socket], [], [], timeout_s)[0]:
            raise TimeoutError
        if not (received := self.socket.recv(MAX_MESSAGE_BYTES)):
            raise ConnectionResetError
        message: dict[str, Any] = json.loads(received)
        self.ready = self.ready or "ready" in message
        return message

    def kill(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


_early: list[Forkserver] = []  # at most one


def start_early(program: WorkerProgram) -> None:
    """Start a forkserver that imports torch while the command reads its run. `start_forkserver`
    returns it; else it ends with this process."""
    with suppress(OSError):
        _early.append(Forkserver(program, imports=True))
        atexit.register(stop_early)


def stop_early() -> None:
    while _early:
        _early.pop().kill()


def start_forkserver(program: WorkerProgram, *, imports: bool) -> Forkserver:
    """Return the early forkserver if its modules and environment are these, else a new one."""
    while _early:
        early = _early.pop()
        if early.given == (program.preload, program.script, imports, dict(os.environ)):
            return early
        early.kill()
    return Forkserver(program, imports=imports)


# In the forkserver.


def main(arguments: Sequence[str]) -> int:
    role, descriptor, text, *rest = arguments
    if role == "worker":
        return run_worker(WorkerSpec(**json.loads(text)), int(descriptor))
    # At most 15 bytes; command lines do not tell a forkserver from its workers.
    prctl(PR_SET_NAME, b"lockstep-forker")
    die_with_parent(int(rest[0]))
    modules = json.loads(text)
    with socket.socket(fileno=int(descriptor)) as channel:
        reason = preload(*modules) if modules else ""
        reply(channel, {"unusable": reason} if reason else {"ready": True})
        worker = None if reason else serve(channel)
    if not worker:
        return 0
    spec, gate = worker
    if modules:
        return run_worker(spec, gate)
    os.set_inheritable(gate, True)
    os.execv(
        sys.executable,
        [sys.executable, "-m", MODULE, "worker", str(gate), json.dumps(asdict(spec))],
    )


def preload(modules: Sequence[str], script: str) -> str:
    """Import everything; return why this process cannot serve as a forkserver, "" if it can."""
    gc.disable()  # a fifth of the time of the imports
    try:
        for name in modules:
            importlib.import_module(name)
        if script:
            load_function(script)
    except BaseException as error:  # a worker will fail with the same error and report it
        return f"importing ended with {type(error).__name__}: {error}".splitlines()[0]
    threads = len(os.listdir("/proc/self/task"))
    imported = f"importing {script or ', '.join(modules)}"
    if threads > 1:
        return f"{imported} left {threads - 1} threads, which a fork would lose"
    if is_cuda_lost_by_fork():
        return f"{imported} initialized CUDA, which a forked process cannot use"
    gc.collect()
    gc.freeze()  # the collector skips these objects, so that their pages stay shared
    gc.enable()
    return ""


def is_cuda_lost_by_fork() -> bool:
    """Return whether forked processes cannot use CUDA: ask one, since torch marks only those."""
    if "torch" not in sys.modules:
        return False
    from lockstep.runtime.torch_private import is_in_bad_fork  # imports torch

    child = os.fork()
    if not child:
        os._exit(is_in_bad_fork())
    return os.waitpid(child, 0)[1] != 0


def serve(channel: socket.socket) -> tuple[WorkerSpec, int] | None:
    """Fork workers. Return (spec, gate) in each, and None in the forkserver once the agent
    exited."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 3)
        if not message:
            return None
        try:
            answer: dict[str, Any] = {"pid": double_fork()}
        except OSError as error:
            answer = {"error": str(error)}
        if answer.get("pid") == 0:
            channel.close()
            os.setsid()
            for received, standard in zip(descriptors, (1, 2), strict=False):
                os.dup2(received, standard)
                os.close(received)
            return WorkerSpec(**json.loads(message)), descriptors[2]
        for descriptor in descriptors:
            os.close(descriptor)
        reply(channel, answer)


def reply(channel: socket.socket, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the next receive shows that the agent has exited
        channel.send(json.dumps(message).encode())


def double_fork() -> int:
    """Like os.fork(), but the new process becomes a child of the agent."""
    reader, writer = os.pipe()
    intermediate = os.fork()
    if not intermediate:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(writer, str(pid).encode())
            os._exit(0)
    os.close(writer)
    if intermediate:
        worker_pid = os.read(reader, 32)
        os.waitpid(intermediate, 0)
    os.close(reader)
    if intermediate and not worker_pid:
        raise OSError(None, "the second fork failed")
    return int(worker_pid) if intermediate else 0


# In the worker.


def run_worker(spec: WorkerSpec, gate: int) -> int:
    """Wait at the gate, then run the worker; return its exit code."""
    if not os.read(gate, 1):
        return 0  # the agent died before it had recorded this process
    os.close(gate)
    prctl(PR_SET_NAME, b"lockstep-worker")
    if spec.agent:
        die_with_parent(spec.agent)
    os.environ.update(spec.environ)
    sys.argv = ["lockstep", *spec.argv]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the agent may copy lines to its terminal
    module, _, name = spec.entry.partition(":")
    return int(getattr(importlib.import_module(module), name)(list(spec.argv)) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
