"""Saves a checkpoint while training goes on: the state is copied in the caller, written in a thread.

The copy takes as long as memory does (a device copies while the host goes on); the hashing, writing and flushing that
follow let go of the interpreter's lock. The host buffers are kept from save to save: the cost in memory is one state.
The thread lives only while it writes: there is none to be forked, and the interpreter does not end before it has.
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

from lockstep.checkpoint.store import Store
from lockstep.units import show_seconds

log = logging.getLogger("lockstep")


def nothing() -> None: ...


class BackgroundSaver:
    """Saves into `store`, one checkpoint at a time. Not for several threads. `on_saved(step, seconds)` is called in the writing thread.

    What fails in the thread is kept until `failure` hands it out, so that all processes can vote on it; whatever is
    still there at the end is raised by `close`.
    """

    def __init__(self, store: Store, on_saved: Callable[[int, float], object] = lambda step, seconds: None) -> None:
        self.store, self.on_saved = store, on_saved
        self.committed: int | None = None  # the last step that this saver committed
        self._buffers: dict[str, Tensor] = {}
        self._failures: deque[Exception] = deque()
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._said_wait = False

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        protect: Callable[[], Collection[int]] = tuple,
        first: Callable[[], None] = nothing,
    ) -> None:
        """Copy the state and return; `first`, then `Store.save` follow in the background. The tensors may change once this returns.

        protect  asked there too. Waits while the save before is still being written.
        """
        self.wait(why=f"before step {step} is copied")
        copied = json.loads(json.dumps(dict(facts)))
        events = self._copy(tensors)
        arguments = (step, dict(self._buffers), copied, protect, first, events)
        self._done.clear()
        thread = threading.Thread(target=self._write, args=arguments, name=f"save step {step}")
        thread.start()  # may fail for lack of memory: then nothing is under way that could be waited for
        self._thread = thread

    def _copy(self, tensors: Mapping[str, Tensor]) -> list[torch.cuda.Event]:
        """Begin to copy into the host buffers; the events that mark the end of the copies on each device.

        A device copies in the order of its stream: the next update of the weights waits for the copy by itself.
        """
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

    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        facts: dict[str, Any],
        protect: Callable[[], Collection[int]],
        first: Callable[[], None],
        events: list[torch.cuda.Event],
    ) -> None:
        try:
            for event in events:
                event.synchronize()
            first()
            began_s = time.monotonic()
            self.store.save(step, tensors, facts, tuple(protect()))
            self.committed = step
            self.on_saved(step, time.monotonic() - began_s)
        except Exception as error:
            self._failures.append(error)
        finally:
            self._done.set()

    @property
    def writing(self) -> bool:
        """True while a save is under way."""
        return self._thread is not None and not self._done.is_set()

    def failure(self) -> Exception | None:
        """The oldest failure that nobody has asked for yet, and forget it."""
        return self._failures.popleft() if self._failures else None

    def wait(self, why: str = "", within_s: float | None = None) -> bool:
        """True when nothing is being written; False when that has not come within so many seconds.

        why  what waits; a wait with a reason is told once, since it holds up training
        """
        if self._thread is None:
            return True
        began, name, busy = time.monotonic(), self._thread.name, self.writing
        # Not join alone: until Python 3.13 a join that a signal interrupts gives up the thread for ended.
        if not self._done.wait(within_s):
            return False
        self._thread.join()
        self._thread = None
        waited_s = time.monotonic() - began
        if busy and why and not self._said_wait:
            self._said_wait = True
            log.warning("waited %s for %r %s; to avoid it save less often (said once)", show_seconds(waited_s), name, why)
        return True

    def close(self) -> None:
        """Wait for the save under way; raise a failure that nobody has asked for."""
        self.wait()
        self._buffers = {}
        if error := self.failure():
            self._log_failures()
            raise error

    def _log_failures(self) -> None:
        while error := self.failure():
            log.error("%s", error)

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        self.wait()  # the error under way says more than a failed save, which is logged beside it
        self._log_failures()
