"""Exit reports of workers, and the root cause of a failed run.

One failure makes all other workers fail, often earlier on the screen than the worker that caused
it. So each worker writes one line of JSON: how and when it exited, and whether it only lost a peer
(`worker_main`). `summarize_exits` finds the earliest root cause.
"""

import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from lockstep.errors import LockstepError, PeersLostError
from lockstep.files import write_atomic
from lockstep.log import printable
from lockstep.runtime.processes import now_s
from lockstep.runtime.signals import EXIT_INTERRUPTED
from lockstep.runtime.worker_env import exit_report_path, read_worker_env
from lockstep.units import join_words

PACKAGE_FOLDER = f"{Path(__file__).parents[1]}{os.sep}"
CLEAN_EXIT_CODES = (0, 75, 130)  # done, saved and to be restarted, saved on SIGINT

# Messages of torch 2.13 for a lost peer: gloo, TCPStore, NCCL. All observed except NCCL's.
PEER_LOSS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe"
    r"|Read error|Write error|Read timeout"
    r"|Timed out waiting \d+ms for (send|recv)|Application timeout caused pair closure"
    r"|Socket closed|Failed to recv, got 0 bytes"
    r"|wait timeout after \d+ms|client socket has timed out|timed out connecting"
    r"|ncclRemoteError|remote process exited|NCCL communicator was aborted"
    r"|Watchdog caught collective operation timeout"
)
# The text of the program is wrong. Other errors may pass: those of a disk, a download, a device.
PROGRAM_ERRORS = (ImportError, SyntaxError, NameError, AttributeError, TypeError)
# Out-of-memory messages of torch, oneDNN and Python. A new thread needs address space.
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "bad_alloc",
    "could not create a primitive",
    "can't start new thread",
)


@dataclass(frozen=True)
class ExitReport:
    """A worker's report of its exit."""

    code: int
    at_s: float  # by CLOCK_MONOTONIC
    text: str = ""  # for the user: an error's three parts, or a traceback
    trace: str = ""  # the whole traceback, for the log
    finished: bool = False  # its function returned; exit code 0 without this flag is an early exit
    lost_peers: bool = False  # the exit is the consequence of another worker's
    step: int = -1  # number of committed steps; -1: unknown
    # It left between two steps because its host is drained; the others continue.
    drained: bool = False
    joined: bool = True  # it has joined the workers of the run; False: it failed before
    program_error: bool = False  # it failed with one of PROGRAM_ERRORS


@dataclass(frozen=True)
class WorkerExit:
    """The exit of one worker, as seen by its agent."""

    rank: int
    pid: int
    # As in subprocess: -n when signal n killed it; None: unknown, it was not a child.
    code: int | None
    at_s: float
    sent: tuple[int, ...] = ()  # signals that the agent sent to make it exit
    report: ExitReport | None = None
    log: str = ""  # path of its output; "": none
    tail: str = ""  # the last lines of its output
    title: str = "rank"  # what `rank` counts: "rank", or "slot" of a host

    @property
    def signal(self) -> int:
        """The signal that killed it; 0: none, or unknown."""
        return -self.code if self.code is not None and self.code < 0 else 0

    @property
    def exit_code(self) -> int:
        """The reported exit code if it failed, or was killed while it exited; else the real one."""
        report = self.report
        if report and (self.code is None or not report.finished or self.signal in self.sent):
            return report.code
        if self.code is None:
            return 1
        return 128 + self.signal if self.signal else self.code

    @property
    def kind(self) -> Literal["failed", "lost", "exited early", "terminated", "completed"]:
        """ "lost": its peers; "exited early": with code 0."""
        report = self.report
        if report and not report.finished:
            if report.lost_peers:
                return "lost"
            return "failed" if report.code else "exited early"
        if self.signal in self.sent and not report:
            return "terminated"
        is_unasked = bool(self.signal) and self.signal not in self.sent
        if self.exit_code not in CLEAN_EXIT_CODES or is_unasked:
            return "failed"
        return "completed" if report or self.exit_code else "exited early"

    def __str__(self) -> str:
        return f"{self.title} {self.rank} (pid {self.pid})"


