"""The slots of a host and their worker processes: their exits, and when they get signals."""

import json
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.agent.config import AgentTimeouts
from lockstep.agent.restart_policy import SlotHistory
from lockstep.files import open_regular, read_bytes
from lockstep.runtime.exit_report import ExitReport, WorkerExit
from lockstep.runtime.processes import kill_group, last_lines
from lockstep.runtime.status_board import Status, read_status
from lockstep.runtime.worker_env import ProcessIdentity, exit_report_path

STEP_PHASES = ("data", "forward", "backward", "reducing", "voting", "updating", "saving")


@dataclass
class Worker:
    slot: int
    process: ProcessIdentity
    pidfd: int  # readable once it has exited; never refers to another process (pidfd_open(2))
    is_child: bool  # this agent must wait for it; otherwise an earlier agent started it
    started_s: float
    signals_sent: list[int] = field(default_factory=list)  # in order to end it
    stop_sent: bool = False  # it received the stop signal
    kill_at: tuple[float, str] | None = None  # (monotonic time of the SIGKILL, reason); None: not to be killed

    @property
    def pid(self) -> int:
        """The process id, which is also its process group id and session id."""
        return self.process.pid

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int | None:
        """Kill what is left of its process group; return the exit code, None if it is unknown."""
        os.close(self.pidfd)
        if self.is_child:
            kill_group(self.pid)  # before the wait: until then its pid, which is also its group id, cannot be reused
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if not Path(f"/proc/{self.pid}").exists():  # the kernel does not reuse the number of an existing group
            kill_group(self.pid)
        return -self.signals_sent[-1] if self.signals_sent else None


@dataclass
class Slot:
    """A place for one worker on this host."""

    number: int
    start_at_s: float | None = 0.0  # when to request a worker; None: one runs, one is starting, or no further one starts
    log_offset: int = 0  # size of the slot's log when its newest worker was requested
    worker: Worker | None = None
    last_exit: WorkerExit | None = None  # of its previous worker
    history: SlotHistory = SlotHistory()


@dataclass(frozen=True)
class RunEnd:
    """The end of the run: exit code, text to print, monotonic time when this agent learned of it."""

    code: int
    text: str
    at_s: float


def signal_due(worker: Worker, now_s: float, *, run_end: RunEnd | None, asked_s: float | None, timeouts: AgentTimeouts) -> tuple[int, str]:
    """Return (signal to send to a worker now, reason); 0: none.
    asked_s: when the workers were asked to stop."""
    due: tuple[int, str] = (0, "")
    if run_end:
        delay_s = timeouts.exit_s if run_end.code else timeouts.grace_s
        if now_s >= run_end.at_s + delay_s:
            kill = now_s >= run_end.at_s + delay_s + timeouts.exit_s
            due = signal.SIGKILL if kill else signal.SIGTERM, f"did not exit within {delay_s:g} s after the run ended"
    elif asked_s is not None and now_s >= asked_s + timeouts.grace_s:
        due = signal.SIGKILL, f"did not stop within {timeouts.grace_s:g} s"
    if worker.kill_at and now_s >= worker.kill_at[0]:
        due = signal.SIGKILL, worker.kill_at[1]
    return (0, "") if due[0] in worker.signals_sent else due


def write_log(path: Path, slot: Slot, report: ExitReport | None, offset: int) -> str:
    """Append a failed worker's traceback to its log; return the log's end if it left no report."""
    with suppress(OSError):
        before = slot.last_exit and slot.last_exit.report
        if report and report.trace:
            repeated = bool(before and before.trace == report.trace)
            with open(path, "ab", opener=open_regular) as output:
                output.write(b"the same error again\n" if repeated else report.trace.encode("utf-8", "backslashreplace"))
        elif slot.number and not report:
            with open(path, "rb", opener=open_regular) as output:
                return last_lines(output, offset)
    return ""


def read_exit_report(state: Path, slot: int) -> ExitReport | None:
    with suppress(OSError, ValueError, TypeError):
        return ExitReport(**json.loads(read_bytes(exit_report_path(state, slot))))
    return None


def last_status(state: Path, worker: Worker) -> Status | None:
    with suppress(OSError):
        status = read_status(state / f"{worker.slot}.board")
        return status if status.pid == worker.pid else None
    return None


def phase_of(status: Status | None) -> str:
    """Describe the phase and step of a worker; "" outside of a step."""
    return f"{status.phase} phase of step {status.step}" if status and status.step > 0 and status.phase in STEP_PHASES else ""


def reap_orphans(known: Collection[int]) -> None:
    """Wait for exited processes that workers left behind, except those in `known`."""
    with suppress(ChildProcessError):
        while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and child.si_pid not in known:
            os.waitpid(child.si_pid, 0)
