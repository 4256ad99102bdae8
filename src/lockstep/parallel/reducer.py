"""Reduce gradients beside the backward pass, in the order in which they become ready."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch


class Reducer:
    """Runs jobs one after the other: on a CPU in one thread, on CUDA on a side stream.

    Collectives from several threads may pair up wrongly between processes and deadlock. On CUDA
    they only queue work, so jobs run in the thread of the caller.

    max_in_flight  on a CPU `submit` waits while so many jobs are not done
    side_stream    False: on CUDA jobs run on the stream of the caller, as FSDP's hooks do
    A job must not raise.
    """

    def __init__(self, device: torch.device, max_in_flight: int = 1_000_000, *, side_stream: bool = True) -> None:
        self.device, self._side_stream = device, side_stream
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._free_slots = threading.Semaphore(max_in_flight)
        self._thread = threading.Thread(target=self._serve, name="lockstep-reducer", daemon=True)
        if not self._stream:
            self._thread.start()
        self.start_step()

    def start_step(self) -> None:
        """Reset the number of jobs and the times of the last submission and completion."""
        self.submitted = 0
        self._submitted_at: Any = None
        self._done_at: Any = None

    def submit(self, job: Callable[[], None]) -> None:
        self.submitted += 1
        self._submitted_at = self._now()
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream if self._side_stream else None):
                job()
                self._done_at = self._now()
        else:
            self._free_slots.acquire()
            self._queue.put(job)

    def drain(self) -> None:
        """Wait until all jobs are done; on CUDA only the current stream waits."""
        if self._stream:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        elif self.submitted and self._thread.is_alive():
            done = threading.Event()
            self._free_slots.acquire()
            self._queue.put(done.set)
            done.wait()

    def exposed_s(self) -> float:
        """Return the seconds of communication after the last job of the step was submitted."""
        if self._submitted_at is None or self._done_at is None:
            return 0.0
        if self._stream:
            self._done_at.synchronize()
            return max(0.0, float(self._submitted_at.elapsed_time(self._done_at)) / 1000)
        return max(0.0, float(self._done_at - self._submitted_at))

    def close(self) -> None:
        """End the thread; give a job that is blocked by a dead peer five seconds."""
        if not self._stream:
            self._queue.put(None)
            self._thread.join(timeout=5)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            self._free_slots.release()
            self._done_at = self._now()

    def _now(self) -> Any:
        if not self._stream:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
