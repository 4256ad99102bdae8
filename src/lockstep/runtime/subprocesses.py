"""Start the workers of one machine, watch over them, and end with one exit code.

The parent imports no torch and owns no threads: it binds the port at which the workers meet and hands the listening socket to rank 0, so
that nobody can take the port in between; it starts each worker in a process group of its own, tied to the parent's life by the kernel
(prctl(2), PR_SET_PDEATHSIG), so that not even SIGKILL of the parent leaves an orphan; then it sleeps until a worker ends, a worker says
something, or a signal comes. Rank 0 keeps the terminal; the output of the others goes to logs/HOST-RANK.log in the run folder.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from lockstep.errors import LockstepError, PeersLostError, UsageError
from lockstep.files import regular, write_atomic
from lockstep.runtime.exit_report import Account, End, kind, peers_lost, verdict
from lockstep.runtime.signals import INTERRUPTED, STOPPING
from lockstep.runtime.worker_env import find_seat, last_words

ACCOUNT = "LOCKSTEP_ACCOUNT_FD"
# glibc gives large blocks back to the kernel at every free, and a training step frees the same ones that the next step asks for: keeping
# them saves the faults (mallopt(3)). What the user has set stays.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
HERE = "127.0.0.1"


@dataclass(frozen=True)
class Limits:
    """How long the parent waits.

    grace_s   from a signal to the agreed stop: a step and a checkpoint
    settle_s  from the first failure until the others are asked to end; within it they tell what they know
    end_s     from asking (SIGTERM) to ending (SIGKILL)
    early_s   from a worker's breaking off with exit code 0 until that counts as a failure
    """

    grace_s: float = 300.0
    settle_s: float = 5.0
    end_s: float = 10.0
    early_s: float = 30.0


@dataclass
class Worker:
    """A process of ours.

    output, log, begun_at  the file of its output, that file's path ("" without one), and how long it was before
    end                    None while it lives
    """

    rank: int
    process: subprocess.Popen[bytes]
    account_fd: int
    output: IO[bytes] | None
    log: str
    begun_at: int = 0
    said: bytes = b""
    listening: bool = True
    sent: list[int] = field(default_factory=list)
    end: End | None = None

    @property
    def account(self) -> Account | None:
        """What it said of its end so far."""
        return Account.from_line(self.said) if self.said.endswith(b"\n") else None


def default_workers(environ: Mapping[str, str] = os.environ, driver: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[int, str]:
    """(how many workers this machine gets, the reason): one for each GPU that CUDA_VISIBLE_DEVICES leaves, two on a CPU."""
    if environ.get("LOCKSTEP_DEVICE") == "cpu":
        return 2, "two on the CPU (LOCKSTEP_DEVICE=cpu)"
    gpus = len(list(driver.iterdir())) if driver.is_dir() else 0
    if not gpus and (tool := shutil.which("nvidia-smi", path=environ.get("PATH"))):
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False, timeout=20).stdout
        gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None:
        named = [one.strip() for one in visible.split(",")]
        left = next((i for i, one in enumerate(named) if one in ("", "-1")), len(named))  # CUDA stops at the first bad one
        count, unit = (left, "one for each GPU") if left else (2, "two on the CPU")
        return count, f"{unit} (CUDA_VISIBLE_DEVICES={visible})"
    return (gpus, "one for each GPU") if gpus else (2, "two on the CPU, no GPU here")


def refuse_a_crowd(workers: int, host: str, cores: int | None = None) -> None:
    """Raise a UsageError for an implausible number of workers: each is a process with its own Python and torch."""
    cores = cores or os.cpu_count() or 1
    most = max(64, 16 * cores)
    if workers > most:
        raise UsageError(f"{workers:,} workers on one machine", f"{host} has {cores} cores", f"give at most {most} on this machine")


def launch(
    command: Sequence[str],
    workers: int,
    *,
    run_folder: Path | None,
    port: int | None,
    environ: Mapping[str, str],
    limits: Limits = Limits(),
) -> int:
    """Run `command` as `workers` processes on this machine, and wait; the exit code of them all, with the first failure on stderr.

    port     where they meet, on 127.0.0.1; None: the kernel picks one
    environ  of the workers, to which torchrun's variables and ours are added
    Errors: UsageError before anything was started. For the main thread.
    """
    if workers < 1:
        raise UsageError(f"{workers} workers", "--workers", "give 1 or more")
    refuse_a_crowd(workers, "this machine")
    listener = listen(port)
    started: list[Worker] = []
    with Inbox() as inbox:
        try:
            for rank in range(workers):
                started.append(start(command, rank, workers, environ, listener, run_folder))
            listener.close()
            code, text = watch(started, inbox, limits)
        finally:
            listener.close()
            for worker in started:
                if worker.end is None:
                    end_now(worker)
                if worker.output:
                    worker.output.close()
                os.close(worker.account_fd)
    if text:
        print(text, file=sys.stderr, flush=True)
    return code


def worker_main(function: Callable[[], int | None], about: Callable[[], Mapping[str, Any]] = dict) -> int:
    """The exit code of a worker whose life is `function()`. A failure is told to the parent, or shown on stderr where there is none.

    about  further fields of the Account, asked for when function() has ended: {"step": 7}
    """
    account, text = live(function)
    account = replace(account, **about())
    told = tell_parent(account)
    if text and not told:
        print(text, file=sys.stderr, flush=True)
    return account.code


def live(function: Callable[[], int | None]) -> tuple[Account, str]:
    """(how function() ended, what to show)."""
    try:
        code = function() or 0
        return Account(code, now_s(), finished=True), ""
    except KeyboardInterrupt:
        return Account(INTERRUPTED, now_s(), finished=True), ""
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        text = error.code if isinstance(error.code, str) else ""
        return Account(code, now_s(), text=text), text
    except LockstepError as error:
        lost = isinstance(error, PeersLostError)
        return Account(error.exit_code, now_s(), str(error), traceback.format_exc(), lost_peers=lost), str(error)
    except BaseException as error:
        trace = traceback.format_exc()
        lost = peers_lost(error)
        return Account(PeersLostError.exit_code if lost else 1, now_s(), trace, trace, lost_peers=lost), trace


def tell_parent(account: Account) -> bool:
    """Write the account into the parent's pipe, or where the agent looks for it; False where there is nobody to tell."""
    given = os.environ.pop(ACCOUNT, "")
    seat = find_seat(os.environ)
    try:
        if given:
            with open(int(given), "wb") as pipe:
                pipe.write(account.to_line())
        elif seat:
            write_atomic(last_words(Path(seat.state), seat.slot), account.to_line())
    except OSError:  # the parent is gone, the descriptor was closed on the way here, or the state folder is full
        return False
    return bool(given or seat)


