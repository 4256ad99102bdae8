"""A process that imports torch once and forks workers within milliseconds.

Importing torch takes two seconds, a fork five milliseconds. The forkserver does not touch a GPU and
starts no thread: a fork would copy the locks of other threads but not the threads.

A worker is forked twice. The intermediate process exits at once, and the kernel makes the agent, a
subreaper (prctl(2)), the worker's parent. So the agent gets the worker's exit code, and workers
survive a killed forkserver. The worker blocks at a gate, a pipe, until the agent has recorded its
process. If the agent dies before that, the pipe loses its writer and the worker exits.

If importing leaves threads or CUDA behind, no worker can be forked after it. Then a forkserver that
imports nothing starts them, and each worker imports everything after execve(2).

    forkserver -> agent     {"ready": true} or {"unusable": REASON}, once
    agent -> forkserver     the fields of WorkerSpec, with three file descriptors: stdout, stderr,
                            gate
    forkserver -> agent     {"pid": 4711} or {"error": REASON}, for each request
"""

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
from typing import Any

from lockstep.runtime.processes import PR_SET_NAME, die_with_parent, now_s, prctl
from lockstep.runtime.sources import load_function

MODULE = "lockstep.agent.forkserver"
MAX_MESSAGE_BYTES = (1 << 17) - 1  # the kernel's limit for one argument of execve(2)
# Constructing the first optimizer imports torch._dynamo.
PRELOAD = ("torch", "torch._dynamo", "lockstep.cli.main", "lockstep.cli.worker")
FIXED_PRELOAD = ("torch", "lockstep.cli.main", "lockstep.elastic.runtime")  # of a fixed group
# numpy's OpenBLAS starts a thread for each core when it is loaded. The user's own setting wins.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


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


class Forkserver:
    """The agent's handle of a forkserver process. OSError if the process cannot be started.
    imports: it imports the modules of `program`; else each worker does
    ready: it can start workers."""

    def __init__(
        self, program: WorkerProgram, environ: Mapping[str, str], *, imports: bool
    ) -> None:
        self.ready, self.started_s = False, now_s()
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
                    env=dict(environ),
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
