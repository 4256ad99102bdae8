"""Start and supervise the workers of one machine, and return one exit code.

The parent imports no torch and has a single thread. It binds the rendezvous port and passes the
listening socket to rank 0, so that no other process can take the port. It starts each worker in a
process group of its own; the kernel kills the worker when the parent dies (prctl(2),
PR_SET_PDEATHSIG), so that not even SIGKILL of the parent leaves an orphan. Then it sleeps until a
worker exits or reports, or a signal arrives. Rank 0 keeps the terminal; the output of the others
goes to logs/HOST-RANK.log in the run folder.
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
from lockstep.files import open_regular, write_atomic
from lockstep.runtime.exit_report import ExitReport, WorkerExit, exit_kind, is_peer_loss, summarize_exits
from lockstep.runtime.signals import EXIT_INTERRUPTED, STOP_SIGNALS
from lockstep.runtime.worker_env import exit_report_path, read_worker_env

REPORT_FD = "LOCKSTEP_ACCOUNT_FD"
# glibc returns large blocks to the kernel at every free, and each step allocates the same ones again:
# keeping them saves page faults (mallopt(3)). Settings of the user take precedence.
MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LaunchLimits:
    """Timeouts of the parent, in seconds.

    grace_s   from a stop signal until workers are killed: time for a step and a checkpoint
    settle_s  from the first failure until SIGTERM to the others: time for their exit reports
    end_s     from SIGTERM to SIGKILL
    early_s   from an early exit with code 0 until it counts as a failure
    """

    grace_s: float = 300.0
    settle_s: float = 5.0
    end_s: float = 10.0
    early_s: float = 30.0


@dataclass
class Worker:
    """A worker process.

    report_fd, report_line  pipe of its exit report, and the bytes read; report_open: more may come
    output, log, log_start  file of its output, its path ("" for none), its length at the start
    sent                    signals that the parent sent to make it exit
    exit                    None while it runs
    """

    rank: int
    process: subprocess.Popen[bytes]
    report_fd: int
    output: IO[bytes] | None
    log: str
    log_start: int = 0
    report_line: bytes = b""
    report_open: bool = True
    sent: list[int] = field(default_factory=list)
    exit: WorkerExit | None = None

    @property
    def report(self) -> ExitReport | None:
        """Its exit report, once it is complete."""
        return ExitReport.from_line(self.report_line) if self.report_line.endswith(b"\n") else None


def default_worker_count(environ: Mapping[str, str] = os.environ, driver: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[int, str]:
    """Return (number of workers, the reason): one per GPU in CUDA_VISIBLE_DEVICES, two on a CPU."""
    if environ.get("LOCKSTEP_DEVICE") == "cpu":
        return 2, "two on the CPU (LOCKSTEP_DEVICE=cpu)"
    gpus = len(list(driver.iterdir())) if driver.is_dir() else 0
    if not gpus and (tool := shutil.which("nvidia-smi", path=environ.get("PATH"))):
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False, timeout=20).stdout
        gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None:
        devices = [device.strip() for device in visible.split(",")]
        valid = next((i for i, device in enumerate(devices) if device in ("", "-1")), len(devices))  # CUDA ignores what follows
        count, unit = (valid, "one for each GPU") if valid else (2, "two on the CPU")
        return count, f"{unit} (CUDA_VISIBLE_DEVICES={visible})"
    return (gpus, "one for each GPU") if gpus else (2, "two on the CPU, no GPU found")


def check_worker_count(workers: int, host: str, cores: int | None = None) -> None:
    """Raise a UsageError for an implausible number of workers: each process loads torch."""
    cores = cores or os.cpu_count() or 1
    most = max(64, 16 * cores)
    if workers > most:
        raise UsageError(f"{workers:,} workers on one machine", f"{host} has {cores} cores", f"start at most {most} on this machine")


def launch(
    command: Sequence[str],
    workers: int,
    *,
    run_folder: Path | None,
    port: int | None,
    environ: Mapping[str, str],
    limits: LaunchLimits = LaunchLimits(),
) -> int:
    """Run `command` as `workers` processes, print the first failure, and return the exit code.

    port     rendezvous port on 127.0.0.1; None: the kernel chooses one
    environ  base environment of the workers; launch adds torchrun's variables and LOCKSTEP_*
    UsageError before any worker is started. Main thread only.
    """
    if workers < 1:
        raise UsageError(f"{workers} workers", "--workers", "give 1 or more")
    check_worker_count(workers, "this machine")
    listener = listen_on_loopback(port)
    started: list[Worker] = []
    with SignalInbox() as inbox:
        try:
            for rank in range(workers):
                started.append(start_worker(command, rank, workers, environ, listener, run_folder))
            listener.close()
            code, text = watch_workers(started, inbox, limits)
        finally:
            listener.close()
            for worker in started:
                if worker.exit is None:
                    kill_worker(worker)
                if worker.output:
                    worker.output.close()
                os.close(worker.report_fd)
    if text:
        print(text, file=sys.stderr, flush=True)
    return code


def worker_main(function: Callable[[], int | None], about: Callable[[], Mapping[str, Any]] = dict) -> int:
    """Run `function()` and return the exit code; report failures to the parent, else on stderr.

    about  called at the end, returns further fields of the ExitReport: {"step": 7}
    """
    report, text = run_and_report(function)
    report = replace(report, **about())
    if not send_exit_report(report) and text:
        print(text, file=sys.stderr, flush=True)
    return report.code


def run_and_report(function: Callable[[], int | None]) -> tuple[ExitReport, str]:
    """Run `function()` and return (exit report, message for stderr)."""
    try:
        code = function() or 0
        return ExitReport(code, now_s(), finished=True), ""
    except KeyboardInterrupt:
        return ExitReport(EXIT_INTERRUPTED, now_s(), finished=True), ""
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        text = error.code if isinstance(error.code, str) else ""
        return ExitReport(code, now_s(), text=text), text
    except LockstepError as error:
        lost = isinstance(error, PeersLostError)
        return ExitReport(error.exit_code, now_s(), str(error), traceback.format_exc(), lost_peers=lost), str(error)
    except BaseException as error:
        trace = traceback.format_exc()
        lost = is_peer_loss(error)
        return ExitReport(PeersLostError.exit_code if lost else 1, now_s(), trace, trace, lost_peers=lost), trace


def send_exit_report(report: ExitReport) -> bool:
    """Write the report to the parent's pipe or the agent's state folder; False without either."""
    parent_fd = os.environ.pop(REPORT_FD, "")
    worker_env = read_worker_env(os.environ)
    try:
        if parent_fd:
            with open(int(parent_fd), "wb") as pipe:
                pipe.write(report.to_line())
        elif worker_env:
            write_atomic(exit_report_path(Path(worker_env.state), worker_env.slot), report.to_line())
    except OSError:  # the parent exited, the descriptor is closed, or the state folder is full
        return False
    return bool(parent_fd or worker_env)


def now_s() -> float:
    """Return CLOCK_MONOTONIC in seconds; all processes of a machine share it."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


