"""The agent: one process per host that starts the workers, detects their exits and restarts them.

The agent imports no torch, starts no thread and can recover all its state: the processes of the
slots are recorded in the state folder (runtime/worker_env.py), and the run's state in the
generation log. So it may die at any time. Under `lockstep launch` its workers keep training and the
next agent adopts them; under `lockstep train` the kernel ends them with it.

It sleeps until a worker exits (its pidfd becomes readable), the forkserver answers or a signal
arrives, and polls the generation log ten times a second. It kills local workers that the newest
generation removed, whether they are alive, stopped or hanging. A record with a result ends the
run. restart_policy.py decides what follows from a worker's exit.

A stop signal is forwarded to the workers, which include it in their vote. Workers that wait to join
have no vote. If no local worker has one, the agent asks a worker of another host to stop the run
(elastic/control.py), and exits with the run.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.agent.evaluator_process import EvaluatorProcess
from lockstep.agent.event_log import EventLog
from lockstep.agent.forkserver import WorkerProgram, become_subreaper
from lockstep.agent.lock import PriorState, agent_lock, kill_all
from lockstep.agent.restart_policy import (
    DEFAULT_POLICY,
    RestartPolicy,
    SlotHistory,
    decide_restart,
    fails_only_here,
    is_crash,
    is_own_fault,
    summarize,
)
from lockstep.agent.worker_pool import RETRY_S, StartedWorker, WorkerPool
from lockstep.elastic import control, generation_log, waiting_room
from lockstep.elastic.generation_log import Generation, GenerationLog, Member, new_token
from lockstep.errors import DamagedFileError, LockstepError, UsageError
from lockstep.files import open_regular, read_bytes
from lockstep.runtime import status_board
from lockstep.runtime.exit_report import ExitReport, WorkerExit, exit_kind, summarize_exits
from lockstep.runtime.signals import EXIT_INTERRUPTED, STOP_SIGNALS
from lockstep.runtime.status_board import Status
from lockstep.runtime.subprocesses import SignalInbox, kill_group, last_lines, now_s, open_worker_log
from lockstep.runtime.worker_env import (
    ProcessIdentity,
    WorkerEnv,
    exit_report_path,
    identify_process,
    is_loopback_reachable,
    state_folder,
    write_worker_process,
)

log = logging.getLogger("lockstep")
TOUCH_INTERVAL_S = 3600.0
STOP_REQUEST_S = 1.0  # between two attempts to make another worker stop the run; also the time limit of each attempt
STEP_PHASES = ("data", "forward", "backward", "reducing", "voting", "updating", "saving")


@dataclass(frozen=True)
class AgentTimeouts:
    """How long an agent waits, in seconds.

    poll_s         between two reads of the generation log
    grace_s        from a stop signal until SIGKILL (a step and a checkpoint), and from the end of a
                   completed run until SIGTERM
    exit_s         from the end of a failed run until SIGTERM to workers that have not exited, and
                   from SIGTERM until SIGKILL
    failed_exit_s  from a worker's failure report until SIGKILL, if the process does not exit
    import_s       for the forkserver to import everything
    fork_s         for the forkserver to fork one worker
    stop_reply_s   for workers of other hosts to accept a stop request, when no local worker is left
    final_eval_s   for the evaluator to score the last checkpoint of a completed run
    """

    poll_s: float = 0.1
    grace_s: float = 300.0
    exit_s: float = 2.0
    failed_exit_s: float = 10.0
    import_s: float = 120.0
    fork_s: float = 5.0
    stop_reply_s: float = 5.0
    final_eval_s: float = 600.0


@dataclass
class Worker:
    """A running worker.

    pidfd         readable once it has exited; never refers to another process (pidfd_open(2))
    is_child      this agent must wait for it; otherwise an earlier agent started it
    signals_sent  signals sent in order to end it
    stop_sent     it received the stop signal
    kill_at       (monotonic time of the SIGKILL, reason); None: not to be killed
    """

    slot: int
    process: ProcessIdentity
    pidfd: int
    is_child: bool
    started_s: float
    signals_sent: list[int] = field(default_factory=list)
    stop_sent: bool = False
    kill_at: tuple[float, str] | None = None

    @property
    def pid(self) -> int:
        """The process id, which is also its process group id and session id."""
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send a signal."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


@dataclass
class Slot:
    """A place for one worker on this host.

    start_at_s  when to request a worker; None: one runs, one is starting, or no further one starts
    had_worker  a worker ran here before
    log_offset  size of the slot's log when its newest worker was requested
    last_exit   of its previous worker
    """

    number: int
    start_at_s: float | None = 0.0
    had_worker: bool = False
    log_offset: int = 0
    worker: Worker | None = None
    last_exit: WorkerExit | None = None
    history: SlotHistory = SlotHistory()


@dataclass(frozen=True)
class RunEnd:
    """The end of the run: exit code, text to print, monotonic time when this agent learned of it."""

    code: int
    text: str
    at_s: float


@dataclass(frozen=True)
class AgentConfig:
    """What an agent is started with.

    host, address     name of this host, unique in the run; where its servers listen
    slots             workers of this host
    expected_workers  on all hosts, that the first generation waits for
    min_workers       below which training waits
    max_workers       that train at once; others wait to join
    lives_on          workers outlive the agent and SIGUSR1 drains this host; else they end with it
    environ           for the workers, extended by the agent's own variables
    flags             of a user's own loop, equal on all workers
    command           the workers' settings, by name; running workers are adopted if they are equal
    evaluator         run an evaluator process beside the workers
    """

    host: str
    address: str
    slots: int
    expected_workers: int
    min_workers: int
    max_workers: int
    lives_on: bool
    environ: Mapping[str, str]
    flags: Mapping[str, str] = field(default_factory=dict)
    command: Mapping[str, str] = field(default_factory=dict)
    evaluator: bool = False
    timeouts: AgentTimeouts = AgentTimeouts()
    policy: RestartPolicy = DEFAULT_POLICY


def run_agent(program: WorkerProgram, folder: Path, config: AgentConfig) -> int:
    """Run this host's workers until the run ends; print the first failure, return the exit code.

    Call it from the main thread. Errors: UsageError, before anything was started.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"the agent does not support {sys.platform}",
            "it needs pidfd_open(2) and prctl(2)",
            "start the workers with torchrun -m lockstep train",
        )
    host, slots, lives_on, timeouts = config.host, config.slots, config.lives_on, config.timeouts
    state = state_folder(folder, host)
    sizes = {"--workers": slots, "--min": config.min_workers, "--max": config.max_workers}
    command = {**config.command, **{name: str(size) for name, size in sizes.items()}}
    with SignalInbox() as inbox, agent_lock(folder, state, host, command, slots=slots, lives_on=lives_on) as prior:
        become_subreaper()
        worker_env = WorkerEnv(
            folder=str(folder.resolve()),
            state=str(state),
            host=host,
            slot=0,
            slots=slots,
            expected_workers=config.expected_workers,
            min_workers=config.min_workers,
            max_workers=config.max_workers,
            address=config.address,
            after_generation=prior.base_generation,
            agent_pid=0 if lives_on else os.getpid(),
            drain=lives_on,
            folder_mark=prior.folder_id,
            flags=dict(config.flags),
        )
        events = EventLog(folder, host)
        pool = WorkerPool(program, config.environ, events, import_s=timeouts.import_s, fork_s=timeouts.fork_s)
        evaluator = EvaluatorProcess(folder, host, config.environ, events) if config.evaluator else None
        agent = Agent(worker_env, prior, pool, events, config, evaluator)
        try:
            code, text = agent.run(inbox)
        finally:
            agent.close()
    if text:
        print(text, file=sys.stderr, flush=True)
    return code


