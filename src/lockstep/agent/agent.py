"""The agent: one process per host that starts the workers, detects their exits and restarts them.

The agent imports no torch, starts no thread and keeps all its state in files: the processes of the
slots in the state folder (runtime/worker_env.py), the run's state in the generation log. So it may
die at any time. Under `lockstep launch` its workers keep training and the next agent adopts them;
under `lockstep train` the kernel kills them with it.

It sleeps until a worker exits (its pidfd becomes readable), the forkserver answers or a signal
arrives, and polls the generation log. It kills local workers that the newest generation removed; a
generation with a result ends the run.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lockstep.agent import restart_policy
from lockstep.agent.evaluator_process import EvaluatorProcess
from lockstep.agent.forkserver import RETRY_S, PendingWorker, WorkerPool, WorkerProgram
from lockstep.agent.leader_output import LeaderOutput
from lockstep.agent.lock import PriorState, agent_lock, kill_all
from lockstep.agent.restart_policy import RestartDecisions, RestartPolicy
from lockstep.agent.slots import (
    AgentTimeouts,
    EventLog,
    GenerationReader,
    HostState,
    RunEnd,
    Slot,
    StopRequests,
    Worker,
    phase_of,
    reap_orphans,
    signal_due,
    write_log,
)
from lockstep.elastic import run_folder
from lockstep.elastic.generation_log import Generation
from lockstep.errors import LockstepError, UsageError
from lockstep.log import log, printable
from lockstep.runtime.environment import check_worker_count
from lockstep.runtime.exit_report import ExitReport, WorkerExit, summarize_exits
from lockstep.runtime.processes import PR_SET_CHILD_SUBREAPER, now_s, open_worker_log, prctl
from lockstep.runtime.signals import EXIT_INTERRUPTED, STOP_SIGNALS, SignalInbox
from lockstep.runtime.worker_env import (
    ProcessIdentity,
    WorkerEnv,
    exit_report_path,
    identify_process,
    state_folder,
    write_worker_process,
)

FIXED_TIMEOUTS = AgentTimeouts(exit_s=5.0)  # of a fixed group: for the exit reports of the others
LOOPBACK = "127.0.0.1"
KILLED = "killed all workers; the same command resumes from the newest checkpoint"
# The reason of a removal because connections are closed and refused
# (elastic/protocol/transitions.py).
EXITED = "exited"


def run_agent(program: WorkerProgram, folder: Path, config: AgentConfig) -> int:
    """Run this host's workers as `run_until_end`; print the first failure, return the exit code."""
    code, text = run_until_end(program, folder, config)
    if text:
        print(printable(text), file=sys.stderr, flush=True)
    return code


def run_until_end(program: WorkerProgram, folder: Path, config: AgentConfig) -> tuple[int, str]:
    """Run this host's workers until the run ends; return (exit code, text for stderr or "").
    Call it from the main thread. Errors: UsageError, before anything was started."""
    if sys.platform != "linux":
        raise UsageError(
            f"the agent does not support {sys.platform}",
            "it needs pidfd_open(2) and prctl(2)",
            "start the workers with torchrun -m lockstep COMMAND",
        )
    env = config.env
    state = state_folder(folder, env.host, temporary=not config.policy.restart)
    sizes = {"--workers": env.slots, "--min": env.min_workers, "--max": env.max_workers}
    command = {**config.command, **{name: str(size) for name, size in sizes.items()}}
    lock = agent_lock(folder, state, env.host, command, slots=env.slots, lives_on=config.lives_on)
    with SignalInbox() as inbox, lock as prior:
        # Orphans of exited workers become children of this process.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        worker_env = replace(
            env,
            folder=str(folder.resolve()),
            state=str(state),
            after_generation=prior.base_generation,
            agent_pid=0 if config.lives_on else os.getpid(),
            drain=config.lives_on,
            folder_id=prior.folder_id,
        )
        agent = Agent(program, config, worker_env, prior)
        try:
            return agent.run(inbox)
        finally:
            agent.close()


def run_fixed_group(
    program: WorkerProgram, workers: int, timeouts: AgentTimeouts = FIXED_TIMEOUTS
) -> int:
    """Run `evaluate --workers` or `generate --tensor`: workers that share one computation.

    The agent restarts no worker: the first failure ends them all, and is printed. The generations
    of the group are in a temporary folder.
    Call it from the main thread. UsageError before any worker is started.
    """
    check_worker_count(workers, "this machine")
    policy = RestartPolicy(restart=False)
    config = AgentConfig.for_this_machine(workers, timeouts=timeouts, policy=policy)
    with TemporaryDirectory(prefix="lockstep-") as folder:
        return run_agent(program, Path(folder), config)