def now_s() -> float:
    """Seconds on the clock that all processes of this machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


# Starting.


def listen(port: int | None) -> socket.socket:
    """A socket that listens on 127.0.0.1. UsageError when the port cannot be had."""
    try:
        return socket.create_server((HERE, port or 0), backlog=1024)
    except (OSError, OverflowError) as error:
        busy = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise UsageError(
            f"port {port} is busy" if busy else f"port {port} cannot be had: {error}",
            f"--port, on {HERE}",
            f"leave --port out, then the kernel picks a free one; who holds it: ss -ltnp 'sport = :{port}'",
        ) from None


def start(
    command: Sequence[str], rank: int, size: int, environ: Mapping[str, str], listener: socket.socket, run_folder: Path | None
) -> Worker:
    """Start one worker."""
    output, log = open_output(run_folder, rank)
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    inherited = [theirs, listener.fileno()] if rank == 0 else [theirs]
    libc = ctypes.CDLL(None)  # loaded before the fork
    parent = os.getpid()

    def tie_to_parent() -> None:
        # A background group that writes to a terminal with `stty tostop` would be stopped.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        if sys.platform == "linux":
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died before the line above
                os._exit(128 + signal.SIGKILL)

    try:
        process = subprocess.Popen(
            list(command),
            env={**KEEP_MEMORY, **environ, **worker_environ(rank, size, listener), ACCOUNT: str(theirs)},
            stdin=subprocess.DEVNULL,
            stdout=output if rank else None,
            stderr=output if rank else None,
            pass_fds=inherited,
            process_group=0,
            preexec_fn=tie_to_parent,  # noqa: PLW1509  the parent has one thread
        )
    except OSError as error:
        os.close(ours)
        raise UsageError(f"cannot start {command[0]}: {error.strerror}", f"the workers' command: {' '.join(command)}") from None
    finally:
        os.close(theirs)
    return Worker(rank, process, ours, output, log, begun_at=output.tell() if output else 0)


def worker_environ(rank: int, size: int, listener: socket.socket) -> dict[str, str]:
    """A worker's place, in torchrun's words and in ours."""
    port = str(listener.getsockname()[1])
    added = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": HERE, "MASTER_PORT": port}
    added |= {"LOCKSTEP_RANK": rank, "LOCKSTEP_SIZE": size, "LOCKSTEP_LOCAL_RANK": rank, "LOCKSTEP_LOCAL_SIZE": size}
    added |= {"LOCKSTEP_MASTER_ADDR": HERE, "LOCKSTEP_MASTER_PORT": port}
    if rank == 0:
        added |= {"LOCKSTEP_LISTEN_FD": listener.fileno()}
    # Lines stand in the log when they are printed, not when a buffer is full; none is lost in a kill.
    return {name: str(value) for name, value in added.items()} | {"PYTHONUNBUFFERED": "1"}


def open_output(run_folder: Path | None, rank: int, host: str = "", *, make: bool = True) -> tuple[IO[bytes] | None, str]:
    """(the file for a worker's output, its path); without a run folder a file that has no name and vanishes with us.

    host  by which name this machine goes in the run; "": its own
    make  the folder of the logs, too, where it is missing
    """
    if run_folder is None:
        return (tempfile.TemporaryFile() if rank else None), ""
    path = run_folder / "logs" / f"{host or socket.gethostname()}-{rank}.log"
    try:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a+b", opener=regular), str(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", "the run folder", "give a folder that this user may write, on a disk with space"
        ) from None


# Watching.


class Inbox:
    """Signals, read like mail: while entered, those that stop a run and SIGCHLD do nothing but lie here until `wait` is asked."""

    def __enter__(self) -> Inbox:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)
        self.before: dict[signal.Signals, Any] = {}
        self.wakeup_before = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        for one in (*STOPPING, signal.SIGCHLD):
            self.before[one] = signal.signal(one, lambda number, frame: None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for one, handler in self.before.items():
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self.wakeup_before)
        os.close(self.reader)
        os.close(self.writer)

    def wait(self, timeout_s: float | None, also: Sequence[int]) -> list[int]:
        """The signals that came, after at most `timeout_s`, or earlier when one of the descriptors `also` can be read."""
        ready, _, _ = select.select([self.reader, *also], [], [], timeout_s)
        return list(os.read(self.reader, 4096)) if self.reader in ready else []


@dataclass
class Times:
    """When, on CLOCK_MONOTONIC, the first worker failed, the first broke off, the first signal was passed on, the rest was asked to end."""

    failed_s: float | None = None
    early_s: float | None = None
    asked_s: float | None = None
    ending_s: float | None = None


def next_signal(times: Times, limits: Limits) -> tuple[float, int] | None:
    """(when, which signal) goes to the workers that live; None: nothing is due before something else happens."""
    failed_s = times.failed_s
    if failed_s is None and times.early_s is not None:
        failed_s = times.early_s + limits.early_s - limits.settle_s
    if times.ending_s is not None:
        return times.ending_s + limits.end_s, signal.SIGKILL
    if failed_s is not None:
        return failed_s + limits.settle_s, signal.SIGTERM
    if times.asked_s is not None:
        return times.asked_s + limits.grace_s, signal.SIGKILL
    return None


def watch(workers: Sequence[Worker], inbox: Inbox, limits: Limits) -> tuple[int, str]:
    """(exit code, what to print) once all workers have ended."""
    times, asked = Times(), []
    while alive := [worker for worker in workers if worker.end is None]:
        due = next_signal(times, limits)
        wait_s = None if due is None else max(0.0, due[0] - now_s())
        for number in inbox.wait(wait_s, [worker.account_fd for worker in alive if worker.listening]):
            if number not in STOPPING:
                continue
            if number == signal.SIGINT and (number in asked or times.failed_s is not None):
                return INTERRUPTED, "ended at once; start the same command again to go on from the newest checkpoint"
            if number not in asked:
                asked.append(number)
                times.asked_s = times.asked_s or now_s()
                for worker in alive:
                    worker.process.send_signal(number)
        for worker in alive:
            listen_to(worker)
            reap(worker)
        note(workers, times)
        if due is not None and now_s() >= due[0]:
            send(workers, due[1])
            times.ending_s = now_s()
    return verdict([worker.end for worker in workers if worker.end], asked=asked, grace_s=limits.grace_s)


def note(workers: Sequence[Worker], times: Times) -> None:
    """Note when the first worker failed or broke off."""
    for worker in workers:
        account, end = worker.account, worker.end
        if (account and not account.finished and account.code) or (end and kind(end) in ("failed", "lost")):
            times.failed_s = times.failed_s or now_s()
        elif end and kind(end) == "broke off":
            times.early_s = times.early_s or now_s()


def listen_to(worker: Worker) -> None:
    """Take what the worker has said."""
    while worker.listening:
        try:
            part = os.read(worker.account_fd, 65536)
        except BlockingIOError:
            return
        worker.said += part
        worker.listening = bool(part) and not part.endswith(b"\n")


def reap(worker: Worker) -> None:
    """Note the end of a worker that has ended, and end what it left behind in its group."""
    pid = worker.process.pid
    # WNOWAIT: as long as nobody has waited for it, its number, which is its group's too, cannot be given to a stranger.
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return
    kill_group(pid)
    code = worker.process.wait()
    listen_to(worker)
    account = worker.account
    if worker.output and account and account.trace:
        worker.output.write(account.trace.encode("utf-8", "backslashreplace"))
        worker.output.flush()
    tail = last_lines(worker.output, worker.begun_at) if worker.output and worker.rank and not account else ""
    worker.end = End(worker.rank, pid, code, now_s(), tuple(worker.sent), account, worker.log, tail)


def send(workers: Sequence[Worker], number: int) -> None:
    """Send a signal to every worker that lives."""
    for worker in workers:
        if worker.end is None:
            worker.sent.append(number)
            worker.process.send_signal(number)


def end_now(worker: Worker) -> None:
    """End a worker and its group, and wait for it."""
    kill_group(worker.process.pid)
    worker.process.wait()


def kill_group(pid: int) -> None:
    """SIGKILL to all in the process group of a worker that nobody has waited for yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def last_lines(output: IO[bytes], begun_at: int, lines: int = 12) -> str:
    """The end of a worker's output, from byte `begun_at` on."""
    end = output.seek(0, os.SEEK_END)
    output.seek(max(begun_at, end - 4096))
    return "\n".join(output.read().decode(errors="replace").splitlines()[-lines:])
