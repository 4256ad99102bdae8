"""Watchdogs of the membership thread, for hanging members and for a stuck main thread.

The coordinator's Watchdog collects the status of all members and calls `hang.diagnose` twice: to
detect a hang, and again with the stacks of the culprits. A GroupAborter aborts the process group of
a generation that is over, and restarts this worker if it is stuck in it.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lockstep.elastic.generation_log import Generation, Member
from lockstep.elastic.hang import HangVerdict, MemberSnapshot, diagnose, stack_of
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.errors import FencedError
from lockstep.log import flush_log, log
from lockstep.runtime import status_board as board
from lockstep.runtime.exit_report import ExitReport, send_exit_report
from lockstep.runtime.status_board import Status
from lockstep.runtime.worker_env import process_stat

CHECK_S = 1.0  # interval between diagnoses
STACK_S = 1.0  # how long to wait for the stack of a culprit
STUCK_S = 3.0  # a collective that survives the shutdown of its sockets for longer is stuck: milliseconds are normal
STUCK_FORMING_S = (
    12.0  # the same while the group forms; gloo itself gives up earlier (FORM_TIMEOUT_S)
)
STUCK_ABORT_S = (
    30.0  # the abort of a GPU's communicators; no stack shows a main thread that waits for the GPU
)
LEAVE_S = 20.0  # a main thread that takes longer to leave a broken group is stuck: milliseconds are normal


@dataclass
class Watchdog:
    limits: ElasticLimits
    host: str  # of the coordinator, where it can see the state of processes
    ask_stack: Callable[
        [str], None
    ]  # requests the stack of a member's main thread; `on_stack` takes the answer
    statuses: dict[str, tuple[Status, float]] = field(default_factory=dict)  # id -> (newest, when)
    stacks: dict[str, str] = field(default_factory=dict)
    _checked_s: float = 0.0
    _suspects: tuple[str, ...] = ()
    _suspected_s: float = 0.0
    _reported: tuple[Any, ...] = ()

    def on_heartbeat(self, id: str, status: Mapping[str, Any] | None, now_s: float) -> None:
        if status:
            self.statuses[id] = (Status(**status), now_s)

    def on_stack(self, id: str, text: str) -> None:
        self.stacks[id] = text

    def reset(self) -> None:
        """Forget the previous generation."""
        self.statuses, self.stacks, self._suspects, self._reported = {}, {}, (), ()

    def new_verdict(self, generation: Generation, now_s: float) -> HangVerdict | None:
        """Return each verdict once; None while nothing hangs or stacks are awaited."""
        if now_s - self._checked_s < CHECK_S:
            return None
        self._checked_s = now_s
        snapshots = [
            self._snapshot(member, rank, now_s) for rank, member in enumerate(generation.members)
        ]
        verdict = diagnose([snapshot for snapshot in snapshots if snapshot], self.limits)
        if verdict is None:
            self._suspects, self.stacks = (), {}  # the next hang is elsewhere
            return None
        missing = [id for id in verdict.culprits if id not in self.stacks]
        if verdict.culprits and self._suspects != verdict.culprits:
            self._suspects, self._suspected_s = verdict.culprits, now_s
            for id in missing:
                self.ask_stack(id)
            return None
        if missing and now_s - self._suspected_s < STACK_S:
            return None
        if self._reported == (verdict.culprits, verdict.action):
            return None
        self._reported = (verdict.culprits, verdict.action)
        return verdict

    def _snapshot(self, member: Member, rank: int, now_s: float) -> MemberSnapshot | None:
        if member.id not in self.statuses:
            return None
        status, at_s = self.statuses[member.id]
        state = ""
        with suppress(OSError):
            state = process_stat(member.pid)[0] if member.host == self.host else "R"
        age_s, stack = now_s - at_s, self.stacks.get(member.id, "")
        return MemberSnapshot(
            member.id, member.host, member.slot, rank, status.after(age_s), age_s, state, stack
        )


def read_status(path: Path) -> dict[str, Any] | None:
    """Read the status board at `path` as JSON; None when there is none."""
    try:
        return asdict(board.read_status(path))
    except OSError:
        return None


class GroupAborter:
    """Aborts the group, and watches the main thread leave it."""

    def __init__(self, on_abort: Callable[[], object], main_thread: int) -> None:
        self.on_abort, self.main_thread = (
            on_abort,
            main_thread,
        )  # on_abort aborts every collective; true: one is still being aborted
        self._aborted_s = 0.0  # when the group was first aborted; 0: it was not

    def abort(self) -> bool:
        """Abort the group; return whether that takes longer than this call."""
        try:
            return bool(self.on_abort())
        except OSError:  # out of descriptors: the next turn tries again
            return False

    def check(self, *, is_over: bool, now_s: float, leaving_s: float = 0.0) -> None:
        """Abort the group if its generation `is_over`. Exit if the main thread is stuck in it.
        leaving_s: when the main thread started to leave the group; 0: it has not."""
        if leaving_s and now_s - leaving_s > LEAVE_S:
            stack = stack_of(self.main_thread)
            log.error(
                "the main thread has not left the broken group within %g s: restarting this worker\n%s",
                LEAVE_S,
                stack,
            )
            exit_for_restart("stuck while leaving a broken group", "")
        if not is_over:
            self._aborted_s = 0.0
            return
        is_aborting = self.abort()  # each turn: the main thread may have opened more sockets
        self._aborted_s = self._aborted_s or now_s
        stuck_s = now_s - self._aborted_s
        if is_aborting and stuck_s > STUCK_ABORT_S:
            log.error(
                "the communicators of the GPU were not aborted within %g s: restarting this worker",
                STUCK_ABORT_S,
            )
            exit_for_restart(
                "stuck while aborting the communicators of its GPU", stack_of(self.main_thread)
            )
        stack = stack_in_collective() if stuck_s > STUCK_S else ""
        forming = "in init_process_group" in stack or "in new_group" in stack
        if stack and stuck_s > (STUCK_FORMING_S if forming else STUCK_S):
            log.error(
                "a collective has not returned %.0f s after its group was aborted: restarting this worker\n%s",
                stuck_s,
                stack,
            )
            exit_for_restart("stuck in a collective of an aborted group", stack)


def exit_for_restart(why: str, stack: str) -> NoReturn:
    """Exit at once, since the main thread is stuck; the agent starts a new worker."""
    send_exit_report(
        ExitReport(FencedError.exit_code, time.monotonic(), why, stack, lost_peers=True)
    )
    flush_log()
    os._exit(FencedError.exit_code)


def stack_in_collective() -> str:
    """Return the stack of a thread in a collective of torch; "" if there is none."""
    for frame in sys._current_frames().values():
        if any(
            entry.f_code.co_filename.endswith("distributed_c10d.py")
            for entry, _ in traceback.walk_stack(frame)
        ):
            return "".join(traceback.format_stack(frame))
    return ""
