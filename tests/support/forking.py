"""Start commands in processes forked from one that has imported torch and lockstep, a template.

`python -m lockstep` imports for a third of a second and the forkserver of its agent for three; a
fork takes twenty milliseconds. A forked command is a child of the process that starts it, with its
own arguments, environment, working folder, descriptors, session and exit. It has a template too, so
that what it starts (an agent its forkserver, a drill its runs, torchrun its ranks) is forked as
well. All share the hash seed of strings and NumPy's entropy, and free no modules at their exit:
LOCKSTEP_NO_FORKS=1 starts each command by the interpreter instead.

A test of imports, of the start of the interpreter or of its variables uses subprocess.Popen. So
does ForkedPopen for another command, and where a variable differs that is read at imports.

    process -> template    the fields of Request, with the descriptors of the new process
    template -> process    the pid of the new process
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import logging
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.agent.forkserver import (
    CUDA_SETTINGS,
    MALLOC_SETTINGS,
    MAX_MESSAGE_BYTES,
    ONE_THREAD,
    double_fork,
)
from lockstep.runtime.processes import LIBC, PR_SET_CHILD_SUBREAPER, PR_SET_NAME, prctl

STARTERS = ("lockstep", "torch.distributed.run")  # modules that have a template too
START_WORKERS = ("train", "run", "launch", "drill")
MODULES = (*STARTERS, "lockstep.agent.forkserver")
# Imported by most test processes, or slow. lockstep last: its import notes the state of the generators.
PRELOAD = (
    *("torch", "torch.distributed", "torch._dynamo", "torch.optim.swa_utils", "numpy.ma"),
    *("transformers.modeling_utils", "transformers.models.auto.modeling_auto", "peft"),
    *("lockstep.recipes.script", "lockstep.session", "lockstep.cli.main", "lockstep.cli.worker"),
)
# Prefixes of variables that the interpreter and libraries read once.
READ_AT_IMPORT = (
    *("PYTHON", "OMP_", "OPENBLAS", "MKL_", "MALLOC_", "LC_", "LANG", "LD_", "TMPDIR"),
    *("TORCH_LOGS", "HF_"),
)
FIRST_OWN_DESCRIPTOR = 400  # a command's descriptors have the numbers that they have after an exec
PR_GET_CHILD_SUBREAPER = 37  # <linux/prctl.h>


@dataclass(frozen=True)
class Request:
    """A process to start: `python -m program words`, or `python program words` with a file."""

    program: str
    words: Sequence[str]
    environ: Mapping[str, str]
    cwd: str
    targets: Sequence[int]  # the number of each descriptor in the new process
    new_session: bool
    process_group: int  # -1: that of the template
    starter: int  # the pid of its parent


def read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process cannot change after its imports. A process without
    settings of malloc may have those of workers."""
    values = {**MALLOC_SETTINGS, **ONE_THREAD, **environ}
    names = [name for name in values if name.startswith(READ_AT_IMPORT)]
    return {name: values[name] for name in names if name != "PYTHONUNBUFFERED"}


class Template:
    """The handle of a template in the process that started it."""

    def __init__(
        self,
        channel: socket.socket,
        environ: Mapping[str, str],
        process: subprocess.Popen[Any] | None = None,
    ) -> None:
        self.channel = channel
        self.process = process
        self.owner = os.getpid()
        self.environ = environ  # of `read_at_import`
        self.lock = threading.Lock()

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """Return the pid of the new process, a child of this one."""
        message = json.dumps(asdict(request)).encode()
        before = ctypes.c_int()
        with self.lock:
            LIBC.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # the kernel gives it the orphan of the double fork
            try:
                socket.send_fds(self.channel, [message], list(descriptors))
                return int(self.channel.recv(32))
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, before.value)

    def end(self) -> None:
        assert self.process
        self.channel.close()
        self.process.kill()
        self.process.wait()

    def program(self, args: Any, environ: Mapping[str, str]) -> list[str]:
        """Return the program that it can fork as `args` starts it, and its words; [] for none."""
        if self.owner != os.getpid() or isinstance(args, (str, bytes, os.PathLike)):
            return []
        interpreter, *words = map(os.fsdecode, args)
        if interpreter != sys.executable or read_at_import(environ) != self.environ:
            return []
        if words[:1] == ["-u"]:
            words = words[1:]
        if words[:1] == ["-m"] and words[1] in MODULES:
            return words[1:]
        # A test that starts a script itself has a reason.
        return words if self.process is None and words[0].endswith(".py") else []


forks = False  # `fork_commands` sets it; what bench/ measures is started
templates: list[Template] = []  # of this process, at most one


def fork_commands() -> None:
    """Fork the commands of this process from now on, unless LOCKSTEP_NO_FORKS=1."""
    global forks
    forks = os.environ.get("LOCKSTEP_NO_FORKS") != "1"


def takes_long(args: Any) -> bool:
    """Return whether a command imports torch, so that the start of a template pays."""
    words = [] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
    return "torch.distributed.run" in words[2:3] or not {*START_WORKERS}.isdisjoint(words[3:4])


def start_template() -> Template:
    here, there = channel_ends()
    environ = {**MALLOC_SETTINGS, **CUDA_SETTINGS, **ONE_THREAD, **os.environ}
    environ["OMP_NUM_THREADS"] = "1"  # as tests start commands
    command = [sys.executable, __file__, str(there.fileno())]
    with there:
        process = subprocess.Popen(
            command, env=environ, cwd="/", stdin=subprocess.DEVNULL, pass_fds=[there.fileno()]
        )
    template = Template(here, read_at_import(environ), process)
    atexit.register(template.end)
    return template


