"""The process group of one generation: form it, abort it, send and receive in it.

A GroupAborter aborts the group of a generation that is over, and restarts this worker if its main
thread is stuck in it.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# Public at run time.
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lockstep.elastic.generation_log import Generation
from lockstep.elastic.hang import stack_of
from lockstep.errors import FencedError
from lockstep.log import flush_log, log
from lockstep.runtime.exit_report import ExitReport, send_exit_report
from lockstep.runtime.process_group import (
    form_timeout_s,
    gather_json,
    init_default_group,
    reduce_rounds,
    run_rounds,
)
from lockstep.runtime.sockets import is_refused, open_sockets, shutdown_sockets
from lockstep.runtime.torch_private import detach_groups, device_backends, set_group_timeout
from lockstep.runtime.work import WorkWaiter

CLOSE_TIMEOUT_S = 5.0  # for a group to close after its sockets were shut down
POLL_S = 0.02
# Until a store that does not answer is asked whether it exists; then twice as long each time.
FIRST_ASK_S = 0.1
# A collective that survives the shutdown of its sockets for longer is stuck: milliseconds are
# normal.
STUCK_S = 3.0
# The same while the group forms; gloo itself gives up earlier (FORM_TIMEOUT_S).
STUCK_FORMING_S = 12.0
# The abort of a GPU's communicators; no stack shows a main thread that waits for the GPU.
STUCK_ABORT_S = 30.0
# A main thread that takes longer to leave a broken group is stuck: milliseconds are normal.
LEAVE_S = 20.0
# After an error of NCCL torch ends the process, asks the store for requests to dump its records,
# and sleeps for a minute with a lock that every collective needs (ProcessGroupNCCL.cpp,
# Watchdog::runLoop). Here the membership aborts the group.
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


class GenerationGroup:
    """torch's default process group, which each generation forms again."""

    def __init__(
        self,
        device: torch.device,
        timeout_s: float = 600.0,
        sockets: set[tuple[int, str]] | None = None,
    ) -> None:
        self.device, self.timeout_s = device, timeout_s
        # Gloo's, as (file descriptor, name in /proc/self/fd): a failure shuts them down.
        self._sockets = sockets or set()
        self._sockets_before: set[tuple[int, str]] = set()
        self._forming_subgroups = False
        self._aborts: dict[Any, threading.Thread] = {}  # NCCL backend -> thread that aborts it
        self._lock = threading.Lock()
        self._hold_s = 0.0
        self._abort_asked_s = 0.0
        self._is_shut_down = False
        # Groups that were left intact, and their NCCL backends.
        self._retired: list[tuple[list[dist.ProcessGroup], list[Any]]] = []
        self._waits = WorkWaiter()

    def form(self, generation: Generation, rank: int, generation_error: Callable[[], str]) -> None:
        """Collective. Form the process group of a generation. RuntimeError if that fails."""
        self._sockets_before, self._waits = open_sockets(), WorkWaiter(generation_error)
        self._hold_s = 0.0
        self._abort_asked_s = 0.0
        self._is_shut_down = False
        if why := generation_error():
            raise RuntimeError(why)
        if self.device.type == "cuda":
            os.environ.update(NCCL_SETTINGS)
        size, timeout_s = len(generation.members), form_timeout_s(self.device)
        store = _connect_store(generation.store, size, timeout_s, generation_error)
        prefixed = PrefixStore(f"generation-{generation.number}-{generation.token}", store)
        # Fails soon if two members cannot connect.
        init_default_group(prefixed, rank, size, self.device, timeout_s)
        set_group_timeout(timedelta(seconds=self.timeout_s), dist.group.WORLD)
        self._sockets = open_sockets() - self._sockets_before
        while self._retired:
            groups, backends = self._retired.pop()
            _close_in_thread(groups, start_aborts(backends))

    @contextmanager
    def track_subgroups(self) -> Iterator[None]:
        """Context manager around the forming of subgroups, to abort them like the group."""
        self._sockets_before, self._forming_subgroups = open_sockets(), True
        try:
            yield
        finally:
            # A new set: the membership thread reads it.
            self._sockets = self._sockets | (open_sockets() - self._sockets_before)
            self._forming_subgroups = False

    def hold_abort(self, seconds: float) -> bool:
        """Let an abort wait so long from when it is asked for, so that living peers can finish an
        exchange. Return False if the group was aborted already."""
        with self._lock:
            self._hold_s = seconds
            return not self._is_shut_down

    @property
    def is_aborted(self) -> bool:
        """Whether works may have ended by an abort: on a GPU they then look like successful ones,
        with any numbers in their tensors."""
        with self._lock:
            return self._is_shut_down

    def is_abort_held(self) -> bool:
        """Return whether the group stays open for an exchange although its generation is over."""
        with self._lock:
            asked_s = self._abort_asked_s or time.monotonic()
            return not self._is_shut_down and time.monotonic() - asked_s < self._hold_s

    def shutdown(self, links: set[int]) -> bool:
        """Abort all waits in the group and its subgroups, except on `links` of the membership.
        Called by the membership thread, repeatedly until the main thread has left the group.
        Return whether communicators of a GPU are still being aborted."""
        with self._lock:
            self._abort_asked_s = self._abort_asked_s or time.monotonic()
            if time.monotonic() - self._abort_asked_s < self._hold_s:
                return False
            self._is_shut_down = True
        sockets = open_sockets()
        # A group that forms has no list of sockets yet: take every one opened since.
        forming = (
            sockets - self._sockets_before
            if not self._sockets or self._forming_subgroups
            else set()
        )
        shutdown_sockets(
            entry for entry in sockets & self._sockets | forming if entry[0] not in links
        )
        return self._abort_communicators()  # last: a vote must not follow a work that was aborted

    def _abort_communicators(self) -> bool:
        """Start to abort NCCL's communicators; return whether one is still being aborted."""
        backends = device_backends(self.device) if self.device.type == "cuda" else []
        self._aborts |= start_aborts(backend for backend in backends if backend not in self._aborts)
        return any(thread.is_alive() for thread in self._aborts.values())

    def destroy(self) -> None:
        """Close the process group, with its threads, sockets and port."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort(self, *, intact: bool = False) -> None:
        """Close the process group after a failure; pending collectives fail at once.

        Closing a gloo group waits for them up to its timeout, unless its sockets are shut down. A
        group that takes longer than CLOSE_TIMEOUT_S closes while the next generation trains.

        intact  all members leave, none has failed: a slower one may still receive from this one, so
                NCCL's communicators are aborted only when the next generation has formed
        """
        shutdown_sockets(open_sockets() & self._sockets)
        self._sockets = set()
        self._sockets_before = open_sockets()
        if intact and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            backends, self._aborts = device_backends(self.device), {}
            self._retired.append((detach_groups(), backends))
            return
        self._abort_communicators()
        aborts, self._aborts = self._aborts, {}  # which reference the group
        _close_in_thread(detach_groups(), aborts).join(CLOSE_TIMEOUT_S)

    def gather_json(self, size: int, value: Any) -> list[Any]:
        """Collective. Return the JSON values of all `size` ranks."""
        return gather_json(size, value, self.wait)

    def all_reduce(
        self,
        row: torch.Tensor,
        rank: int,
        size: int,
        combine: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Collective. Combine the rows of all ranks into `row`; see reduce_rounds."""
        run_rounds(reduce_rounds(row, rank, size, combine), self.wait)

    def wait(self, works: Iterable[dist.Work | None]) -> None:
        """Wait until all works are done. PeersLostError when the generation ends first."""
        self._waits.wait(works)

    def isend(self, tensor: torch.Tensor, rank: int) -> dist.Work | None:
        return dist.isend(tensor, dst=rank)

    def irecv(self, tensor: torch.Tensor, rank: int) -> dist.Work | None:
        return dist.irecv(tensor, src=rank)


