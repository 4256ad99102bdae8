"""The slots of a host and their worker processes: their exits, and when they get signals.

A stop signal is forwarded to the local workers, which include it in their vote. Workers that wait
to join have no vote. If no local worker has one, the agent asks a worker of another host to stop
the run (elastic/control.py), and exits with the run.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.agent.config import AgentTimeouts
from lockstep.agent.restart_policy import SlotHistory
from lockstep.agent.run_logs import EventLog
from lockstep.elastic import control
from lockstep.elastic.generation_log import Generation, Member
from lockstep.elastic.waiting_room import WaitingRoom
from lockstep.files import open_regular, read_bytes
from lockstep.runtime.exit_report import ExitReport, WorkerExit
from lockstep.runtime.processes import kill_group, last_lines, now_s
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
    kill_at: tuple[float, str] | None = (
        None  # (monotonic time of the SIGKILL, reason); None: not to be killed
    )

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
            kill_group(
                self.pid
            )  # before the wait: until then its pid, which is also its group id, cannot be reused
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if not Path(
            f"/proc/{self.pid}"
        ).exists():  # the kernel does not reuse the number of an existing group
            kill_group(self.pid)
        return -self.signals_sent[-1] if self.signals_sent else None


@dataclass
class Slot:
    """A place for one worker on this host."""

    number: int
    start_at_s: float | None = (
        0.0  # when to request a worker; None: one runs, one is starting, or no further one starts
    )
    log_offset: int = 0  # size of the slot's log when its newest worker was requested
    worker: Worker | None = None
    last_exit: WorkerExit | None = None  # of its previous worker
    history: SlotHistory = SlotHistory()


@dataclass(frozen=True)
class RunEnd:
    """The end of the run: exit code, text to print, monotonic time when this agent learned of
    it."""

    code: int
    text: str
    at_s: float


def signal_due(
    worker: Worker,
    now_s: float,
    *,
    run_end: RunEnd | None,
    asked_s: float | None,
    timeouts: AgentTimeouts,
) -> tuple[int, str]:
    """Return (signal to send to a worker now, reason); 0: none.
    asked_s: when the workers were asked to stop."""
    due: tuple[int, str] = (0, "")
    if run_end:
        delay_s = timeouts.exit_s if run_end.code else timeouts.grace_s
        if now_s >= run_end.at_s + delay_s:
            kill = now_s >= run_end.at_s + delay_s + timeouts.exit_s
            due = (
                signal.SIGKILL if kill else signal.SIGTERM,
                f"did not exit within {delay_s:g} s after the run ended",
            )
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
                output.write(
                    b"the same error again\n"
                    if repeated
                    else report.trace.encode("utf-8", "backslashreplace")
                )
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
    return (
        f"{status.phase} phase of step {status.step}"
        if status and status.step > 0 and status.phase in STEP_PHASES
        else ""
    )


def reap_orphans(known: Collection[int]) -> None:
    """Wait for exited processes that workers left behind, except those in `known`."""
    with suppress(ChildProcessError):
        while (
            child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ) and child.si_pid not in known:
            os.waitpid(child.si_pid, 0)


STOP_REQUEST_S = 1.0  # between two attempts to make another worker stop the run; also the time limit of each attempt


class StopRequests:
    """The stop and drain signals that one agent received. drains: SIGUSR1 drains only this host."""

    def __init__(
        self, folder: Path, host: str, events: EventLog, timeouts: AgentTimeouts, *, drains: bool
    ) -> None:
        self.folder, self.host, self.events, self.timeouts, self.drains = (
            folder,
            host,
            events,
            timeouts,
            drains,
        )
        self.received: list[int] = []  # in order
        self.received_s: float | None = None  # monotonic time of the first one
        self.next_request_s = self.accepted_s = (
            0.0  # accepted: when a worker of another host last accepted the stop
        )

    def is_drain(self, number: int) -> bool:
        return number == signal.SIGUSR1 and self.drains

    @property
    def is_draining(self) -> bool:
        """Whether this host leaves and the run continues without it."""
        return any(map(self.is_drain, self.received)) and not self.stop_signal

    @property
    def stop_signal(self) -> str:
        """Name of the first signal that stops the run; "" for none."""
        return next(
            (signal.Signals(number).name for number in self.received if not self.is_drain(number)),
            "",
        )

    def forward(self, number: int, workers: Collection[Worker]) -> None:
        """Send a signal to the workers that do not wait to join; the waiting ones exit with the
        run."""
        self.received.append(number)
        self.received_s = self.received_s or now_s()
        self.events.add("signal passed on", f"the agent received {signal.Signals(number).name}")
        waiting = [] if self.is_drain(number) else self.waiting_members()
        waiting_pids = {member.pid for member in waiting if member.host == self.host}
        for worker in workers:
            if worker.pid not in waiting_pids:
                worker.stop_sent = True
                worker.signal(number)

    def waiting_members(self) -> list[Member]:
        with suppress(OSError):
            return WaitingRoom(self.folder).members()
        return []

    def recipients(self, newest: Generation, workers: Collection[Worker]) -> list[Member]:
        """Return the workers that can be asked to stop the run; local ones only while they run."""
        pids = {worker.pid for worker in workers}
        members = control.stop_recipients(newest, self.waiting_members())
        return [member for member in members if member.host != self.host or member.pid in pids]

    def request_elsewhere(self, newest: Generation, workers: Collection[Worker]) -> None:
        """Ask another worker to stop the run if no local one has a vote. Blocks up to 2 s."""
        if not self.stop_signal or now_s() < self.next_request_s:
            return
        voters = {member.pid for member in newest.members if member.host == self.host}
        drained_first = any(
            map(self.is_drain, self.received)
        )  # a worker only obeys the first signal that it receives
        if not drained_first and any(
            worker.stop_sent and worker.pid in voters for worker in workers
        ):
            return
        recipient = control.request_stop(
            self.folder,
            self.recipients(newest, workers),
            self.stop_signal,
            within_s=STOP_REQUEST_S,
            each_s=STOP_REQUEST_S,
        )
        if recipient and not self.accepted_s:
            self.events.add(
                "stop passed on",
                f"{recipient.id.rpartition('/')[0]} accepted the stop; no worker of this host has a vote",
            )
        self.accepted_s = now_s() if recipient else self.accepted_s
        self.next_request_s = now_s() + STOP_REQUEST_S

    def awaits_run_end(self, newest: Generation, workers: Collection[Worker]) -> bool:
        if not self.stop_signal or self.received_s is None:
            return False
        until_s = min(
            max(self.received_s, self.accepted_s) + self.timeouts.stop_reply_s,
            self.received_s + self.timeouts.grace_s,
        )
        return now_s() < until_s and bool(self.recipients(newest, workers))
