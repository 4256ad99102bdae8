"""Wait for in-flight sends and receives; abandon them when the generation ends.

A gloo send or receive in progress does not fail when its connection is closed (torch 2.13:
`pair.cc` notifies the operations in its queues, not the one whose bytes it is moving), and a C++
wait cannot be interrupted. So a thread waits that is not needed: when the generation is over, it
and its operations are left behind until the group's timeout.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lockstep.errors import PeersLostError
from lockstep.runtime.process_group import group_timeout

POLL_S = 0.05
# After the end of a generation: works that have not started fail by themselves within milliseconds.
GRACE_S = 0.2


def static_group() -> str:
    """Default `generation_error` of a static process group, which is never invalidated."""
    return ""


class WorkWaiter:
    """Waits for c10d work of one generation. Any thread may call it.

    generation_error  returns why the generation is over; "" while it is valid
    in_thread         wait in a helper thread; False on a GPU, where only the stream of the calling
                      thread waits
    """

    def __init__(
        self, generation_error: Callable[[], str] = static_group, *, in_thread: bool = True
    ) -> None:
        self.generation_error, self.in_thread = generation_error, in_thread
        self._local = threading.local()  # one helper for each waiting thread

    def wait(
        self, works: Iterable[dist.Work | None], group: dist.ProcessGroup | None = None
    ) -> None:
        """Collective. Wait until all works are done, for the timeout of the group at most.

        On a CPU the timeout is explicit: torch 2.13 does not pass a changed group timeout on to
        sends and receives. PeersLostError when the generation ends first; otherwise the error of
        torch.
        """
        started = [work for work in works if work is not None]
        if not started:
            return
        if not self.in_thread:
            for work in started:
                work.wait()  # with a timeout NCCL's wait polls until the kernel has finished
            return
        if self.generation_error is static_group or isinstance(
            threading.current_thread(), JobServer
        ):
            wait_for(started, group_timeout(group))  # a job is left behind with its thread
            return
        thread: JobThread = getattr(self._local, "thread", None) or JobThread(
            "lockstep-wait", self.generation_error
        )
        self._local.thread = thread
        thread.submit(partial(wait_for, started, group_timeout(group)))
        thread.drain()
        if thread.failure:
            self._local.thread = None
            raise thread.failure


def wait_for(works: list[dist.Work], timeout: timedelta) -> None:
    for work in works:
        work.wait(timeout)


class JobThread:
    """Runs jobs one after the other in a thread, which is left behind when the generation ends.
    generation_error: returns why the generation is over; "" while it is valid
    max_in_flight: `submit` waits while so many jobs are not done."""

    def __init__(
        self,
        name: str,
        generation_error: Callable[[], str] = static_group,
        max_in_flight: int = 1_000_000,
    ) -> None:
        self._generation_error = generation_error
        self._server = JobServer(name, max_in_flight)
        self._server.start()
        self._left: PeersLostError | None = None
        weakref.finalize(self, self._server.jobs.put, None)

    @property
    def failure(self) -> Exception | None:
        """The first error of a job, or PeersLostError; jobs after it do not run."""
        return self._left or self._server.failure

    @property
    def left_behind(self) -> bool:
        return self._left is not None

    def submit(self, job: Callable[[], None]) -> None:
        if self._wait(lambda seconds: self._server.free_slots.acquire(timeout=seconds)):
            self._server.jobs.put(partial(self._server.attempt, job))

    def drain(self) -> None:
        """Wait until all jobs are done, or the generation is over."""
        done = threading.Event()
        self._server.jobs.put(done.set)
        self._wait(done.wait)

    def close(self, timeout_s: float) -> None:
        """End the thread after its jobs; wait so long for a job that a dead peer blocks."""
        self._server.jobs.put(None)
        self._server.join(0.0 if self._left else timeout_s)

    def _wait(self, done: Callable[[float], bool]) -> bool:
        """Return True when `done(seconds)` does; False, with a failure, if the generation ends
        first."""
        over_since_s = None
        while not self._left:
            if done(POLL_S):
                return True
            why, now_s = self._generation_error(), time.monotonic()
            over_since_s = (over_since_s or now_s) if why else None
            if over_since_s is not None and now_s - over_since_s > GRACE_S:
                self._left = PeersLostError(
                    why, "a send or receive was in progress when the connections were closed"
                )
        return False


class JobServer(threading.Thread):
    """The thread of a JobThread; it exits when that is collected."""

    def __init__(self, name: str, max_in_flight: int) -> None:
        super().__init__(name=name, daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.free_slots = threading.Semaphore(max_in_flight)
        self.failure: Exception | None = None

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()
            del job  # it may reference the group

    def attempt(self, job: Callable[[], None]) -> None:
        try:
            if not self.failure:
                job()
        except Exception as error:
            self.failure = error.with_traceback(None)  # it references the group
        self.free_slots.release()


class StagedReceive(dist.Work):
    """A receive into CPU memory, which `wait` copies to a tensor on a GPU."""

    def __init__(
        self, tensor: torch.Tensor, source: int, group: dist.ProcessGroup, tag: int
    ) -> None:
        super().__init__()
        self.tensor, self.buffer = tensor, torch.empty_like(tensor, device="cpu")
        self.work = dist.irecv(self.buffer, group=group, tag=tag, group_src=source)

    def wait(self, *timeout: timedelta) -> bool:
        assert self.work is not None
        done = self.work.wait(*timeout)
        self.tensor.copy_(self.buffer)
        return done


Transfers = Sequence[tuple[int, torch.Tensor]]  # (rank in the group, tensor)


def start_p2p(
    sends: Transfers, receives: Transfers, group: dist.ProcessGroup, tag: int = 0
) -> list[dist.Work]:
    """Start sends and receives of one group together. NCCL would queue them one after the other:
    two ranks that both send first block each other. gloo reads and writes CPU memory only."""
    transfers = (*sends, *receives)
    if transfers and transfers[0][1].is_cuda and not is_staged(transfers[0][1], group):
        operations = [
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer, tag=tag)
            for peer, tensor in receives
        ]
        operations += [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=peer, tag=tag)
            for peer, tensor in sends
        ]
        return dist.batch_isend_irecv(operations)
    works: list[dist.Work | None] = []
    for peer, tensor in receives:
        staged = is_staged(tensor, group)
        works.append(
            StagedReceive(tensor, peer, group, tag)
            if staged
            else dist.irecv(tensor, group=group, tag=tag, group_src=peer)
        )
    works += [
        dist.isend(tensor.cpu(), group=group, tag=tag, group_dst=peer) for peer, tensor in sends
    ]
    return [work for work in works if work is not None]


def is_staged(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Return whether a tensor goes through CPU memory: it is on a GPU, and the group is gloo's."""
    return tensor.is_cuda and "nccl" not in dist.get_backend_config(group)