class Agent:
    """The agent of one host and run.

    asked        stop and drain signals received, in order; asked_s: monotonic time of the first one
    next_ask_s   when to ask another worker to stop the run; stop_heard_s: when one last accepted
    shown_errors one-line summaries of worker errors that were already logged
    """

    def __init__(
        self,
        worker_env: WorkerEnv,
        prior: PriorState,
        pool: WorkerPool,
        events: EventLog,
        config: AgentConfig,
        evaluator: EvaluatorProcess | None,
    ) -> None:
        self.worker_env, self.pool, self.events, self.evaluator = worker_env, pool, events, evaluator
        self.timeouts, self.policy = config.timeouts, config.policy
        self.folder, self.state = Path(worker_env.folder), Path(worker_env.state)
        self.generation_log = GenerationLog(self.folder / "generations", since=prior.newest.number if prior.newest else 0)
        self.newest, self.known = prior.newest, prior.base_generation  # generations after `known` are not applied yet
        self.asked: list[int] = []
        self.asked_s: float | None = None
        self.next_ask_s = self.stop_heard_s = 0.0
        self.run_end: RunEnd | None = None
        self.shown_errors: set[str] = set()
        self.touched_s = now_s()
        self.slots = {number: Slot(number) for number in range(worker_env.slots)}
        for number, process in prior.running.items():
            self.adopt(self.slots[number], process)

    @property
    def workers(self) -> list[Worker]:
        """Workers that have not been seen to exit."""
        return [slot.worker for slot in self.slots.values() if slot.worker]

    def run(self, inbox: SignalInbox) -> tuple[int, str]:
        """Return (exit code, text to print) once no worker is left."""
        while (
            self.workers
            or self.pool.pending
            or any(slot.start_at_s is not None for slot in self.slots.values())
            or self.waits_for_run_end()
        ):
            self.request_due_workers()
            for started in self.pool.poll():
                self.on_worker_started(self.slots[started.slot], started)
            for number in inbox.wait(self.sleep_s(), [*self.pool.descriptors(), *[worker.pidfd for worker in self.workers]]):
                if number == signal.SIGINT and (number in self.asked or self.run_end):
                    kill_all({worker.slot: worker.process for worker in self.workers})
                    return EXIT_INTERRUPTED, "killed all workers; the same command resumes from the newest checkpoint"
                if number in STOP_SIGNALS:
                    self.forward_signal(number)
            self.touch_state_folder()
            self.poll_generation_log()  # before exits are handled: a worker that exited because the run ended is not restarted
            for worker in exited(self.workers):
                self.on_worker_exit(worker)
            self.request_stop_elsewhere()
            self.escalate_signals()
            if self.evaluator:
                self.evaluator.poll()
            if not self.pool.pending:  # a pending worker may have exited already, and its pid is not known yet
                known = {worker.pid for worker in self.workers} | self.pool.pids()
                reap_orphans(known | (self.evaluator.pids() if self.evaluator else set()))
        code, text = self.result()
        if self.evaluator and not code and not self.is_draining:
            self.wait_for_evaluator(self.evaluator, inbox)
        return code, text

    def wait_for_evaluator(self, evaluator: EvaluatorProcess, inbox: SignalInbox) -> None:
        """Let the evaluator score the last checkpoint of a completed run, until a stop signal."""
        until_s = now_s() + self.timeouts.final_eval_s
        while evaluator.is_running and now_s() < until_s and not set(STOP_SIGNALS) & set(inbox.wait(self.timeouts.poll_s, [])):
            pass

    def sleep_s(self) -> float:
        """Return how long to sleep if nothing happens."""
        waits = [slot.start_at_s - now_s() for slot in self.slots.values() if slot.start_at_s is not None]
        return max(0.0, min([self.timeouts.poll_s, *waits]))

    def touch_state_folder(self) -> None:
        """Touch the state folder once an hour: systemd-tmpfiles deletes old files in /tmp."""
        if now_s() > self.touched_s + TOUCH_INTERVAL_S:
            self.touched_s = now_s()
            with suppress(OSError):
                for path in (self.state, *self.state.iterdir()):
                    os.utime(path)

    def result(self) -> tuple[int, str]:
        """Return (exit code, text to print) after all workers have exited."""
        if self.run_end:
            return self.run_end.code, self.run_end.text
        exits = [slot.last_exit for slot in self.slots.values() if slot.last_exit]
        if not exits and self.is_draining:
            return 0, ""
        if not exits:
            what = f"received {signal.Signals(self.asked[0]).name} before any worker had started"
            return 128 + self.asked[0], str(LockstepError(what, f"{self.worker_env.host}, {self.folder}"))
        left = [one for one in exits if exit_kind(one) == "completed"]
        return summarize_exits(left or exits, asked=self.asked, grace_s=self.timeouts.grace_s)

    def close(self) -> None:
        """Release everything. Workers keep running under `launch`, and are killed under `train`."""
        self.pool.close()
        if self.evaluator:
            self.evaluator.close()
        if self.worker_env.agent_pid:
            kill_all({worker.slot: worker.process for worker in self.workers})
        for worker in self.workers:
            os.close(worker.pidfd)
        reap_orphans(set())

    # -- stopping -------------------------------------------------------------------------------------------------------------

    def forward_signal(self, number: int) -> None:
        """Forward a stop or drain signal to the workers, once, and start no more workers."""
        if number in self.asked:
            return
        self.asked.append(number)
        self.asked_s = self.asked_s or now_s()
        self.stop_starting()
        self.events.add("signal passed on", f"the agent received {signal.Signals(number).name}")
        waiting = [] if self.is_drain(number) else self.waiting_members()
        waiting_pids = {member.pid for member in waiting if member.host == self.worker_env.host}
        for worker in self.workers:
            if worker.pid not in waiting_pids:  # a waiting worker has nothing to save and exits with the run
                worker.stop_sent = True
                worker.signal(number)

    def is_drain(self, number: int) -> bool:
        """Return whether a signal drains only this host."""
        return number == signal.SIGUSR1 and self.worker_env.drain

    @property
    def is_draining(self) -> bool:
        """Whether this host leaves and the run continues without it."""
        return any(map(self.is_drain, self.asked)) and not self.stop_signal

    @property
    def stop_signal(self) -> str:
        """Name of the first signal received here that stops the run; "" for none."""
        return next((signal.Signals(number).name for number in self.asked if not self.is_drain(number)), "")

    def waiting_members(self) -> list[Member]:
        """Return the workers registered in the run folder's waiting room; [] if it cannot be read."""
        with suppress(OSError):
            return list(waiting_room.registered_members(self.folder))
        return []

    def stop_recipients(self) -> list[Member]:
        """Return the workers that can be asked to stop the run; local ones only while they run."""
        pids = {worker.pid for worker in self.workers}
        recipients = control.stop_recipients(self.newest, self.waiting_members())
        return [member for member in recipients if member.host != self.worker_env.host or member.pid in pids]

    def request_stop_elsewhere(self) -> None:
        """Ask another worker to stop the run if no local one has a vote. Blocks up to 2 s."""
        if not self.stop_signal or self.run_end or now_s() < self.next_ask_s:
            return
        voters = {member.pid for member in self.newest.members if member.host == self.worker_env.host} if self.newest else set()
        drained_first = any(map(self.is_drain, self.asked))  # a worker only obeys the first signal that it receives
        if not drained_first and any(worker.stop_sent and worker.pid in voters for worker in self.workers):
            return
        recipient = control.request_stop(
            self.folder, self.stop_recipients(), self.stop_signal, within_s=STOP_REQUEST_S, each_s=STOP_REQUEST_S
        )
        if recipient and not self.stop_heard_s:
            self.events.add("stop passed on", f"{recipient.id.rpartition('/')[0]} accepted the stop; no worker of this host has a vote")
        self.stop_heard_s = now_s() if recipient else self.stop_heard_s
        self.next_ask_s = now_s() + STOP_REQUEST_S

    def waits_for_run_end(self) -> bool:
        """Return whether the agent waits without workers, having asked others to stop."""
        if not self.stop_signal or self.run_end or self.asked_s is None:
            return False
        until_s = min(max(self.asked_s, self.stop_heard_s) + self.timeouts.stop_reply_s, self.asked_s + self.timeouts.grace_s)
        return now_s() < until_s and bool(self.stop_recipients())

    def stop_starting(self) -> None:
        """Start no more workers."""
        self.pool.cancel()
        for slot in self.slots.values():
            slot.start_at_s = None

    def end_run(self, code: int, text: str, reason: str) -> None:
        """End the run: on this host now, on the others through the generation log."""
        self.run_end = RunEnd(code, text, now_s())
        self.stop_starting()
        self.events.add("run ended", reason)
        # A host of the same name with another loopback network is another host.
        hosts = {member.host if is_loopback_reachable(member.loopback) else "" for member in self.newest.members} if self.newest else set()
        if fails_only_here(code, hosts, self.worker_env.host):
            return
        number, step = (self.newest.number, self.newest.step) if self.newest else (0, 0)
        try:
            while True:
                proposal = Generation(number + 1, new_token(), (), "", step, reason, end=generation_log.RunResult(code, text))
                accepted = self.generation_log.propose(proposal)
                if accepted.end:
                    break
                number, step = accepted.number, accepted.step
        except OSError as error:
            self.events.warn("cannot write the end of the run into the generation log; other hosts may not learn of it", error)

    def escalate_signals(self) -> None:
        """Send SIGTERM, then SIGKILL, to workers that should have exited."""
        now = now_s()
        for worker in self.workers:
            if not worker.kill_at and (report := read_report(self.state, worker.slot)) and not report.finished:
                delay_s = self.timeouts.failed_exit_s
                worker.kill_at = now + delay_s, f"reported a failure and did not exit within {delay_s:g} s"
            number, reason = signal_due(
                now,
                worker.signals_sent,
                kill_at=worker.kill_at,
                run_end=self.run_end,
                asked_s=self.asked_s,
                timeouts=self.timeouts,
            )
            if number:
                worker.signals_sent.append(number)
                self.events.add(f"{signal.Signals(number).name} sent", reason, slot=worker.slot, pid=worker.pid)
                worker.signal(number)

    # -- generation log -------------------------------------------------------------------------------------------------------

    def poll_generation_log(self) -> None:
        """Apply each generation written since the last call."""
        try:
            newest = self.generation_log.newest(self.known)
            last = newest.number if newest else 0
            for number in range(self.known + 1, last + 1):
                before = self.newest if self.newest and self.newest.number == number - 1 else self.read_generation(number - 1)
                try:
                    self.newest = self.generation_log.read(number)
                except DamagedFileError as error:
                    if number == last:
                        raise
                    self.events.warn(f"skipping generation {number}", error)
                    continue
                self.known = number
                self.apply_generation(self.newest, before)
        except OSError as error:
            self.events.warn("cannot read the generation log", error)

    def read_generation(self, number: int) -> Generation | None:
        """Return a generation; None if it cannot be read."""
        with suppress(OSError):
            return self.generation_log.read(number)
        return None

    def apply_generation(self, record: Generation, before: Generation | None) -> None:
        """Schedule SIGKILL for local workers that were removed; end if the run ended."""
        members = {member.id: member for member in before.members} if before else {}
        for out in record.out:
            member = members.get(out.id)
            slot = self.slots.get(member.slot) if member and member.host == self.worker_env.host else None
            if member and slot and slot.worker and slot.worker.pid == member.pid:
                # A worker that leaves because this host is drained needs a moment to exit.
                delay_s = self.timeouts.exit_s if signal.SIGUSR1 in self.asked else 0.0
                slot.worker.kill_at = now_s() + delay_s, f"removed from generation {record.number}: {out.why}"
        if record.end and not self.run_end:
            self.run_end = RunEnd(record.end.code, record.end.text, now_s())
            self.stop_starting()

    # -- workers --------------------------------------------------------------------------------------------------------------

    def request_due_workers(self) -> None:
        """Request a worker for each slot that is due."""
        for slot in self.slots.values():
            if slot.start_at_s is not None and slot.start_at_s <= now_s():
                try:
                    self.request_worker(slot)
                    slot.start_at_s = None
                except OSError as error:  # out of file descriptors
                    self.events.warn(f"cannot request a worker for slot {slot.number}", error)
                    slot.start_at_s = now_s() + RETRY_S

    def request_worker(self, slot: Slot) -> None:
        """Request a worker. Slot 0 writes to the agent's terminal, the others to their logs."""
        with suppress(OSError):
            exit_report_path(self.state, slot.number).unlink(missing_ok=True)
            waiting_room.remove_stale_files(self.folder, self.worker_env.host, slot.number)
        worker_env = replace(self.worker_env, slot=slot.number, known_generation=self.known)
        if slot.number == 0:
            self.pool.request(worker_env, 1, 2, restarted=slot.had_worker)
            return
        try:
            output, _ = open_worker_log(self.folder, slot.number, self.worker_env.host, make=False)
        except UsageError as error:
            self.events.warn(f"slot {slot.number} writes to the terminal", error)
            self.pool.request(worker_env, 2, 2, restarted=slot.had_worker)
            return
        assert output is not None
        with output:
            slot.log_offset = output.tell()
            self.pool.request(worker_env, output.fileno(), output.fileno(), restarted=slot.had_worker)

    def on_worker_started(self, slot: Slot, started: StartedWorker) -> None:
        """Record the process of `slot` and let the worker run."""
        process = identify_process(started.pid, slot.log_offset)
        slot.worker, slot.had_worker = Worker(slot.number, process, os.pidfd_open(started.pid), True, now_s()), True
        try:
            write_worker_process(self.state, slot.number, process)
        except OSError as error:
            self.events.warn(f"cannot record the process of slot {slot.number}; the next agent would not find it", error)
        self.events.add("worker started", started.method, slot=slot.number, pid=started.pid)  # before it can do anything
        with suppress(BrokenPipeError):
            os.write(started.gate, b".")
        os.close(started.gate)

    def adopt(self, slot: Slot, process: ProcessIdentity) -> None:
        """Manage a worker that an earlier agent started."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        if not process.alive:  # the pid may have been reused, and the pidfd may refer to another process
            os.close(pidfd)
            return
        slot.worker, slot.had_worker, slot.start_at_s = Worker(slot.number, process, pidfd, False, now_s()), True, None
        self.events.add("worker taken over", "its agent had died, and it kept training", slot=slot.number, pid=process.pid)
        log.info("adopted slot %d (pid %d), which kept training without its agent", slot.number, process.pid)

    def on_worker_exit(self, worker: Worker) -> None:
        """Collect the exit of a worker, remove what it left behind, and restart it or end the run."""
        slot = self.slots[worker.slot]
        slot.worker = None
        last_exit = slot.last_exit = self.collect_exit(worker)
        with suppress(OSError):
            waiting_room.remove_stale_files(self.folder, self.worker_env.host, worker.slot)
        status = self.last_status(worker)
        decision, slot.history = decide_restart(
            last_exit,
            slot.history,
            lived_s=last_exit.at_s - worker.started_s,
            # A crash counts at the worker's own step, a kill at the step of the run.
            step=status.step - 1 if status and is_crash(last_exit) else self.newest.step if self.newest else -1,
            phase=phase_of(status),
            stopping=bool(self.asked or self.run_end),
            policy=self.policy,
        )
        self.events.add("worker ended", decision.reason, slot=worker.slot, pid=worker.pid)
        if decision.action == "restart":
            summary = summarize(last_exit)  # an error of a user's function occurs in every worker, and again after each restart
            repeated = is_own_fault(last_exit) and summary in self.shown_errors
            log.warning("%s: %s", last_exit, decision.reason.replace(summary, "the same error") if repeated else decision.reason)
            self.shown_errors.add(summary)
            slot.start_at_s = now_s() + decision.delay_s
        elif decision.action == "end":
            self.end_run(decision.code, decision.text, f"{last_exit} on {self.worker_env.host}: {decision.reason}")

    def last_status(self, worker: Worker) -> Status | None:
        """Return the status on the worker's board; None if it has not written one yet."""
        with suppress(OSError):
            status = status_board.read_status(self.state / f"{worker.slot}.board")
            return status if status.pid == worker.pid else None
        return None

    def collect_exit(self, worker: Worker) -> WorkerExit:
        """Wait for a worker that has exited, kill its process group, and return how it exited."""
        os.close(worker.pidfd)
        if worker.is_child:
            kill_group(worker.pid)  # before the wait: until then its pid, which is also its group id, cannot be reused
            code: int | None = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        else:
            if not Path(f"/proc/{worker.pid}").exists():  # the kernel does not reuse the number of an existing group
                kill_group(worker.pid)
            code = -worker.signals_sent[-1] if worker.signals_sent else None
        report = read_report(self.state, worker.slot)
        if not report and self.is_draining and code in (None, -signal.SIGUSR1):  # it waited or was starting: nothing to hand over
            report = ExitReport(0, now_s(), finished=True, drained=True)
            worker.signals_sent.append(signal.SIGUSR1)
        if not report:
            with suppress(OSError):
                waiting_room.remove_stale_files(self.folder, self.worker_env.host, worker.slot)
        path = self.folder / "logs" / f"{self.worker_env.host}-{worker.slot}.log"
        log_path = tail = ""
        with suppress(OSError):
            before = self.slots[worker.slot].last_exit
            if report and report.trace:
                repeated = bool(before and before.report and before.report.trace == report.trace)
                with open(path, "ab", opener=open_regular) as output:
                    output.write(b"the same error again\n" if repeated else report.trace.encode("utf-8", "backslashreplace"))
            elif worker.slot and not report:
                with open(path, "rb", opener=open_regular) as output:
                    tail = last_lines(output, worker.process.begun_at_byte)
            log_path = str(path) if path.exists() else ""
        return WorkerExit(worker.slot, worker.pid, code, now_s(), tuple(worker.signals_sent), report, log_path, tail, title="slot")


