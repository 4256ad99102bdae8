"""The slots of an agent and their workers, its events, and the generations that it reads.

A disk that cannot be written or read stops nothing.

A stop signal is forwarded to the local workers, which include it in their vote. Workers that wait
to join have no vote. If no local worker has one, the agent asks a worker of another host to stop
the run (elastic/control.py), and exits with the run.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.agent.lock import PriorState
from lockstep.elastic import control
from lockstep.elastic.generation_log import (
    KEEP,
    NO_GENERATION,
    Generation,
    GenerationLog,
    Member,
    RunResult,
    open_generation_log,
)
from lockstep.elastic.run_folder import open_waiting_room
from lockstep.errors import DamagedFileError
from lockstep.files import open_regular, read_bytes
from lockstep.log import log
from lockstep.record.events import append_event
from lockstep.runtime.exit_report import ExitReport, WorkerExit
from lockstep.runtime.processes import kill_group, last_lines, now_s
from lockstep.runtime.status_board import Status, read_status
from lockstep.runtime.worker_env import ProcessIdentity, exit_report_path, is_loopback_reachable

TOUCH_INTERVAL_S = 3600.0
STEP_PHASES = ("data", "forward", "backward", "reducing", "voting", "updating", "saving")


@dataclass(frozen=True)
class AgentTimeouts:
    """How long an agent waits, in seconds."""

    poll_s: float = 0.1  # between two reads of the generation log
    # From a stop signal until SIGKILL, and from the end of a completed run until SIGTERM
    grace_s: float = 300.0
    # From the end of a failed run until SIGTERM, and from SIGTERM until SIGKILL
    exit_s: float = 2.0
    # From a worker's failure report until SIGKILL, if the process does not exit
    failed_exit_s: float = 10.0
    import_s: float = 120.0  # for the forkserver to import everything
    fork_s: float = 5.0  # for the forkserver to fork one worker
    # For workers of other hosts to accept a stop request, when no local worker is left
    stop_reply_s: float = 5.0
    final_eval_s: float = 600.0  # for the evaluator to score the last checkpoint of a completed run


class EventLog:
    """The events of one host. Each warning is shown only once: an outage may be long."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder, self.host = folder, host
        self.warned: set[str] = set()

    def add(self, event: str, why: str, **facts: int) -> None:
        """Append an event with its reason and the worker it concerns (slot, pid)."""
        if not append_event(self.folder, event, host=self.host, **facts, why=why):
            self.warn(f"cannot write {self.folder / 'events.jsonl'}", "its lines are lost")

    def warn(self, what: str, error: Exception | str) -> None:
        if what not in self.warned:
            self.warned.add(what)
            log.warning("%s: %s", what, error)


@dataclass
class Worker:
    slot: int
    process: ProcessIdentity
    pidfd: int  # readable once it has exited; never refers to another process (pidfd_open(2))
    is_child: bool  # this agent must wait for it; otherwise an earlier agent started it
    started_s: float
    signals_sent: list[int] = field(default_factory=list)  # in order to end it
    stop_sent: bool = False  # it received the stop signal
    # (monotonic time of the SIGKILL, reason); None: not to be killed
    kill_at: tuple[float, str] | None = None

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
            # Before the wait: until then its pid, which is also its group id, cannot be reused.
            kill_group(self.pid)
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        # The kernel does not reuse the number of an existing group.
        if not Path(f"/proc/{self.pid}").exists():
            kill_group(self.pid)
        return -self.signals_sent[-1] if self.signals_sent else None


@dataclass
class Slot:
    """A place for one worker on this host."""

    number: int
    # When to request a worker; None: one runs, one is starting, or no further one starts
    start_at_s: float | None = 0.0
    log_offset: int = 0  # size of the slot's log when its newest worker was requested
    worker: Worker | None = None
    last_exit: WorkerExit | None = None  # of its previous worker


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