def worker_main(
    function: Callable[[], int | None], about: Callable[[], Mapping[str, Any]] = dict
) -> int:
    """Run `function()` and return the exit code; report failures to the agent, else on stderr.
    about: called at the end, returns further fields of the ExitReport."""
    report = replace(run_and_report(function), **about())
    if not send_exit_report(report) and report.text:
        print(printable(report.text), file=sys.stderr, flush=True)
    return report.code


def run_and_report(function: Callable[[], int | None]) -> ExitReport:
    try:
        return ExitReport(function() or 0, now_s(), finished=True)
    except KeyboardInterrupt:
        return ExitReport(EXIT_INTERRUPTED, now_s(), finished=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return ExitReport(code, now_s(), text=error.code if isinstance(error.code, str) else "")
    except LockstepError as error:
        lost = isinstance(error, PeersLostError)
        return ExitReport(
            error.exit_code, now_s(), str(error), traceback.format_exc(), lost_peers=lost
        )
    except BaseException as error:
        trace = traceback.format_exc()
        keep_user_frames(error)
        text = "".join(traceback.format_exception(error))
        lost = is_peer_loss(error)
        code, in_program = (
            PeersLostError.exit_code if lost else 1,
            isinstance(error, PROGRAM_ERRORS),
        )
        return ExitReport(code, now_s(), text, trace, lost_peers=lost, program_error=in_program)


def keep_user_frames(error: BaseException) -> None:
    """Drop the frames of Lockstep from a traceback, except behind the last frame of the user."""
    steps = []
    step = error.__traceback__
    while step:
        steps.append(step)
        step = step.tb_next
    has_user = False
    for last in reversed(steps):
        file = last.tb_frame.f_code.co_filename
        is_ours = file.startswith((PACKAGE_FOLDER, "<frozen"))
        if not (is_ours and has_user):
            step = TracebackType(step, last.tb_frame, last.tb_lasti, last.tb_lineno)
        has_user = has_user or not (is_ours or "/lib/python" in file)
    error.__traceback__ = step


def send_exit_report(report: ExitReport) -> bool:
    """Write the report to the agent's state folder. False without an agent, or if the disk is
    full."""
    worker_env = read_worker_env(os.environ)
    if worker_env is None:
        return False
    path = exit_report_path(Path(worker_env.state), worker_env.slot)
    try:
        write_atomic(path, json.dumps(asdict(report)) + "\n")
    except OSError:
        return False
    return True


def is_peer_loss(error: BaseException | None) -> bool:
    """Return whether a torch.distributed error (or its cause) means that a peer exited or hangs."""
    while error is not None:
        if isinstance(error, RuntimeError) and PEER_LOSS.search(str(error)):
            return True
        error = error.__cause__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(message in str(error) for message in OUT_OF_MEMORY)


def error_summary(error: BaseException) -> str:
    """Describe an error in one line; a torch error without source file, stack and advice."""
    if isinstance(error, LockstepError):
        return error.what
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\.cc:\d+\] |\. This is typically caused by.*$", "", line)


def summarize_exits(
    exits: Sequence[WorkerExit], *, asked: Sequence[int] = (), grace_s: float = 0.0
) -> tuple[int, str]:
    """Return (exit code of the command, message for stderr or "").
    asked: signals that the agent received and forwarded
    grace_s: seconds that it then waited before it killed the workers that had not stopped."""
    exits = sorted(exits, key=lambda exited: exited.report.at_s if exited.report else exited.at_s)
    failed, lost = of_kind(exits, "failed"), of_kind(exits, "lost")
    terminated = of_kind(exits, "terminated")
    codes = {exited.exit_code for exited in exits}
    if len(codes) == 1 and not [*failed, *lost, *terminated]:
        return codes.pop(), ""
    early = of_kind(exits, "exited early")
    if lost and not early:
        early = [exited for exited in of_kind(exits, "completed") if exited.exit_code == 0]
    if failed or (lost and not early):
        first = (failed or lost)[0]
        text = describe_failure(first, exits, asked)
        return first.exit_code, "\n".join([text, *describe_other_exits(first, exits)])
    if early:
        text = describe_early_exit(early[0])
        return 1, "\n".join([text, *describe_other_exits(early[0], exits)])
    if terminated and asked:
        name = signal.Signals(asked[0]).name
        what = f"{join_ranks(terminated)} did not stop within {grace_s:g} s of {name}"
        hint = "they were killed; run the same command again to resume from the newest checkpoint"
        return 128 + asked[0], str(LockstepError(what, log_paths(terminated), hint))
    listed = ", ".join(f"{exited.title} {exited.rank} with {exited.exit_code}" for exited in exits)
    what = f"the workers exited with different codes: {listed}"
    return 1, str(LockstepError(what, log_paths(exits)))


