"""What follows from a worker's exit: a restart, nothing, or the end of the run.

A worker that was killed or lost its peers is restarted at once; each further restart without
progress is delayed longer. A worker's own error, or a signal that it causes itself (SIGSEGV), may
not repeat: the step is retried. If workers of one slot fail at the same step several times in a
row, the run ends with that error. SIGKILL comes from outside and ends no run, unless it repeats in
the same phase of the same step: the kernel ran out of memory there. Errors that no retry can fix
(config, damaged data, a loss that is not finite) end the run the first time, as does an error in
the text of the program (ImportError) before a worker has joined the run, and one that the first
workers of all slots raise alike before their first step.

The steps of a plain script are unknown (cli/restart_all.py). Its errors count as errors in a row if
the worker lived less than `crash_reset_s` before each. The workers of a fixed group
(`run_fixed_group`) cannot be replaced: the first failure ends the run.
"""

import math
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lockstep.elastic.generation_log import Generation
from lockstep.errors import LockstepError
from lockstep.runtime.exit_report import (
    WorkerExit,
    describe_early_exit,
    describe_failure,
    signal_name,
)

FATAL = (2, 3, 4)  # usage and config, data and checkpoints, diverged (errors.py)
# Before a restart at the start of the run: the other workers may report the same error
START_ERROR_WAIT_S = 1.0
# A process causes them itself.
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True)
class RestartPolicy:
    """When an agent restarts a worker, and when it ends the run."""

    max_crashes: int = 3  # own errors of one slot without progress that end the run
    max_kills: int = 6  # SIGKILLs in a row, all in one phase of one step, that end the run
    # Before the second restart in a row, then doubled; the first is immediate
    initial_delay_s: float = 0.5
    max_delay_s: float = 30.0  # upper limit of the delay
    reset_after_s: float = 60.0  # a worker that lived this long resets the count of restarts
    crash_reset_s: float = math.inf  # a worker that lived this long resets the count of own errors
    restart: bool = True  # restart workers at all
    script: str = ""  # name of a plain script, whose steps are unknown; "": the steps are known


START_HINT = "fix the error above and give the same command"
RESUME_HINT = "the same command resumes from the newest checkpoint"
PLAIN_SCRIPT_POLICY = RestartPolicy(crash_reset_s=600.0)


@dataclass(frozen=True)
class SlotHistory:
    """Earlier exits of the workers of one slot."""

    restarts: int = 0  # in a row, of workers that made no progress and did not live long
    crashes: int = 0  # own errors since the last progress
    step: int = -1  # the highest step that was reached
    kills: int = 0  # by SIGKILL in a row, in `phase`
    phase: str = ""


@dataclass(frozen=True)
class RestartDecision:
    action: Literal["restart", "done", "end"]
    reason: str
    delay_s: float = 0.0  # before the restart
    code: int = 0  # exit code of a run that ends
    text: str = ""  # to print when the run ends
    at_start: bool = False  # the worker failed before it joined the run


def decide_restart(
    worker_exit: WorkerExit,
    history: SlotHistory,
    *,
    lived_s: float,
    step: int,
    stopping: bool,
    policy: RestartPolicy,
    phase: str = "",
) -> tuple[RestartDecision, SlotHistory]:
    """Return (what follows from `worker_exit`, the slot's new history).

    lived_s   from the worker's start to its exit
    step      of the newest generation, or on the worker's board; if it reported none
    phase     the worker's phase and step; "": outside of a step, or unknown
    stopping  the run is stopping, or this host is draining
    """
    report, summary = worker_exit.report, summarize(worker_exit)
    finished = bool(report and report.finished)
    if finished or stopping or worker_exit.kind == "completed":
        drained = ": its host is drained" if report and finished and report.drained else ""
        return RestartDecision("done", summary + drained), history
    code = worker_exit.exit_code
    if code in FATAL or not policy.restart:
        text = failure_text(worker_exit)
        return RestartDecision("end", summary, code=code or 1, text=text), history
    if report and report.program_error and not report.joined:
        what = f"{worker_exit} failed before it joined the run, and would fail again: {summary}"
        return end_the_run(worker_exit, what, START_HINT, at_start=True), history
    step = report.step if report else step
    now = add_exit(history, worker_exit, lived_s, step, phase, policy)
    delay_s = restart_delay(now.restarts - 1, policy)
    end = end_repeated_failures(worker_exit, now, step, policy)
    return end or restart_after(worker_exit, delay_s), now


