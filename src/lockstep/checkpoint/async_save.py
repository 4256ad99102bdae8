"""Save a checkpoint while training continues: the caller copies the state, a thread writes it.

The host buffers are kept between saves, so the memory cost is one state. The threads live only
while they write: an idle saver has no thread that a fork could break, and the interpreter waits for
them before it exits.

Hashing and writing release the interpreter lock and run at idle priority: they use a core only
while no other thread does. After IDLE_S they take a tenth of a busy core, and a whole one when the
caller waits for the save.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.commit import exhaust
from lockstep.checkpoint.store import CheckpointStore
from lockstep.log import log
from lockstep.units import format_duration

MAX_COPY_THREADS = 4
IDLE_S = 30.0  # a checkpoint is not delayed longer on a machine without an idle core
NICE = 10  # above that of the process: about a tenth of the share of its other threads


def do_nothing() -> None: ...


def copy_to_host(
    tensors: Mapping[str, Tensor], memory: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[torch.cuda.Event]]:
    """Return copies of the tensors on the CPU, and an event per GPU that marks the end of its
    copies: its stream orders them before the next update of the weights.

    memory  the last copies, which are overwritten where they fit: the first use of memory costs
            more than the copy
    Where training has one thread per process, idle cores help: one core does not use the whole
    bandwidth of the memory.
    """

    def copy(name: str) -> Tensor:
        tensor, buffer = tensors[name].detach(), memory.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)

    gpus = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
    if gpus or torch.get_num_threads() > 1:
        copies = list(map(copy, tensors))
    else:
        with ThreadPoolExecutor(
            min(MAX_COPY_THREADS, len(os.sched_getaffinity(0))), "copy"
        ) as pool:
            copies = list(pool.map(copy, tensors))
    return dict(zip(tensors, copies, strict=True)), [
        torch.cuda.current_stream(gpu).record_event() for gpu in gpus
    ]


class IdleRun:
    """Exhausts iterators in a thread of idle priority until the deadline, then in one of low
    priority until `hurry`.
    Only a privileged thread may raise its priority again. So each priority has a new thread, and
    the caller takes over what these leave."""

    def __init__(self) -> None:
        self._hurried, self._deadline_s = threading.Event(), time.monotonic() + IDLE_S

    def hurry(self) -> None:
        self._hurried.set()

    def __call__(self, pieces: Iterator[None]) -> None:
        errors: list[BaseException] = []
        is_done = threading.Event()

        def run(*, is_idle: bool) -> None:
            try:
                with suppress(OSError):  # the container forbids it: normal priority
                    if is_idle:  # 0: this thread alone
                        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                    else:
                        os.nice(NICE)  # of this thread, on Linux
                for _ in pieces:
                    is_late = is_idle and time.monotonic() > self._deadline_s
                    if is_late or self._hurried.is_set():
                        return
                is_done.set()
            except BaseException as error:
                errors.append(error)

        for is_idle in (True, False):
            if is_done.is_set() or self._hurried.is_set():
                break
            thread = threading.Thread(target=run, kwargs={"is_idle": is_idle}, name="idle writer")
            with suppress(RuntimeError):  # no memory for a thread, or the interpreter exits
                thread.start()
                thread.join()
            if errors:
                raise errors[0]
        exhaust(pieces)


class AsyncSaver(AbstractContextManager["AsyncSaver"]):
    """Saves into `store`, one checkpoint at a time. Call it from one thread only.
    on_saved: called as on_saved(step, seconds) in the writing thread after each commit."""

    def __init__(
        self,
        store: CheckpointStore,
        on_saved: Callable[[int, float], object] = lambda step, seconds: None,
    ) -> None:
        self.store = store
        self.on_saved = on_saved
        self._copies: dict[str, Tensor] = {}
        self._failures: deque[Exception] = deque()
        self._thread: threading.Thread | None = None
        self._run = IdleRun()
        self._done = threading.Event()
        self._warned_of_wait = False

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        protect: Callable[[], Collection[int]] = tuple,
        first: Callable[[], None] = do_nothing,
    ) -> None:
        """Wait for the previous save, copy the state and return; the tensors may then change. The
        thread calls `first`, and `CheckpointStore.save` with the steps that `protect` returns."""
        self.wait(why=f"before step {step} is copied")
        copied_facts = json.loads(json.dumps(dict(facts)))
        copies, events = copy_to_host(tensors, self._copies)
        run = IdleRun()
        self._copies, self._run = copies, run

        def write() -> None:
            try:
                for event in events:
                    event.synchronize()
                first()
                start_s = time.monotonic()
                self.store.save(step, copies, copied_facts, tuple(protect()), run)
                self.on_saved(step, time.monotonic() - start_s)
            except Exception as error:
                self._failures.append(error)
            finally:
                self._done.set()

        self._done.clear()
        thread = threading.Thread(target=write, name=f"save step {step}")
        thread.start()  # may fail for lack of memory: then there is no save to wait for
        self._thread = thread

    @property
    def writing(self) -> bool:
        return self._thread is not None and not self._done.is_set()

    def failure(self) -> Exception | None:
        """Return an error of the thread, once, for all ranks to vote on."""
        return self._failures.popleft() if self._failures else None

    def wait(self, why: str = "", within_s: float | None = None) -> bool:
        """Wait for the save in progress; False when it does not end within `within_s` seconds.
        Log the first wait with a reason (`why`), since it delays training."""
        if self._thread is None:
            return True
        self._run.hurry()
        start_s, name = time.monotonic(), self._thread.name
        warns = bool(self.writing and why and not self._warned_of_wait)
        # Not join alone: before Python 3.13, join treats the thread as finished after a signal.
        if not self._done.wait(within_s):
            return False
        self._thread.join()
        self._thread = None
        if warns:
            self._warned_of_wait = True
            log.warning(
                "waited %s for %r %s; save less often to avoid this (logged once)",
                format_duration(time.monotonic() - start_s),
                name,
                why,
            )
        return True

    def close(self) -> None:
        """Wait for the save in progress; raise its error, or the first one that was not
        returned."""
        self.wait()
        self._copies = {}
        error = self.failure()
        while later_error := self.failure():
            log.error("%s", later_error)
        if error:
            raise error

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            log.error("%s", failure)  # the error in progress is raised