# Starting.


def listen_on_loopback(port: int | None) -> socket.socket:
    """Return a socket that listens on 127.0.0.1. UsageError when the port is not available."""
    try:
        return socket.create_server((LOOPBACK, port or 0), backlog=1024)
    except (OSError, OverflowError) as error:
        busy = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        raise UsageError(
            f"port {port} is busy" if busy else f"port {port} cannot be used: {error}",
            f"--port, on {LOOPBACK}",
            f"omit --port to let the kernel choose a free one; find its owner: ss -ltnp 'sport = :{port}'",
        ) from None


def start_worker(
    command: Sequence[str], rank: int, size: int, environ: Mapping[str, str], listener: socket.socket, run_folder: Path | None
) -> Worker:
    """Start the worker of `rank`. UsageError when the command cannot be run."""
    output, log = open_worker_log(run_folder, rank)
    report_fd, worker_fd = os.pipe()
    os.set_blocking(report_fd, False)
    inherited = [worker_fd, listener.fileno()] if rank == 0 else [worker_fd]
    libc = ctypes.CDLL(None)  # before the fork
    parent = os.getpid()

    def tie_to_parent() -> None:
        # SIGTTOU would stop a background group that writes to a terminal with `stty tostop`.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        if sys.platform == "linux":
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # the parent died before prctl
                os._exit(128 + signal.SIGKILL)

    try:
        process = subprocess.Popen(
            list(command),
            env={**MALLOC_SETTINGS, **environ, **worker_environ(rank, size, listener), REPORT_FD: str(worker_fd)},
            stdin=subprocess.DEVNULL,
            stdout=output if rank else None,
            stderr=output if rank else None,
            pass_fds=inherited,
            process_group=0,
            preexec_fn=tie_to_parent,  # noqa: PLW1509  the parent has a single thread
        )
    except OSError as error:
        os.close(report_fd)
        raise UsageError(f"cannot start {command[0]}: {error.strerror}", f"command of the workers: {' '.join(command)}") from None
    finally:
        os.close(worker_fd)
    return Worker(rank, process, report_fd, output, log, log_start=output.tell() if output else 0)