def add_exit(
    history: SlotHistory,
    worker_exit: WorkerExit,
    lived_s: float,
    step: int,
    phase: str,
    policy: RestartPolicy,
) -> SlotHistory:
    progress = step > history.step
    crashes = 0 if progress or lived_s >= policy.crash_reset_s else history.crashes
    restarts = 0 if progress or lived_s >= policy.reset_after_s else history.restarts
    phase = phase if is_crash(worker_exit, [signal.SIGKILL]) else ""
    kills = history.kills if phase == history.phase else 0
    return SlotHistory(
        restarts + 1,
        crashes + is_own_fault(worker_exit),
        max(step, history.step),
        kills + 1 if phase else 0,
        phase,
    )


def end_repeated_failures(
    worker_exit: WorkerExit, now: SlotHistory, step: int, policy: RestartPolicy
) -> RestartDecision | None:
    """Return the end of a run whose workers failed too often in a row; None: they did not."""
    if is_own_fault(worker_exit) and now.crashes >= policy.max_crashes:
        by_signal = signal_name(worker_exit.signal) if worker_exit.signal else ""
        if policy.script:
            end = f"signal {by_signal}" if by_signal else f"exit code {worker_exit.exit_code}"
            return end_the_run(
                worker_exit,
                f"{policy.script} failed on {now.crashes} starts "
                f"in a row ({worker_exit.title} {worker_exit.rank}, {end})",
                "fix the error above; the same command starts the script again",
            )
        where = f"in step {step + 1}" if step >= 0 else "before its first step"
        cause = f"by {by_signal}" if is_crash(worker_exit) else "with an error"
        what = f"{worker_exit} is worker number {now.crashes} in a row to fail {where} {cause}"
        return end_the_run(worker_exit, what, f"fix the error above; {RESUME_HINT}")
    if now.kills >= policy.max_kills:
        return end_the_run(
            worker_exit,
            f"{worker_exit} is worker number {now.kills} "
            f"in a row killed by SIGKILL in the {now.phase}",
            "give the workers more memory, "
            f"or use less (batch.tokens, memory.activation_checkpoint); {RESUME_HINT}",
        )
    return None


def start_error(worker_exit: WorkerExit, lived_s: float, policy: RestartPolicy) -> str:
    """Return the error text of a slot's first worker if it failed before its first step, else
    ""."""
    report = worker_exit.report
    if not report or report.step > 0 or lived_s >= policy.reset_after_s or policy.script:
        return ""
    return report.text if is_own_fault(worker_exit) else ""


def decide_first_exit(
    decision: RestartDecision, worker_exit: WorkerExit, errors: Mapping[int, str], workers: int
) -> RestartDecision:
    """Return the decision on a slot's first worker: end the run if all workers raised one error.

    errors   `start_error` of the first worker of each slot that exited so far
    workers  of the run
    """
    text = errors[worker_exit.rank]
    if decision.action != "restart" or not text or set(errors.values()) != {text}:
        return decision
    if len(errors) < workers:
        return restart_after(worker_exit, START_ERROR_WAIT_S)
    what = (
        f"all {workers} workers failed with this error" if workers > 1 else f"{worker_exit} failed"
    )
    return end_the_run(worker_exit, f"{what} before the first step", START_HINT)


@dataclass
class RestartDecisions:
    """The decisions of one agent on the exits of its workers, one after the other.

    workers  of the run, if this agent has all of them; else 0
    """

    policy: RestartPolicy
    workers: int
    histories: dict[int, SlotHistory] = field(default_factory=dict)  # by slot
    # By slot: `start_error` of its first worker, once that has exited.
    start_errors: dict[int, str] = field(default_factory=dict)
    shown_errors: set[str] = field(default_factory=set)

    def decide(
        self, worker_exit: WorkerExit, *, lived_s: float, step: int, phase: str, stopping: bool
    ) -> RestartDecision:
        slot = worker_exit.rank
        decision, self.histories[slot] = decide_restart(
            worker_exit,
            self.histories.get(slot, SlotHistory()),
            lived_s=lived_s,
            step=step,
            stopping=stopping,
            policy=self.policy,
            phase=phase,
        )
        if slot in self.start_errors or not self.workers:
            return decision
        self.start_errors[slot] = start_error(worker_exit, lived_s, self.policy)
        return decide_first_exit(decision, worker_exit, self.start_errors, self.workers)

    def describe(self, worker_exit: WorkerExit, decision: RestartDecision) -> str:
        """Return a line for the log. An error of a user's function occurs in every worker, and
        again after each restart: it is shown once."""
        summary, reason = summarize(worker_exit), decision.reason
        if is_own_fault(worker_exit) and summary in self.shown_errors:
            reason = reason.replace(summary, "the same error")
        self.shown_errors.add(summary)
        return f"{worker_exit}: {reason}"


