"""Workers within milliseconds: a process that has imported torch once, and forks.

Importing torch and what the first optimizer needs takes two seconds, a fork takes five milliseconds. So the agent starts one process that
imports everything and then does nothing but fork. It owns no thread, since a fork would take the threads' locks along and not the threads;
it touches no GPU; and it knows nothing of what a worker does.

A worker is born in two forks. The process in between ends at once, and the kernel gives the worker to the agent, which has asked for that
(prctl(2), PR_SET_CHILD_SUBREAPER). So the agent waits for it as for a child of its own and learns its exit code, and a zygote that is
killed takes nobody along. The worker then stands at a gate, a pipe, until the agent has written down who it is. An agent that dies before
that leaves the pipe without a writer, and the worker ends: there are no workers of whom nobody knows.

    agent -> zygote     {"slot": 3, "birth": {...}} with three descriptors: stdout, stderr, the gate
    zygote -> agent     {"ready": true} or {"cold": WHY}, once; then {"slot": 3, "pid": 4711} or {"slot": 3, "error": WHY} for each request
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.runtime.user_function import load_function

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36  # <linux/prctl.h>
MESSAGE_BYTES = 1 << 16  # longer command lines are for execve
WARM = ("torch", "torch._dynamo", "lockstep.cli.main", "lockstep.train")  # torch._dynamo: constructing the first optimizer imports it
# numpy's OpenBLAS starts a thread for each core when it is loaded. What the user has set stays.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Work:
    """What the workers of a run do.

    argv    words for `entry`
    again   words for a worker that comes after another one in its slot; None: the same
    entry   "module:function", called as function(argv) for the exit code
    warm    modules that the zygote imports
    script  the user's "FILE.py:FUNCTION", imported by the zygote too; "": none
    """

    argv: tuple[str, ...]
    again: tuple[str, ...] | None = None
    entry: str = "lockstep.cli.main:main"
    warm: tuple[str, ...] = WARM
    script: str = ""


@dataclass(frozen=True)
class Birth:
    """What one worker is born with.

    environ  variables over those of the zygote
    agent    the parent with which it ends; 0: it outlives its parent
    """

    entry: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    agent: int = 0

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Birth:
        """The birth in a JSON value."""
        return Birth(**{**value, "argv": tuple(value["argv"])})


# The agent's end.


class Zygote:
    """A zygote, as its agent has it. OSError when it cannot be started.

    ready  it has imported everything and can fork
    """

    def __init__(self, work: Work, environ: Mapping[str, str]) -> None:
        self.ready = False
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        words = [str(theirs.fileno()), str(os.getpid()), json.dumps([work.warm, work.script])]
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", __name__, "zygote", *words],
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError:
                self.socket.close()
                raise

    def ask(self, slot: int, birth: Birth, descriptors: Sequence[int]) -> None:
        """Ask for a worker with these for stdout, stderr and gate. OSError when the zygote is gone or the message too long."""
        message = json.dumps({"slot": slot, "birth": asdict(birth)}).encode()
        if len(message) > MESSAGE_BYTES:
            raise OSError(None, f"a command of {len(message)} bytes")
        socket.send_fds(self.socket, [message], list(descriptors))

    def answers(self) -> list[dict[str, Any]] | None:
        """What it has said since; None: it is gone."""
        said = []
        with suppress(BlockingIOError, ConnectionResetError):
            while message := self.socket.recv(MESSAGE_BYTES):
                said.append(json.loads(message))
            return said or None
        return said

    def end(self) -> None:
        """End it. Its workers live on."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


def spawn(birth: Birth, environ: Mapping[str, str], descriptors: Sequence[int]) -> int:
    """The pid of a worker that is started without a zygote, as a child of this process. OSError when it cannot be."""
    out, err, gate = descriptors
    words = [sys.executable, "-m", __name__, "worker", "3", json.dumps(asdict(birth))]
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, out, 1),
        (os.POSIX_SPAWN_DUP2, err, 2),
        (os.POSIX_SPAWN_DUP2, gate, 3),
    ]
    return os.posix_spawn(sys.executable, words, dict(environ), file_actions=actions, setsid=True)