def worker_environ(rank: int, size: int, listener: socket.socket) -> dict[str, str]:
    """Return rank, size and rendezvous address as torchrun's variables and as LOCKSTEP_*."""
    port = str(listener.getsockname()[1])
    added = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    added |= {"LOCKSTEP_RANK": rank, "LOCKSTEP_SIZE": size, "LOCKSTEP_LOCAL_RANK": rank, "LOCKSTEP_LOCAL_SIZE": size}
    added |= {"LOCKSTEP_MASTER_ADDR": LOOPBACK, "LOCKSTEP_MASTER_PORT": port}
    if rank == 0:
        added |= {"LOCKSTEP_LISTEN_FD": listener.fileno()}
    # Unbuffered: a killed worker loses no printed line.
    return {name: str(value) for name, value in added.items()} | {"PYTHONUNBUFFERED": "1"}


def open_worker_log(run_folder: Path | None, rank: int, host: str = "", *, make: bool = True) -> tuple[IO[bytes] | None, str]:
    """Return (file for a worker's output, its path); without run folder an unnamed temporary file.

    host  name of this machine in the run; "": its hostname
    make  also create the folder of the logs
    """
    if run_folder is None:
        return (tempfile.TemporaryFile() if rank else None), ""
    path = run_folder / "logs" / f"{host or socket.gethostname()}-{rank}.log"
    try:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a+b", opener=open_regular), str(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", "the run folder", "use a folder with write permission, on a disk with free space"
        ) from None


# Supervising.


class SignalInbox:
    """Context manager that queues stop signals and SIGCHLD; `wait` returns them."""

    def __enter__(self) -> SignalInbox:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)
        self.before: dict[signal.Signals, Any] = {}
        self.wakeup_before = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            self.before[number] = signal.signal(number, lambda number, frame: None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self.wakeup_before)
        os.close(self.reader)
        os.close(self.writer)

    def wait(self, timeout_s: float | None, also: Sequence[int]) -> list[int]:
        """Return queued signals after a signal, a readable descriptor in `also`, or `timeout_s`."""
        ready, _, _ = select.select([self.reader, *also], [], [], timeout_s)
        return list(os.read(self.reader, 4096)) if self.reader in ready else []


@dataclass
class LaunchTimes:
    """Times on CLOCK_MONOTONIC; None: not yet.

    failed_s      first failure
    early_s       first early exit
    stop_asked_s  first stop signal forwarded to the workers
    terminated_s  newest signal that makes the remaining workers exit
    """

    failed_s: float | None = None
    early_s: float | None = None
    stop_asked_s: float | None = None
    terminated_s: float | None = None


