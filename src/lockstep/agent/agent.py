"""The agent: one process per host that starts the workers, detects their exits and restarts them.

The agent imports no torch, starts no thread and keeps all its state in files: the processes of the
slots in the state folder (runtime/worker_env.py), the run's state in the generation log. So it may
die at any time. Under `lockstep launch` its workers keep training and the next agent adopts them;
under `lockstep train` the kernel kills them with it.

It sleeps until a worker exits (its pidfd becomes readable), the forkserver answers or a signal
arrives, and polls the generation log. It kills local workers that the newest generation removed; a
generation with a result ends the run.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lockstep.agent import restart_policy
from lockstep.agent.config import LOOPBACK, AgentConfig, AgentTimeouts
from lockstep.agent.evaluator_process import EvaluatorProcess
from lockstep.agent.forkserver import WorkerProgram
from lockstep.agent.leader_output import LeaderOutput
from lockstep.agent.lock import PriorState, agent_lock, kill_all
from lockstep.agent.run_logs import EventLog, GenerationReader
from lockstep.agent.slots import (
    RunEnd,
    Slot,
    StopRequests,
    Worker,
    last_status,
    phase_of,
    read_exit_report,
    reap_orphans,
    signal_due,
    write_log,
)
from lockstep.agent.worker_pool import RETRY_S, PendingWorker, WorkerPool
from lockstep.elastic import waiting_room
from lockstep.elastic.generation_log import Generation
from lockstep.errors import LockstepError, UsageError
from lockstep.log import log, printable
from lockstep.runtime.environment import check_worker_count
from lockstep.runtime.exit_report import ExitReport, WorkerExit, exit_kind, summarize_exits
from lockstep.runtime.processes import PR_SET_CHILD_SUBREAPER, now_s, open_worker_log, prctl
from lockstep.runtime.signals import EXIT_INTERRUPTED, STOP_SIGNALS, SignalInbox
from lockstep.runtime.sockets import reserve_port
from lockstep.runtime.worker_env import (
    ProcessIdentity,
    WorkerEnv,
    exit_report_path,
    identify_process,
    state_folder,
    write_worker_process,
)

TOUCH_INTERVAL_S = 3600.0
STATIC_TIMEOUTS = AgentTimeouts(
    exit_s=5.0
)  # of a static group: time for the exit reports of the other workers
# Fields of AgentConfig that the workers receive unchanged.
SHARED_FIELDS = (
    "host",
    "slots",
    "expected_workers",
    "min_workers",
    "max_workers",
    "address",
    "flags",
    "master_port",
)
EXITED = "exited"  # the reason of a removal because connections are closed and refused (elastic/protocol/transitions.py)


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
        hint = "start the workers with torchrun -m lockstep COMMAND"
        raise UsageError(
            f"the agent does not support {sys.platform}",
            "it needs pidfd_open(2) and prctl(2)",
            hint,
        )
    state = state_folder(folder, config.host, temporary=bool(config.master_port))
    sizes = {"--workers": config.slots, "--min": config.min_workers, "--max": config.max_workers}
    command = {**config.command, **{name: str(size) for name, size in sizes.items()}}
    with (
        SignalInbox() as inbox,
        agent_lock(
            folder, state, config.host, command, slots=config.slots, lives_on=config.lives_on
        ) as prior,
    ):
        prctl(
            PR_SET_CHILD_SUBREAPER, 1
        )  # orphans of exited workers become children of this process
        worker_env = WorkerEnv(
            **{name: getattr(config, name) for name in SHARED_FIELDS},
            folder=str(folder.resolve()),
            state=str(state),
            slot=0,
            after_generation=prior.base_generation,
            agent_pid=0 if config.lives_on else os.getpid(),
            drain=config.lives_on,
            folder_id=prior.folder_id,
        )
        agent = Agent(program, folder, config, worker_env, prior)
        try:
            return agent.run(inbox)
        finally:
            agent.close()


def run_static_group(
    program: WorkerProgram, workers: int, timeouts: AgentTimeouts = STATIC_TIMEOUTS
) -> int:
    """Run a static group on this host: `evaluate --workers` and `generate --tensor`.

    The agent restarts no worker: the first failure ends them all, and is printed. Its files are in
    a temporary folder. The workers get torchrun's variables and a port that is reserved here.
    Call it from the main thread. UsageError before any worker is started.
    """
    check_worker_count(workers, "this machine")
    with TemporaryDirectory(prefix="lockstep-") as folder, reserve_port(LOOPBACK) as reserved:
        port, policy = reserved.getsockname()[1], restart_policy.RestartPolicy(restart=False)
        config = AgentConfig.for_this_machine(
            workers, master_port=port, timeouts=timeouts, policy=policy
        )
        return run_agent(program, Path(folder), config)


class Agent:
    def __init__(
        self,
        program: WorkerProgram,
        folder: Path,
        config: AgentConfig,
        worker_env: WorkerEnv,
        prior: PriorState,
    ) -> None:
        self.worker_env, self.timeouts, self.policy = worker_env, config.timeouts, config.policy
        self.folder, self.state, self.host = (
            Path(worker_env.folder),
            Path(worker_env.state),
            worker_env.host,
        )
        self.events = EventLog(folder, self.host)
        self.pool = WorkerPool(
            program,
            config.environ,
            self.events,
            import_s=self.timeouts.import_s,
            fork_s=self.timeouts.fork_s,
        )
        self.evaluator = EvaluatorProcess(
            folder, self.host, config.environ, self.events, enabled=config.evaluator
        )
        self.stops = StopRequests(
            self.folder, self.host, self.events, self.timeouts, drains=worker_env.drain
        )
        self.generations = GenerationReader(self.folder, prior, self.events)
        self.leader_output = LeaderOutput(self.folder, self.host)
        self.run_end: RunEnd | None = None
        self.finishers: set[int] = (
            set()
        )  # pids of the local workers that trained until the end of the run
        self.has_trained = False  # a worker of this agent was a member of a generation
        self.shown_errors: set[str] = (
            set()
        )  # one-line summaries of worker errors that were already logged
        self.start_errors: dict[
            int, str
        ] = {}  # by slot, `start_error` of its first worker, once that has exited
        self.touched_s = now_s()
        self.slots = {number: Slot(number) for number in range(worker_env.slots)}
        for number, process in prior.running.items():
            self.adopt(self.slots[number], process)

    @property
    def workers(self) -> list[Worker]:
        return [slot.worker for slot in self.slots.values() if slot.worker]

    def run(self, inbox: SignalInbox) -> tuple[int, str]:
        """Return (exit code, text to print) once no worker is left."""
        while (
            self.workers
            or self.pool.pending
            or any(slot.start_at_s is not None for slot in self.slots.values())
            or (
                not self.run_end
                and self.stops.awaits_run_end(self.generations.newest, self.workers)
            )
        ):
            self.request_due_workers()
            for started in self.pool.poll():
                self.on_worker_started(self.slots[started.slot], started)
            due_s = [
                slot.start_at_s - now_s()
                for slot in self.slots.values()
                if slot.start_at_s is not None
            ]
            sleep_s = max(0.0, min([self.timeouts.poll_s, *due_s]))
            for number in inbox.wait(
                sleep_s, [*self.pool.descriptors(), *[worker.pidfd for worker in self.workers]]
            ):
                if number == signal.SIGINT and (number in self.stops.received or self.run_end):
                    kill_all({worker.slot: worker.process for worker in self.workers})
                    return (
                        EXIT_INTERRUPTED,
                        "killed all workers; the same command resumes from the newest checkpoint",
                    )
                if number in STOP_SIGNALS and number not in self.stops.received:
                    self.stop_starting()
                    self.stops.forward(number, self.workers)
            self.touch_state_folder()
            # Before the log is read: if they recorded the end of the run, it is known below.
            ready, _, _ = select.select([worker.pidfd for worker in self.workers], [], [], 0)
            exited_workers = [worker for worker in self.workers if worker.pidfd in ready]
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
            reap_orphans(
                {worker.pid for worker in self.workers} | self.pool.pids() | self.evaluator.pids()
            )
        code, text = self.result()
        if (
            not code and not self.stops.is_draining
        ):  # it scores the last checkpoint, until a stop signal
            until_s = now_s() + self.timeouts.final_eval_s
            while (
                self.evaluator.is_running
                and now_s() < until_s
                and not set(STOP_SIGNALS) & set(inbox.wait(self.timeouts.poll_s, []))
            ):
                pass
        return code, text

    def touch_state_folder(self) -> None:
        """Touch the state folder once an hour: systemd-tmpfiles deletes old files in /tmp."""
        if now_s() > self.touched_s + TOUCH_INTERVAL_S:
            self.touched_s = now_s()
            with suppress(OSError):
                for path in (self.state, *self.state.iterdir()):
                    os.utime(path)

    def result(self) -> tuple[int, str]:
        exits = [slot.last_exit for slot in self.slots.values() if slot.last_exit]
        if self.run_end and self.policy.restart:
            late = [
                last_exit
                for last_exit in exits
                if restart_policy.fails_at_end(last_exit, self.finishers)
            ]
            return (
                summarize_exits(late)
                if late and not self.run_end.code
                else (self.run_end.code, self.run_end.text)
            )
        if not exits and self.stops.is_draining:
            return 0, ""
        if not exits:
            number = self.stops.received[0]
            what = f"received {signal.Signals(number).name} before any worker had started"
            return 128 + number, str(LockstepError(what, f"{self.host}, {self.folder}"))
        completed = (
            [last_exit for last_exit in exits if exit_kind(last_exit) == "completed"]
            if self.policy.restart
            else []
        )
        return summarize_exits(
            completed or exits, asked=self.stops.received, grace_s=self.timeouts.grace_s
        )

    def close(self) -> None:
        """Release everything. Workers keep running under `launch`, and are killed under `train`."""
        self.pool.close()
        self.evaluator.close()
        if self.worker_env.agent_pid:
            kill_all({worker.slot: worker.process for worker in self.workers})
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
            if (
                not worker.kill_at
                and (report := read_exit_report(self.state, worker.slot))
                and not report.finished
            ):
                delay_s = self.timeouts.failed_exit_s
                worker.kill_at = (
                    now + delay_s,
                    f"reported a failure and did not exit within {delay_s:g} s",
                )
            number, reason = signal_due(
                worker,
                now,
                run_end=self.run_end,
                asked_s=self.stops.received_s,
                timeouts=self.timeouts,
            )
            if number:
                worker.signals_sent.append(number)
                self.events.add(
                    f"{signal.Signals(number).name} sent", reason, slot=worker.slot, pid=worker.pid
                )
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
                slot.worker.kill_at = (
                    now_s() + delay_s,
                    f"removed from generation {record.number}: {removed.why}",
                )
        own_pids = {worker.pid for worker in self.workers}
        local_members = [
            member for member in (*before.members, *record.members) if member.host == self.host
        ]
        self.has_trained = self.has_trained or any(
            member.pid in own_pids for member in local_members
        )
        if record.end and not self.run_end:
            self.finishers = {member.pid for member in members.values() if member.host == self.host}
            missed = (
                "" if self.has_trained else restart_policy.describe_missed_run(record, self.host)
            )
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
            exit_report_path(self.state, slot.number).unlink(missing_ok=True)
            waiting_room.remove_stale_files(self.folder, self.host, slot.number)
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
            write_worker_process(self.state, slot.number, process)
        except OSError as error:
            self.events.warn(
                f"cannot record the process of slot {slot.number}; the next agent would not find it",
                error,
            )
        self.events.add(
            "worker started", started.method, slot=slot.number, pid=started.pid
        )  # before it can do anything
        with suppress(BrokenPipeError):
            os.write(started.gate_writer, b".")
        os.close(started.gate_writer)

    def adopt(self, slot: Slot, process: ProcessIdentity) -> None:
        """Manage a worker that an earlier agent started."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        if (
            not process.alive
        ):  # the pid may have been reused, and the pidfd may refer to another process
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
        self.leader_output.on_exit(slot.number)
        last_exit = slot.last_exit = self.collect_exit(slot, worker)
        with suppress(OSError):
            waiting_room.remove_stale_files(self.folder, self.host, worker.slot)
        status, newest = last_status(self.state, worker), self.generations.newest
        lived_s = last_exit.at_s - worker.started_s
        decision, slot.history = restart_policy.decide_restart(
            last_exit,
            slot.history,
            lived_s=lived_s,
            # A crash counts at the worker's own step, a kill at the step of the run.
            step=status.step - 1
            if status and restart_policy.is_crash(last_exit)
            else newest.step
            if newest.number
            else -1,
            phase=phase_of(status),
            stopping=bool(self.stops.received or self.run_end),
            policy=self.policy,
        )
        if (
            slot.number not in self.start_errors
            and self.worker_env.slots == self.worker_env.expected_workers
        ):
            self.start_errors[slot.number] = restart_policy.start_error(
                last_exit, lived_s, self.policy
            )
            decision = restart_policy.decide_first_exit(
                decision, last_exit, self.start_errors, self.worker_env.slots
            )
        self.events.add("worker ended", decision.reason, slot=worker.slot, pid=worker.pid)
        if decision.action == "restart":
            summary = restart_policy.summarize(last_exit)
            # An error of a user's function occurs in every worker, and again after each restart.
            repeated = restart_policy.is_own_fault(last_exit) and summary in self.shown_errors
            log.warning(
                "%s: %s",
                last_exit,
                decision.reason.replace(summary, "the same error") if repeated else decision.reason,
            )
            self.shown_errors.add(summary)
            slot.start_at_s = now_s() + decision.delay_s
        elif decision.action == "end":
            self.end_run(decision, f"{last_exit} on {self.host}: {decision.reason}")

    def collect_exit(self, slot: Slot, worker: Worker) -> WorkerExit:
        """Reap a worker that has exited, write its log, and return how it exited."""
        code = worker.reap()
        report = read_exit_report(self.state, slot.number)
        if (
            not report and self.stops.is_draining and code in (None, -signal.SIGUSR1)
        ):  # it waited or was starting: nothing to hand over
            report = ExitReport(0, now_s(), finished=True, drained=True)
            worker.signals_sent.append(signal.SIGUSR1)
        path = self.folder / "logs" / f"{self.host}-{slot.number}.log"
        tail = write_log(path, slot, report, worker.process.log_offset)
        is_static = bool(
            self.worker_env.master_port
        )  # its folder is temporary, and its slots are its ranks
        log_path, title = (
            str(path) if path.exists() and not is_static else "",
            "rank" if is_static else "slot",
        )
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