class UpdateExchanges:
    """The optimizers that exchange parts of their update in a group: an interrupted one leaves no
    usable state, so an abort waits for them."""

    def __init__(self, group: GenerationGroup) -> None:
        self._group = group
        self._optimizers = 0
        self._unfinished = 0  # of this step

    def add(self) -> None:
        """Record that one more optimizer exchanges its update."""
        self._optimizers += 1

    def hold(self, seconds: float) -> bool:
        """Let an abort wait for their next updates. Return False if the group was aborted."""
        self._unfinished = self._optimizers
        return not self._optimizers or self._group.hold_abort(seconds)

    def end(self) -> None:
        """Let an abort wait no longer, once all optimizers have finished."""
        self._unfinished -= 1
        if self._unfinished <= 0:
            self._group.hold_abort(0.0)


def start_aborts(backends: Iterable[Any]) -> dict[Any, threading.Thread]:
    """Abort NCCL's communicators: nothing else ends a kernel that waits for a dead peer.
    Each has a thread, since the abort of one waits for the kernels of the others."""
    threads = {
        backend: threading.Thread(target=backend.abort, name="lockstep-abort", daemon=True)
        for backend in backends
    }
    for thread in threads.values():
        thread.start()
    return threads


def _close_in_thread(
    groups: list[dist.ProcessGroup], aborts: dict[Any, threading.Thread]
) -> threading.Thread:
    """Close groups, each with its threads, sockets and port, after their communicators are
    aborted."""

    def close() -> None:
        for thread in aborts.values():
            thread.join()
        aborts.clear()
        while groups:
            groups.pop(0).shutdown()

    closing = threading.Thread(target=close, name="lockstep-close", daemon=True)
    closing.start()
    return closing


def _connect_store(
    address: str, size: int, timeout_s: float, generation_error: Callable[[], str]
) -> TCPStore:
    """Connect to a store. RuntimeError if it does not answer, its process exited, or the generation
    is over. On a thread: torch's client cannot be interrupted while it retries.

    A worker may propose a generation without itself, and exit: it is no member whose loss ends the
    generation. It listened before its proposal was visible, so a refusal means that it exited.
    """
    host, _, port = address.rpartition(":")
    connected: Future[TCPStore] = Future()
    ask_s, wait_s = time.monotonic() + FIRST_ASK_S, FIRST_ASK_S

    def connect() -> None:
        try:
            connected.set_result(
                TCPStore(
                    host, int(port), size, is_master=False, timeout=timedelta(seconds=timeout_s)
                )
            )
        except RuntimeError as error:
            connected.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    while True:
        try:
            return connected.result(POLL_S)
        except TimeoutError:
            why = generation_error()
            if not why and time.monotonic() > ask_s:
                wait_s *= 2
                ask_s = time.monotonic() + wait_s
                why = (
                    f"nothing listens at {address}, the store of this generation"
                    if is_refused(host, int(port))
                    else ""
                )
            if why:
                raise RuntimeError(why) from None


class GroupAborter:
    """Aborts the group, and watches the main thread leave it."""

    def __init__(self, on_abort: Callable[[], object], main_thread: int) -> None:
        # on_abort aborts every collective; true: one is still being aborted.
        self.on_abort, self.main_thread = on_abort, main_thread
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
                "the main thread has not left the broken group within %g s: "
                "restarting this worker\n%s",
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
                "a collective has not returned %.0f s after its group was aborted: "
                "restarting this worker\n%s",
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
