"""Save a checkpoint while training continues: the caller copies the state, a thread writes it.

Hashing, writing and flushing release the interpreter lock. The host buffers are kept between saves,
so the memory cost is one state. The thread lives only while it writes: an idle saver has no thread
that a fork could break, and the interpreter waits for the thread before it exits.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.store import CheckpointStore
from lockstep.units import format_duration

log = logging.getLogger("lockstep")


def do_nothing() -> None: ...


class AsyncSaver:
    """Saves into `store`, one checkpoint at a time. Call it from one thread only.

    on_saved  called as on_saved(step, seconds) in the writing thread after each commit
    """

    def __init__(self, store: CheckpointStore, on_saved: Callable[[int, float], object] = lambda step, seconds: None) -> None:
        self.store, self.on_saved = store, on_saved
        self._buffers: dict[str, Tensor] = {}
        self._failures: deque[Exception] = deque()
        self._thread: threading.Thread | None = None
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
        events = self._copy(tensors)
        copies = dict(self._buffers)

        def write() -> None:
            try:
                for event in events:
                    event.synchronize()
                first()
                start_s = time.monotonic()
                self.store.save(step, copies, copied_facts, tuple(protect()))
                self.on_saved(step, time.monotonic() - start_s)
            except Exception as error:
                self._failures.append(error)
            finally:
                self._done.set()

        self._done.clear()
        thread = threading.Thread(target=write, name=f"save step {step}")
        thread.start()  # may fail for lack of memory: then there is no save to wait for
        self._thread = thread

    def _copy(self, tensors: Mapping[str, Tensor]) -> list[torch.cuda.Event]:
        """Start to copy into the host buffers; return an event per device that marks the end.
        The stream orders the copy before the next update of the weights."""
        buffers = {}
        devices = set()
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffers[name] = buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda and buffer.is_pinned())
            if tensor.is_cuda:
                devices.add(tensor.device)
        self._buffers = buffers
        events = []
        for device in devices:
            events.append(torch.cuda.Event())
            events[-1].record(torch.cuda.current_stream(device))
        return events

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
        start_s, name, was_writing = time.monotonic(), self._thread.name, self.writing
        # Not join alone: before Python 3.13, join treats the thread as finished after a signal.
        if not self._done.wait(within_s):
            return False
        self._thread.join()
        self._thread = None
        waited_s = time.monotonic() - start_s
        if was_writing and why and not self._warned_of_wait:
            self._warned_of_wait = True
            log.warning("waited %s for %r %s; save less often to avoid this (logged once)", format_duration(waited_s), name, why)
        return True

    def close(self) -> None:
        """Wait for the save in progress; raise its error, or the first one that was not returned."""
        self.wait()
        self._buffers = {}
        error = self.failure()
        while later_error := self.failure():
            log.error("%s", later_error)
        if error:
            raise error

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            log.error("%s", failure)  # the error in progress is raised