def restart_after(worker_exit: WorkerExit, delay_s: float) -> RestartDecision:
    when = f"in {delay_s:g} s" if delay_s else "now"
    return RestartDecision("restart", f"{summarize(worker_exit)}; restarting {when}", delay_s)


def end_the_run(
    worker_exit: WorkerExit, what: str, hint: str, *, at_start: bool = False
) -> RestartDecision:
    """Return the decision to end the run, with the worker's failure and why it is not restarted."""
    where = f"log: {worker_exit.log}" if worker_exit.log else ""
    error = LockstepError(what, where, hint)
    code, text = worker_exit.exit_code or 1, f"{failure_text(worker_exit)}\n{error}"
    return RestartDecision("end", summarize(worker_exit), code=code, text=text, at_start=at_start)


def fails_only_here(
    code: int, active_hosts: Collection[str], host: str, *, at_start: bool = False
) -> bool:
    """Return whether an error concerns only this host, while others are training: of the config or
    data, or at_start, before a worker joined the run."""
    return (code in (2, 3) or at_start) and bool(active_hosts) and host not in active_hosts


def fails_at_end(worker_exit: WorkerExit, finishers: Collection[int]) -> bool:
    """Return whether a worker failed by an error that no restart fixes, or in its code after it
    recorded the end of the run. finishers: pids of the workers that recorded it."""
    finished = worker_exit.report and worker_exit.report.finished
    failed = worker_exit.kind == "failed" and not finished and not worker_exit.signal
    return failed and (worker_exit.pid in finishers or worker_exit.exit_code in FATAL)


def describe_missed_run(record: Generation, host: str) -> str:
    """Describe the end of a run in `record` to a host whose workers were in no generation."""
    assert record.end is not None
    what = f"the run ended with exit code {record.end.code}"
    when = f"while the workers of {host} were starting or waiting: they trained no step"
    hints = [RESUME_HINT] if record.end.code else []
    return "\n  ".join([f"{what} {when}", f"generation {record.number}: {record.reason}", *hints])


def restart_delay(restarts: int, policy: RestartPolicy) -> float:
    return (
        min(policy.max_delay_s, policy.initial_delay_s * 2.0 ** min(restarts - 1, 60))
        if restarts
        else 0.0
    )


def is_own_fault(worker_exit: WorkerExit) -> bool:
    """Return whether a worker failed by itself: an exception, an early exit, a crash."""
    if worker_exit.kind != "failed":
        return worker_exit.kind == "exited early"
    return bool(worker_exit.report or (worker_exit.code or 0) > 0 or is_crash(worker_exit))


def is_crash(worker_exit: WorkerExit, signals: Collection[int] = CRASH_SIGNALS) -> bool:
    """Return whether one of `signals` killed it that its agent did not send."""
    return (
        not worker_exit.report
        and worker_exit.signal in signals
        and worker_exit.signal not in worker_exit.sent
    )


def failure_text(worker_exit: WorkerExit) -> str:
    """Return the worker's report of its failure, or a description if it wrote none."""
    if worker_exit.kind == "exited early":
        return describe_early_exit(worker_exit)
    return describe_failure(worker_exit, [worker_exit], ())


def summarize(worker_exit: WorkerExit) -> str:
    """Describe an exit in one line."""
    report = worker_exit.report
    if report and not report.finished and report.text:
        lines = report.text.strip().splitlines()
        return lines[-1] if lines[0].startswith("Traceback") else lines[0]
    if report and (report.finished or report.code):
        return f"exited with code {report.code}"
    if worker_exit.signal:
        return f"killed by {signal_name(worker_exit.signal)}"
    if worker_exit.code is None:
        return "exited without an error report, exit code unknown"
    if worker_exit.code:
        return f"exited with code {worker_exit.code} and left no error report"
    return "exited early with code 0"
