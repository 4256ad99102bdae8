"""Abort the process group of a generation that is over; restart a worker that is stuck in it."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from lockstep.elastic.hang import stack_of
from lockstep.errors import FencedError
from lockstep.log import flush_log
from lockstep.runtime.exit_report import ExitReport
from lockstep.runtime.worker_main import send_exit_report

log = logging.getLogger("lockstep")
STUCK_S = 3.0  # a collective that survives the shutdown of its sockets for longer is stuck: milliseconds are normal
STUCK_FORMING_S = 12.0  # the same while the group forms; gloo itself gives up earlier (FORM_TIMEOUT_S)
LEAVE_S = 20.0  # a main thread that takes longer to leave a broken group is stuck: milliseconds are normal


class GroupAborter:
    """Aborts the group, and watches the main thread leave it."""

    def __init__(self, on_abort: Callable[[], None], main_thread: int) -> None:
        self.on_abort, self.main_thread = on_abort, main_thread  # on_abort aborts every collective of the group
        self._aborted_s = 0.0  # when the group was first aborted; 0: it was not
        self._leaving_s = 0.0  # when the main thread started to leave the group; 0: it has not

    def on_leaving(self) -> None:
        self._leaving_s = time.monotonic()

    def on_left(self) -> None:
        self._leaving_s = 0.0

    def abort(self) -> None:
        with suppress(OSError):  # out of descriptors: the next turn tries again
            self.on_abort()

    def check(self, *, is_over: bool, now_s: float) -> None:
        """Abort the group if its generation `is_over`. Exit if the main thread is stuck in it."""
        if self._leaving_s and now_s - self._leaving_s > LEAVE_S:
            stack = stack_of(self.main_thread)
            log.error("the main thread has not left the broken group within %g s: restarting this worker\n%s", LEAVE_S, stack)
            exit_for_restart("stuck while leaving a broken group", "")
        if not is_over:
            self._aborted_s = 0.0
            return
        self.abort()  # each turn: the main thread may have opened more sockets
        self._aborted_s = self._aborted_s or now_s
        stuck_s = now_s - self._aborted_s
        stack = stack_in_collective() if stuck_s > STUCK_S else ""
        forming = "in init_process_group" in stack or "in new_group" in stack
        if stack and stuck_s > (STUCK_FORMING_S if forming else STUCK_S):
            log.error("a collective has not returned %.0f s after its group was aborted: restarting this worker\n%s", stuck_s, stack)
            exit_for_restart("stuck in a collective of an aborted group", stack)


def exit_for_restart(why: str, stack: str) -> NoReturn:
    """Exit at once, since the main thread is stuck; the agent starts a new worker."""
    send_exit_report(ExitReport(FencedError.exit_code, time.monotonic(), why, stack, lost_peers=True))
    flush_log()
    os._exit(FencedError.exit_code)


def stack_in_collective() -> str:
    """Return the stack of a thread in a collective of torch; "" if there is none."""
    for frame in sys._current_frames().values():
        if any(entry.f_code.co_filename.endswith("distributed_c10d.py") for entry, _ in traceback.walk_stack(frame)):
            return "".join(traceback.format_stack(frame))
    return ""