class HostState:
    """The state folder of this host: what its workers leave there, by slot."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.touched_s = now_s()

    def exit_report(self, slot: int) -> ExitReport | None:
        with suppress(OSError, ValueError, TypeError):
            return ExitReport(**json.loads(read_bytes(exit_report_path(self.folder, slot))))
        return None

    def last_status(self, worker: Worker) -> Status | None:
        with suppress(OSError):
            status = read_status(self.folder / f"{worker.slot}.board")
            return status if status.pid == worker.pid else None
        return None

    def touch(self) -> None:
        """Touch the files once an hour: systemd-tmpfiles deletes old files in /tmp."""
        if now_s() > self.touched_s + TOUCH_INTERVAL_S:
            self.touched_s = now_s()
            with suppress(OSError):
                for path in (self.folder, *self.folder.iterdir()):
                    os.utime(path)


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


class GenerationReader:
    """Reads the generation log. `newest`: the newest generation read; `known`: its number."""

    def __init__(self, prior: PriorState, events: EventLog) -> None:
        self.log = GenerationLog(events.folder / "generations", since=prior.newest.number)
        self.newest = prior.newest
        self.base = prior.base_generation
        self.events = events
        self.known = self.last_handled(
            prior.newest.number, {process.pid for process in prior.running.values()}
        )

    def read_new(self) -> Iterator[tuple[Generation, Generation]]:
        """Yield (generation, the one before it) for each generation since the last call."""
        try:
            last = self.log.newest(self.known).number
            for number in range(self.known + 1, last + 1):
                before = self.newest if self.newest.number == number - 1 else self.read(number - 1)
                try:
                    self.newest = self.log.read(number)
                except DamagedFileError as error:
                    if number == last:
                        raise
                    self.events.warn(f"skipping generation {number}", error)
                    continue
                self.known = number
                yield self.newest, before
        except OSError as error:
            self.events.warn("cannot read the generation log", error)

    def last_handled(self, newest: int, running: set[int]) -> int:
        """Return the generation after which to read on, for an agent with workers of an earlier
        one. A worker that was removed meanwhile is in an earlier generation than the newest. One
        that waits to join is in none, so the search ends after KEEP generations."""
        number, oldest = newest, max(self.base, newest - KEEP)
        while running and number > oldest:
            running = running - {
                member.pid
                for member in self.read(number).members
                if member.host == self.events.host
            }
            number -= 1
        return number

    def read(self, number: int) -> Generation:
        with suppress(OSError):
            return self.log.read(number)
        return NO_GENERATION

    def active_hosts(self) -> set[str]:
        """Return the hosts of the newest generation; "" for hosts in another loopback network."""
        return {
            member.host if is_loopback_reachable(member.loopback) else ""
            for member in self.newest.members
        }

    def record_end(self, code: int, text: str, reason: str) -> None:
        """Record the end of the run as the next generation, unless another host has recorded
        one."""
        try:
            open_generation_log(self.events.folder).record_end(
                RunResult(code, text), reason, self.base
            )
        except OSError as error:
            self.events.warn(
                "cannot write the end of the run into the generation log; "
                "other hosts may not learn of it",
                error,
            )


# Between two attempts to make another worker stop the run; also the time limit of each attempt.
STOP_REQUEST_S = 1.0


class StopRequests:
    """The stop and drain signals that one agent received. drains: SIGUSR1 drains only this host."""

    def __init__(self, events: EventLog, timeouts: AgentTimeouts, *, drains: bool) -> None:
        self.events = events
        self.timeouts = timeouts
        self.drains = drains
        self.received: list[int] = []  # in order
        self.received_s: float | None = None  # monotonic time of the first one
        self.next_request_s = 0.0
        self.accepted_s = 0.0  # when a worker of another host last accepted the stop

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
        waiting_pids = {member.pid for member in waiting if member.host == self.events.host}
        for worker in workers:
            if worker.pid not in waiting_pids:
                worker.stop_sent = True
                worker.signal(number)

    def waiting_members(self) -> list[Member]:
        with suppress(OSError):
            return open_waiting_room(self.events.folder).members()
        return []

    def recipients(self, newest: Generation, workers: Collection[Worker]) -> list[Member]:
        """Return the workers that can be asked to stop the run; local ones only while they run."""
        pids = {worker.pid for worker in workers}
        members = control.stop_recipients(newest, self.waiting_members())
        return [
            member for member in members if member.host != self.events.host or member.pid in pids
        ]

    def request_elsewhere(self, newest: Generation, workers: Collection[Worker]) -> None:
        """Ask another worker to stop the run if no local one has a vote. Blocks up to 2 s."""
        if not self.stop_signal or now_s() < self.next_request_s:
            return
        voters = {member.pid for member in newest.members if member.host == self.events.host}
        # A worker only obeys the first signal that it receives.
        drained_first = any(map(self.is_drain, self.received))
        if not drained_first and any(
            worker.stop_sent and worker.pid in voters for worker in workers
        ):
            return
        recipient = control.request_stop(
            self.events.folder,
            self.recipients(newest, workers),
            self.stop_signal,
            within_s=STOP_REQUEST_S,
            each_s=STOP_REQUEST_S,
        )
        if recipient and not self.accepted_s:
            self.events.add(
                "stop passed on",
                f"{recipient.id.rpartition('/')[0]} accepted the stop; "
                "no worker of this host has a vote",
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