@dataclass(frozen=True)
class AgentConfig:
    """Settings of an agent."""

    env: WorkerEnv  # of its workers; the agent adds the folders and what it finds in them
    # Workers outlive the agent, SIGUSR1 drains this host; else they exit with it
    lives_on: bool = False
    # Settings by name: running workers are adopted if they have the same.
    command: Mapping[str, str] = field(default_factory=dict)
    evaluator: bool = False  # run an evaluator process beside the workers
    timeouts: AgentTimeouts = AgentTimeouts()
    policy: RestartPolicy = RestartPolicy()

    @classmethod
    def for_this_machine(
        cls, workers: int, min_workers: int = 0, max_workers: int = 0, **settings: Any
    ) -> AgentConfig:
        """Return the settings of an agent without other hosts, whose workers exit with it."""
        sizes = (workers, workers, min_workers or workers, max_workers or workers)
        return cls(WorkerEnv("", "", socket.gethostname(), 0, *sizes, LOOPBACK), **settings)


class Agent:
    def __init__(
        self,
        program: WorkerProgram,
        config: AgentConfig,
        worker_env: WorkerEnv,
        prior: PriorState,
    ) -> None:
        self.worker_env = worker_env
        self.timeouts = config.timeouts
        self.folder = Path(worker_env.folder)
        self.state = HostState(Path(worker_env.state))
        self.events = EventLog(self.folder, worker_env.host)
        self.pool = WorkerPool(program, self.events, self.timeouts)
        self.evaluator = EvaluatorProcess(os.environ, self.events, enabled=config.evaluator)
        self.stops = StopRequests(self.events, self.timeouts, drains=worker_env.drain)
        self.generations = GenerationReader(prior, self.events)
        self.leader_output = LeaderOutput(self.folder, worker_env.host)
        has_all = worker_env.slots == worker_env.expected_workers
        self.decisions = RestartDecisions(config.policy, worker_env.slots if has_all else 0)
        self.run_end: RunEnd | None = None
        # Pids of the local workers that trained until the end of the run.
        self.finishers: set[int] = set()
        self.has_trained = False  # a worker of this agent was a member of a generation
        self.slots = {number: Slot(number) for number in range(worker_env.slots)}
        for number, process in prior.running.items():
            self.adopt(self.slots[number], process)

    @property
    def host(self) -> str:
        return self.worker_env.host

    @property
    def restarts(self) -> bool:
        """Whether it restarts workers at all; not in a fixed group."""
        return self.decisions.policy.restart

    @property
    def workers(self) -> list[Worker]:
        return [slot.worker for slot in self.slots.values() if slot.worker]

    def run(self, inbox: SignalInbox) -> tuple[int, str]:
        """Return (exit code, text to print) once no worker is left."""
        while not self.is_done():
            self.request_due_workers()
            for started in self.pool.poll():
                self.on_worker_started(self.slots[started.slot], started)
            for number in inbox.wait(self.sleep_s(), [*self.pool.descriptors(), *self.pidfds()]):
                if number == signal.SIGINT and (number in self.stops.received or self.run_end):
                    kill_all(worker.process for worker in self.workers)
                    return EXIT_INTERRUPTED, KILLED
                if number in STOP_SIGNALS and number not in self.stops.received:
                    self.stop_starting()
                    self.stops.forward(number, self.workers)
            self.state.touch()
            # Before the log is read: if they recorded the end of the run, it is known below.
            ready, _, _ = select.select(self.pidfds(), [], [], 0)
            exited_workers = [worker for worker in self.workers if worker.pidfd in ready]
            for worker in exited_workers:
                self.leader_output.on_exit(worker.slot)
            for record, before in self.generations.read_new():
                self.apply_generation(record, before)
                self.leader_output.follow(record)
            self.leader_output.copy()
            for worker in exited_workers:
                self.on_worker_exit(worker)
            if not self.run_end:
                self.stops.request_elsewhere(self.generations.newest, self.workers)
            self.escalate_signals()
            self.evaluator.poll()
            pids = {worker.pid for worker in self.workers}
            reap_orphans(pids | self.pool.pids() | self.evaluator.pids())
        code, text = self.result()
        if not code and not self.stops.is_draining:
            self.await_evaluator(inbox)
        return code, text

    def is_done(self) -> bool:
        if self.workers or self.pool.pending or self.start_times():
            return False
        return bool(self.run_end) or not self.stops.awaits_run_end(
            self.generations.newest, self.workers
        )

    def start_times(self) -> list[float]:
        slots = self.slots.values()
        return [slot.start_at_s for slot in slots if slot.start_at_s is not None]

    def sleep_s(self) -> float:
        due_s = min(self.start_times(), default=math.inf) - now_s()
        return max(0.0, min(self.timeouts.poll_s, due_s))

    def pidfds(self) -> list[int]:
        return [worker.pidfd for worker in self.workers]

    def await_evaluator(self, inbox: SignalInbox) -> None:
        """Let it score the last checkpoint, until a stop signal."""
        until_s = now_s() + self.timeouts.final_eval_s
        while self.evaluator.is_running and now_s() < until_s:
            if set(STOP_SIGNALS) & set(inbox.wait(self.timeouts.poll_s, [])):
                return

    def result(self) -> tuple[int, str]:
        exits = [slot.last_exit for slot in self.slots.values() if slot.last_exit]
        if self.run_end and self.restarts:
            late = [one for one in exits if restart_policy.fails_at_end(one, self.finishers)]
            if late and not self.run_end.code:
                return summarize_exits(late)
            return self.run_end.code, self.run_end.text
        if not exits and self.stops.is_draining:
            return 0, ""
        if not exits:
            number = self.stops.received[0]
            what = f"received {signal.Signals(number).name} before any worker had started"
            return 128 + number, str(LockstepError(what, f"{self.host}, {self.folder}"))
        if self.restarts:
            exits = [one for one in exits if one.kind == "completed"] or exits
        return summarize_exits(exits, asked=self.stops.received, grace_s=self.timeouts.grace_s)

    def close(self) -> None:
        """Release everything. Workers keep running under `launch`, and are killed under `train`."""
        self.pool.close()
        self.evaluator.close()
        if self.worker_env.agent_pid:
            kill_all(worker.process for worker in self.workers)
        for worker in self.workers:
            os.close(worker.pidfd)
        reap_orphans(())

    # -- stopping ----------------------------------------------------------------------------------

    def stop_starting(self) -> None:
        self.pool.cancel()
        for slot in self.slots.values():
            slot.start_at_s = None

    def end_run(self, decision: restart_policy.RestartDecision, reason: str) -> None:
        """End the run: on this host now, on the others through the generation log."""
        code, text = decision.code, decision.text
        self.run_end = RunEnd(code, text, now_s())
        self.stop_starting()
        self.events.add("run ended", reason)
        active_hosts = self.generations.active_hosts()
        if not restart_policy.fails_only_here(
            code, active_hosts, self.host, at_start=decision.at_start
        ):
            self.generations.record_end(code, text, reason)

    def escalate_signals(self) -> None:
        """Send SIGTERM, then SIGKILL, to workers that should have exited."""
        now = now_s()
        for worker in self.workers:
            report = None if worker.kill_at else self.state.exit_report(worker.slot)
            if report and not report.finished:
                delay_s = self.timeouts.failed_exit_s
                why = f"reported a failure and did not exit within {delay_s:g} s"
                worker.kill_at = (now + delay_s, why)
            number, reason = signal_due(
                worker,
                now,
                run_end=self.run_end,
                asked_s=self.stops.received_s,
                timeouts=self.timeouts,
            )
            if number:
                worker.signals_sent.append(number)
                name = signal.Signals(number).name
                self.events.add(f"{name} sent", reason, slot=worker.slot, pid=worker.pid)
                worker.signal(number)

    def apply_generation(self, record: Generation, before: Generation) -> None:
        """Schedule SIGKILL for local workers that were removed; end if the run ended."""
        members = {member.id: member for member in before.members}
        for removed in record.out:
            member = members.get(removed.id)
            slot = self.slots.get(member.slot) if member and member.host == self.host else None
            if member and slot and slot.worker and slot.worker.pid == member.pid:
                # A worker that leaves because this host is drained needs a moment to exit.
                # A worker whose connections were closed may be about to write its exit report.
                leaving = removed.why == EXITED or signal.SIGUSR1 in self.stops.received
                delay_s = self.timeouts.exit_s if leaving else 0.0
                why = f"removed from generation {record.number}: {removed.why}"
                slot.worker.kill_at = (now_s() + delay_s, why)
        own_pids = {worker.pid for worker in self.workers}
        both = (*before.members, *record.members)
        local = {member.pid for member in both if member.host == self.host}
        self.has_trained = self.has_trained or bool(own_pids & local)
        if record.end and not self.run_end:
            self.finishers = {member.pid for member in members.values() if member.host == self.host}
            missed = ""
            if not self.has_trained:
                missed = restart_policy.describe_missed_run(record, self.host)
            self.run_end = RunEnd(record.end.code, record.end.text or missed, now_s())
            self.stop_starting()

    # -- workers -----------------------------------------------------------------------------------

    def request_due_workers(self) -> None:
        for slot in self.slots.values():
            if slot.start_at_s is not None and slot.start_at_s <= now_s():
                try:
                    self.request_worker(slot)
                    slot.start_at_s = None
                except OSError as error:  # out of file descriptors
                    self.events.warn(f"cannot request a worker for slot {slot.number}", error)
                    slot.start_at_s = now_s() + RETRY_S

    def request_worker(self, slot: Slot) -> None:
        """Request a worker. Slot 0 writes to the agent's terminal, the others to their logs; what
        rank 0 prints there is shown, too (leader_output.py)."""
        with suppress(OSError):
            exit_report_path(self.state.folder, slot.number).unlink(missing_ok=True)
            run_folder.remove_stale_files(self.folder, self.host, slot.number)
        worker_env = replace(
            self.worker_env, slot=slot.number, known_generation=self.generations.known
        )
        restarted = slot.last_exit is not None
        if slot.number == 0:
            self.pool.request(worker_env, 1, 2, restarted=restarted)
            return
        try:
            with open_worker_log(self.folder, slot.number, self.host) as output:
                slot.log_offset = output.tell()
                self.pool.request(worker_env, output.fileno(), output.fileno(), restarted=restarted)
        except UsageError as error:
            self.events.warn(f"slot {slot.number} writes to the terminal", error)
            self.pool.request(worker_env, 2, 2, restarted=restarted)

    def on_worker_started(self, slot: Slot, started: PendingWorker) -> None:
        """Record the process of `slot` and let the worker run."""
        process = identify_process(started.pid, slot.log_offset)
        slot.worker = Worker(slot.number, process, os.pidfd_open(started.pid), True, now_s())
        try:
            write_worker_process(self.state.folder, slot.number, process)
        except OSError as error:
            self.events.warn(
                f"cannot record the process of slot {slot.number}; "
                "the next agent would not find it",
                error,
            )
        # Before it can do anything.
        self.events.add("worker started", started.method, slot=slot.number, pid=started.pid)
        with suppress(BrokenPipeError):
            os.write(started.gate_writer, b".")
        os.close(started.gate_writer)

    def adopt(self, slot: Slot, process: ProcessIdentity) -> None:
        """Manage a worker that an earlier agent started."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        # The pid may have been reused, and the pidfd may refer to another process
        if not process.alive:
            os.close(pidfd)
            return
        slot.worker, slot.start_at_s = Worker(slot.number, process, pidfd, False, now_s()), None
        self.events.add(
            "worker taken over",
            "its agent had died, and it kept training",
            slot=slot.number,
            pid=process.pid,
        )
        log.info(
            "adopted slot %d (pid %d), which kept training without its agent",
            slot.number,
            process.pid,
        )

    def on_worker_exit(self, worker: Worker) -> None:
        """Collect the exit of a worker, remove what it left behind, and restart it or end the
        run."""
        slot = self.slots[worker.slot]
        slot.worker = None
        last_exit = slot.last_exit = self.collect_exit(slot, worker)
        with suppress(OSError):
            run_folder.remove_stale_files(self.folder, self.host, worker.slot)
        status, newest = self.state.last_status(worker), self.generations.newest
        # A crash counts at the worker's own step, a kill at the step of the run.
        step = newest.step if newest.number else -1
        if status and restart_policy.is_crash(last_exit):
            step = status.step - 1
        decision = self.decisions.decide(
            last_exit,
            lived_s=last_exit.at_s - worker.started_s,
            step=step,
            phase=phase_of(status),
            stopping=bool(self.stops.received or self.run_end),
        )
        self.events.add("worker ended", decision.reason, slot=worker.slot, pid=worker.pid)
        if decision.action == "restart":
            log.warning("%s", self.decisions.describe(last_exit, decision))
            slot.start_at_s = now_s() + decision.delay_s
        elif decision.action == "end":
            self.end_run(decision, f"{last_exit} on {self.host}: {decision.reason}")

    def collect_exit(self, slot: Slot, worker: Worker) -> WorkerExit:
        """Reap a worker that has exited, write its log, and return how it exited."""
        code = worker.reap()
        report = self.state.exit_report(slot.number)
        is_idle = self.stops.is_draining and code in (None, -signal.SIGUSR1)
        if not report and is_idle:  # it waited or was starting: nothing to hand over
            report = ExitReport(0, now_s(), finished=True, drained=True)
            worker.signals_sent.append(signal.SIGUSR1)
        path = self.folder / "logs" / f"{self.host}-{slot.number}.log"
        tail = write_log(path, slot, report, worker.process.log_offset)
        # The folder of a fixed group is temporary, and its slots are its ranks.
        log_path = str(path) if path.exists() and self.restarts else ""
        title = "slot" if self.restarts else "rank"
        return WorkerExit(
            slot.number,
            worker.pid,
            code,
            now_s(),
            tuple(worker.signals_sent),
            report,
            log_path,
            tail,
            title,
        )