def refresh_templates() -> None:
    """Start a template if this process has none, or if its own has ended."""
    ended = templates[0].process if templates else None
    if ended and templates[0].owner == os.getpid() and ended.poll() is not None:
        print(f"the template ended with {ended.returncode}: another one starts", file=sys.stderr)
        templates.clear()
    if not templates:
        templates.append(start_template())


def channel_ends() -> list[socket.socket]:
    ends = []
    for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET):
        with end:
            number = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN_DESCRIPTOR)
            ends.append(socket.socket(fileno=number))
    return ends


class ForkedPopen(subprocess.Popen[Any]):
    """subprocess.Popen that forks `python -m lockstep` from the template of this process."""

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: Any,
        shell: bool,
        *rest: Any,
    ) -> None:
        environ = dict(os.environ if env is None else env)
        if forks and (templates or takes_long(args)):
            refresh_templates()
        program = templates[0].program(args, environ) if templates else []
        if executable or preexec_fn or shell or not program:
            super()._execute_child(  # type: ignore[misc]
                *(args, executable, preexec_fn, close_fds, pass_fds, cwd, env),
                *(startupinfo, creationflags, shell, *rest),
            )
            return
        pipes = rest[:6]
        standard = [pipes[0], pipes[3], pipes[5]]
        descriptors = [number if pipe == -1 else pipe for number, pipe in enumerate(standard)]
        request = Request(
            program[0],
            program[1:],
            {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()},
            os.path.abspath(os.fsdecode(cwd or "")),
            [0, 1, 2, *pass_fds],
            *rest[-2:],
            starter=os.getpid(),
        )
        self.pid = templates[0].fork(request, [*descriptors, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


# In the template.


def main(channel: socket.socket) -> None:
    """Fork processes until the starter's exit; in each, return after its command."""
    environ = read_at_import(os.environ)  # torch adds to it
    atexit.register(exit_at_once)  # the first one registered runs last
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    for name in PRELOAD:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1
    gc.collect()
    gc.freeze()  # a collection would copy the memory of all imported modules
    prctl(PR_SET_NAME, b"template")
    while forked := serve(channel):
        request, descriptors = forked
        channel.close()
        if request.program not in STARTERS:
            run(request, descriptors)
            return
        here, there = channel_ends()
        if os.fork():
            there.close()
            templates.append(Template(here, environ))
            run(request, descriptors)
            return
        here.close()
        for number in descriptors:
            os.close(number)
        channel = there
    exit_codes.append(0)


def serve(channel: socket.socket) -> tuple[Request, list[int]] | None:
    """Return what is to run in each new process, and None in the template once the starter exited."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 64)
        if not message:
            return None
        pid = double_fork()
        if not pid:
            return Request(**json.loads(message)), list(descriptors)
        for number in descriptors:
            os.close(number)
        channel.send(str(pid).encode())


def run(request: Request, descriptors: Sequence[int]) -> None:
    """Become the process of the request and run its program as the interpreter does."""
    while os.getppid() != request.starter:  # still the intermediate process of the fork
        time.sleep(0.001)
        if not os.path.exists(f"/proc/{request.starter}"):
            os._exit(1)
    if request.new_session:
        os.setsid()
    elif request.process_group >= 0:
        os.setpgid(0, request.process_group)
    place_descriptors(descriptors, request.targets)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.environ)
    prctl(PR_SET_NAME, b"python")
    open_standard_streams(bool(request.environ.get("PYTHONUNBUFFERED")))
    sys.modules["__main__"] = ModuleType("__main__")
    if request.program != "lockstep":  # a package; a module that is imported is imported again
        sys.modules.pop(request.program, None)
    try:
        if request.program in MODULES:
            sys.path[0] = request.cwd
            sys.argv = ["-m", *request.words]
            runpy._run_module_as_main(request.program)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(request.program))
            sys.argv = [request.program, *request.words]
            run_file(request.program)
        exit_codes.append(0)
    except SystemExit as error:
        exit_codes.append(error.code if isinstance(error.code, int) else bool(error.code))
        raise


def run_file(path: str) -> None:
    main = sys.modules["__main__"]
    main.__file__ = path
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(main))


exit_codes: list[int] = []  # the code that this process exits with, unless by another exception


def exit_at_once() -> None:
    """End the process as the interpreter does, but free no modules, which takes 0.3 s."""
    if exit_codes:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_codes[-1] & 0xFF)


def place_descriptors(descriptors: Sequence[int], targets: Sequence[int]) -> None:
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 300) for number in descriptors]
    for number in descriptors:
        os.close(number)
    for number, target in zip(moved, targets, strict=True):
        os.dup2(number, target)
        os.close(number)


def open_standard_streams(unbuffered: bool) -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        buffering = 0 if number and unbuffered else -1
        raw = open(number, "wb" if number else "rb", buffering, closefd=False)  # noqa: SIM115  of this process
        stream = io.TextIOWrapper(
            raw,
            old.encoding,
            old.errors,
            newline="\n" if number else None,
            line_buffering=number == 2 or os.isatty(number),
            write_through=unbuffered,
        )
        stream.mode = "w" if number else "r"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    main(socket.socket(fileno=int(sys.argv[1])))
