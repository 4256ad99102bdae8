"""Wait for in-flight sends and receives; abandon them when the generation ends.

A gloo send or receive in progress does not fail when its connection is closed (torch 2.13:
`pair.cc` notifies the operations in its queues, not the one whose bytes it is moving), and a C++
wait cannot be interrupted. So a helper thread waits; when the generation is over, it and its
operations are left behind until the group's timeout.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.errors import PeersLostError
from lockstep.runtime.process_group import group_timeout

POLL_S = 0.05
GRACE_S = 0.2  # after the end of a generation: works that have not started fail by themselves within milliseconds


def static_group() -> str:
    """Default `generation_error` of a static process group, which is never invalidated."""
    return ""


class WorkWaiter:
    """Waits for c10d work of one generation. Any thread may call it.

    generation_error  returns why the generation is over; "" while it is valid
    in_thread         wait in a helper thread; False on a GPU, where only the stream of the calling
                      thread waits
    """

    def __init__(self, generation_error: Callable[[], str] = static_group, *, in_thread: bool = True) -> None:
        self.generation_error, self.in_thread = generation_error, in_thread
        self._local = threading.local()  # one helper for each waiting thread

    def wait(self, works: Iterable[dist.Work | None], group: dist.ProcessGroup | None = None) -> None:
        """Collective. Wait until all works are done, for the timeout of the group at most.

        On a CPU the timeout is explicit: torch 2.13 does not pass a changed group timeout on to sends and
        receives. PeersLostError when the generation ends first; otherwise the error of torch.
        """
        started = [work for work in works if work is not None]
        if not started:
            return
        if not self.in_thread:
            for work in started:
                work.wait()  # with a timeout NCCL's wait polls until the kernel has finished
            return
        if self.generation_error is static_group:
            if error := wait_for(started, group_timeout(group)):
                raise error
            return
        helper: WaiterThread | None = getattr(self._local, "helper", None)
        if helper is None:
            helper = self._local.helper = WaiterThread()
        helper.jobs.put((started, group_timeout(group)))
        ended_s = None
        while True:
            try:
                error = helper.results.get(timeout=POLL_S)
                break
            except queue.Empty:
                now_s, why = time.monotonic(), self.generation_error()
                ended_s = (ended_s or now_s) if why else None
                if ended_s is not None and now_s - ended_s > GRACE_S:
                    self._local.helper = None
                    raise PeersLostError(why, "a send or receive was in progress when the connections were closed") from None
        if error is not None:
            raise error


class StagedReceive(dist.Work):
    """A receive into CPU memory, which `wait` copies to a tensor on a GPU."""

    def __init__(self, operation: dist.P2POp) -> None:
        super().__init__()
        self.tensor, self.buffer = operation.tensor, torch.empty_like(operation.tensor, device="cpu")
        self.work = dist.irecv(self.buffer, group=operation.group, tag=operation.tag, group_src=operation.group_peer)

    def wait(self, *timeout: timedelta) -> bool:
        assert self.work is not None
        done = self.work.wait(*timeout)
        self.tensor.copy_(self.buffer)
        return done


def start_p2p(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Start sends and receives of one group together.

    NCCL would queue them one after the other: two ranks that both send first block each other.
    gloo reads and writes CPU memory only.
    """
    if not operations or not is_staged(operations[0]):
        return dist.batch_isend_irecv(operations) if operations else []
    works: list[dist.Work] = []
    for operation in operations:
        if operation.op is dist.irecv:
            works.append(StagedReceive(operation))
        elif work := dist.isend(operation.tensor.cpu(), group=operation.group, tag=operation.tag, group_dst=operation.group_peer):
            works.append(work)
    return works


def is_staged(operation: dist.P2POp) -> bool:
    return operation.tensor.is_cuda and "nccl" not in dist.get_backend_config(operation.group)


Jobs = queue.SimpleQueue[tuple[list[dist.Work], timedelta] | None]
Results = queue.SimpleQueue[Exception | None]


class WaiterThread:
    """A thread that waits for one job after the other; it exits when this object is collected."""

    def __init__(self) -> None:
        self.jobs: Jobs = queue.SimpleQueue()
        self.results: Results = queue.SimpleQueue()
        threading.Thread(target=serve, args=(self.jobs, self.results), name="lockstep-wait", daemon=True).start()
        weakref.finalize(self, self.jobs.put, None)


def serve(jobs: Jobs, results: Results) -> None:
    while (job := jobs.get()) is not None:
        error = wait_for(*job)
        del job  # job and traceback hold a reference to the group
        results.put(error)
        del error


def wait_for(works: list[dist.Work], timeout: timedelta) -> Exception | None:
    try:
        for work in works:
            work.wait(timeout)
    except Exception as error:
        return error.with_traceback(None)
    return None