def adopt_orphans() -> None:
    """From now on a process whose parent ends is given to this one, when it comes from it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int | bytes) -> None:
    """prctl(2)."""
    rest = [ctypes.c_ulong(0)] * 3
    ctypes.CDLL(None).prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(value), *rest)


# The zygote.


def main(words: Sequence[str]) -> int:
    """The life of a zygote, or of a worker that was started without one."""
    role, descriptor, *rest = words
    if role == "worker":
        return live(Birth.from_json(json.loads(rest[0])), int(descriptor))
    prctl(PR_SET_NAME, b"lockstep-zygote")  # 15 bytes at most; the command line would be the same for a zygote and its workers
    end_with(int(rest[0]))
    with socket.socket(fileno=int(descriptor)) as channel:
        why_not = warm_up(*json.loads(rest[1]))
        say(channel, {"cold": why_not} if why_not else {"ready": True})
        born = None if why_not else serve(channel)
    return live(*born) if born else 0


def warm_up(modules: Sequence[str], script: str) -> str:
    """Import everything; why this process cannot serve as a zygote, "" when it can."""
    try:
        for name in modules:
            importlib.import_module(name)
        if script:
            load_function(script)
    except BaseException as error:  # a worker will meet the same one and tell of it
        return f"importing ended with {type(error).__name__}: {error}".splitlines()[0]
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"importing {script or ', '.join(modules)} left {threads - 1} threads, which a fork would lose"
    gc.collect()
    gc.freeze()  # the collector leaves these objects, and so their pages stay shared
    return ""


def serve(channel: socket.socket) -> tuple[Birth, int] | None:
    """Fork as often as the agent asks. Returns in each new worker, with its birth and gate; None in the zygote, when the agent is gone."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
        if not message:
            return None
        asked = json.loads(message)
        try:
            pid = fork_away()
        except OSError as error:
            say(channel, {"slot": asked["slot"], "error": str(error)})
            pid = -1
        if pid == 0:
            channel.close()
            os.setsid()
            return Birth.from_json(asked["birth"]), take(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            say(channel, {"slot": asked["slot"], "pid": pid})


def say(channel: socket.socket, message: dict[str, Any]) -> None:
    """Tell the agent. Nobody hears it when the agent is gone, which the next look into the channel shows."""
    with suppress(BrokenPipeError):
        channel.send(json.dumps(message).encode())


def fork_away() -> int:
    """As os.fork(), but the new process is no child of this one: it is given to the agent."""
    reader, writer = os.pipe()
    between = os.fork()
    if not between:
        try:
            pid = os.fork()
        except OSError:
            os._exit(1)
        if pid:
            os.write(writer, str(pid).encode())
            os._exit(0)
    os.close(writer)
    if between:
        told = os.read(reader, 32)
        os.waitpid(between, 0)
    os.close(reader)
    if between and not told:
        raise OSError(None, "the second fork failed")
    return int(told) if between else 0


# The worker.


def take(descriptors: Sequence[int]) -> int:
    """Take stdout, stderr and the gate out of the zygote's hands; the gate."""
    out, err, gate = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    return gate


def live(birth: Birth, gate: int) -> int:
    """The life of a worker, once the gate opens; its exit code."""
    if not os.read(gate, 1):
        return 0  # the agent died before it had written down that we are here
    os.close(gate)
    prctl(PR_SET_NAME, b"lockstep-worker")
    if birth.agent:
        end_with(birth.agent)
    os.environ.update(birth.environ)
    sys.argv = ["lockstep", *birth.argv]
    module, _, name = birth.entry.partition(":")
    return int(getattr(importlib.import_module(module), name)(list(birth.argv)) or 0)


def end_with(parent: int) -> None:
    """From now on the kernel ends this process when its parent ends. When that has happened already, it ends here."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