def of_kind(exits: Sequence[WorkerExit], kind: str) -> list[WorkerExit]:
    return [exited for exited in exits if exited.kind == kind]


def describe_failure(first: WorkerExit, exits: Sequence[WorkerExit], asked: Sequence[int]) -> str:
    if text := text_of(first):
        same = [exited for exited in exits if text_of(exited) == text]
        if len(same) == len(exits):
            return text.rstrip()
        where = f"\n  log: {first.log}" if first.log else ""
        return f"{join_ranks(same)} (pid {first.pid}) failed first:\n{text.rstrip()}{where}"
    log = log_paths([first])
    if not first.signal:
        code = "an unknown code" if first.code is None else f"code {first.code}"
        no_report = "" if first.report else " and left no error report"
        return with_log_tail(first, LockstepError(f"{first} exited with {code}{no_report}", log))
    number = first.signal
    if number in asked:
        name = signal.Signals(number).name
        return str(
            LockstepError(f"{first} was killed by {name} before it could save and stop", log)
        )
    hints: dict[int, str] = {
        signal.SIGKILL: (
            "not sent by lockstep: the kernel sends it "
            "when memory runs out (journalctl -k, or dmesg), or a user did"
        ),
        signal.SIGBUS: (
            "the kernel sends it when /dev/shm or the disk under a mapped file is full (df)"
        ),
        signal.SIGSEGV: "a crash in compiled code; PYTHONFAULTHANDLER=1 shows where",
    }
    return with_log_tail(
        first,
        LockstepError(f"{first} was killed by {signal_name(number)}", log, hints.get(number, "")),
    )


def signal_name(number: int) -> str:
    """Return "SIGKILL", or "signal 70" for a signal without a name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def describe_early_exit(first: WorkerExit) -> str:
    what = "exited early (code 0)" if first.kind == "exited early" else "finished"
    error = LockstepError(
        f"{first} {what} while other workers were still training",
        log_paths([first]),
        "all workers must take the same number of steps; "
        "a worker exits by returning from its function, not by sys.exit",
    )
    return with_log_tail(first, error)


def with_log_tail(exited: WorkerExit, error: LockstepError) -> str:
    return "\n".join([str(error), *[f"  | {line}" for line in exited.tail.splitlines()]])


def describe_other_exits(first: WorkerExit, exits: Sequence[WorkerExit]) -> list[str]:
    """Return one line for all workers that lost their peers, one for each further failure."""
    text = text_of(first)
    rest = [one for one in exits if one is not first and not (text and text_of(one) == text)]
    lost = of_kind(rest, "lost")
    lines = [f"{join_ranks(lost)} lost {'their' if len(lost) > 1 else 'its'} peers"] if lost else []
    for exited in of_kind(rest, "failed"):
        message = text_of(exited).strip().splitlines() or [f"exit code {exited.code}"]
        summary = message[-1] if message[0].startswith("Traceback") else message[0]
        log = f" (log: {exited.log})" if exited.log else ""
        lines.append(f"{exited.title} {exited.rank} failed too: {summary}{log}")
    return lines


def text_of(exited: WorkerExit) -> str:
    return exited.report.text if exited.report else ""


def join_ranks(exits: Sequence[WorkerExit]) -> str:
    """Return "rank 1", or "ranks 0, 2 and 3"."""
    ranks = sorted(exited.rank for exited in exits)
    return f"{exits[0].title}{'s'[: len(exits) - 1]} {join_words([str(rank) for rank in ranks])}"


def log_paths(exits: Sequence[WorkerExit]) -> str:
    return "\n".join(f"log: {exited.log}" for exited in exits if exited.log)