def signal_due(
    now_s: float,
    sent: Sequence[int],
    *,
    kill_at: tuple[float, str] | None,
    run_end: RunEnd | None,
    asked_s: float | None,
    timeouts: AgentTimeouts,
) -> tuple[int, str]:
    """Return (signal to send to a worker now, reason); 0: none.

    sent     signals sent to it so far in order to end it
    kill_at  (time of its SIGKILL, reason)
    asked_s  when the workers were asked to stop
    """
    due: tuple[int, str] = (0, "")
    if run_end:
        delay_s = timeouts.exit_s if run_end.code else timeouts.grace_s
        if now_s >= run_end.at_s + delay_s:
            kill = now_s >= run_end.at_s + delay_s + timeouts.exit_s
            due = signal.SIGKILL if kill else signal.SIGTERM, f"did not exit within {delay_s:g} s after the run ended"
    elif asked_s is not None and now_s >= asked_s + timeouts.grace_s:
        due = signal.SIGKILL, f"did not stop within {timeouts.grace_s:g} s"
    if kill_at and now_s >= kill_at[0]:
        due = signal.SIGKILL, kill_at[1]
    return (0, "") if due[0] in sent else due


def phase_of(status: Status | None) -> str:
    """Describe the phase and step of a worker; "" outside of a step."""
    return f"{status.phase} phase of step {status.step}" if status and status.step > 0 and status.phase in STEP_PHASES else ""


def read_report(state: Path, slot: int) -> ExitReport | None:
    """Return the exit report of the worker in `slot`; None if it wrote none."""
    with suppress(OSError, ValueError, TypeError):
        return ExitReport.from_line(read_bytes(exit_report_path(state, slot)))
    return None


def exited(workers: Sequence[Worker]) -> list[Worker]:
    """Return the workers that have exited."""
    ready, _, _ = select.select([worker.pidfd for worker in workers], [], [], 0)
    return [worker for worker in workers if worker.pidfd in ready]


def reap_orphans(known: set[int]) -> None:
    """Wait for exited processes that workers left behind, except those in `known`."""
    with suppress(ChildProcessError):
        while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and child.si_pid not in known:
            os.waitpid(child.si_pid, 0)