def next_signal(times: LaunchTimes, limits: LaunchLimits) -> tuple[float, int] | None:
    """Return (when, which signal) to send to the running workers; None: nothing is scheduled."""
    failed_s = times.failed_s
    if failed_s is None and times.early_s is not None:
        failed_s = times.early_s + limits.early_s - limits.settle_s
    if times.terminated_s is not None:
        return times.terminated_s + limits.end_s, signal.SIGKILL
    if failed_s is not None:
        return failed_s + limits.settle_s, signal.SIGTERM
    if times.stop_asked_s is not None:
        return times.stop_asked_s + limits.grace_s, signal.SIGKILL
    return None


def watch_workers(workers: Sequence[Worker], inbox: SignalInbox, limits: LaunchLimits) -> tuple[int, str]:
    """Wait until all workers have exited; return (exit code, message)."""
    times, asked = LaunchTimes(), []
    while running := [worker for worker in workers if worker.exit is None]:
        due = next_signal(times, limits)
        wait_s = None if due is None else max(0.0, due[0] - now_s())
        for number in inbox.wait(wait_s, [worker.report_fd for worker in running if worker.report_open]):
            if number not in STOP_SIGNALS:
                continue
            if number == signal.SIGINT and (number in asked or times.failed_s is not None):
                return EXIT_INTERRUPTED, "killed all workers at once; run the same command again to resume from the newest checkpoint"
            if number not in asked:
                asked.append(number)
                times.stop_asked_s = times.stop_asked_s or now_s()
                for worker in running:
                    worker.process.send_signal(number)
        for worker in running:
            read_report(worker)
            reap(worker)
        note_failures(workers, times)
        if due is not None and now_s() >= due[0]:
            send_signal(workers, due[1])
            times.terminated_s = now_s()
    return summarize_exits([worker.exit for worker in workers if worker.exit], asked=asked, grace_s=limits.grace_s)


def note_failures(workers: Sequence[Worker], times: LaunchTimes) -> None:
    """Record when the first worker failed or exited early."""
    for worker in workers:
        report, exited = worker.report, worker.exit
        if (report and not report.finished and report.code) or (exited and exit_kind(exited) in ("failed", "lost")):
            times.failed_s = times.failed_s or now_s()
        elif exited and exit_kind(exited) == "exited early":
            times.early_s = times.early_s or now_s()


def read_report(worker: Worker) -> None:
    """Read what the worker has written of its exit report."""
    while worker.report_open:
        try:
            received = os.read(worker.report_fd, 65536)
        except BlockingIOError:
            return
        worker.report_line += received
        worker.report_open = bool(received) and not received.endswith(b"\n")


def reap(worker: Worker) -> None:
    """Record the exit of a worker that has exited, and kill its remaining process group."""
    pid = worker.process.pid
    # WNOWAIT: until the worker is reaped, the kernel cannot reuse its pid, which is also its group's.
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return
    kill_group(pid)
    code = worker.process.wait()
    read_report(worker)
    report = worker.report
    if worker.output and report and report.trace:
        worker.output.write(report.trace.encode("utf-8", "backslashreplace"))
        worker.output.flush()
    tail = last_lines(worker.output, worker.log_start) if worker.output and worker.rank and not report else ""
    worker.exit = WorkerExit(worker.rank, pid, code, now_s(), tuple(worker.sent), report, worker.log, tail)


def send_signal(workers: Sequence[Worker], number: int) -> None:
    for worker in workers:
        if worker.exit is None:
            worker.sent.append(number)
            worker.process.send_signal(number)


def kill_worker(worker: Worker) -> None:
    """Kill a worker and its process group, and reap it."""
    kill_group(worker.process.pid)
    worker.process.wait()


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process group of a worker that is not reaped yet."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def last_lines(output: IO[bytes], log_start: int, lines: int = 12) -> str:
    """Return the last lines of a worker's output after byte `log_start`."""
    end = output.seek(0, os.SEEK_END)
    output.seek(max(log_start, end - 4096))
    return "\n".join(output.read().decode(errors="replace").splitlines()[-lines:])
