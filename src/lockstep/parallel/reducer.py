"""Reduce gradients beside the backward pass, in the order in which they become ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lockstep.runtime.work import JobThread, static_group


class Reducer:
    """Runs jobs one after the other: on a CPU in one thread, on CUDA on a side stream.

    Collectives from several threads may pair up wrongly between processes and deadlock. On CUDA
    they only queue work, so jobs run in the thread of the caller.

    generation_error  returns why the generation is over; "" while it is valid
    max_in_flight     on a CPU `submit` waits while so many jobs are not done
    side_stream       False: on CUDA jobs run on the stream of the caller, as FSDP's hooks do
    """

    def __init__(
        self,
        device: torch.device,
        generation_error: Callable[[], str] = static_group,
        max_in_flight: int = 1_000_000,
        *,
        side_stream: bool = True,
    ) -> None:
        self.device, self._side_stream = device, side_stream
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._make_thread = partial(JobThread, "lockstep-reducer", generation_error, max_in_flight)
        self._thread = None if self._stream else self._make_thread()
        self._failure: Exception | None = None  # on CUDA
        self._reset()

    @property
    def failure(self) -> Exception | None:
        """The first error of a job of this step, or PeersLostError; jobs after it do not run."""
        return self._thread.failure if self._thread else self._failure

    def start_step(self) -> bool:
        """Forget the jobs and the failure of the step before.

        Return whether its thread was left behind: it may still write to the memory of its jobs.
        """
        self.drain()
        left_behind = self._thread is not None and self._thread.left_behind
        if self._thread and self._thread.failure:
            self._thread = self._make_thread()
        self._reset()
        return left_behind

    def _reset(self) -> None:
        self._failure = None
        self._in_flight = False  # jobs may not be done
        self.blocked_s = 0.0  # `submit` waited so long
        self._submitted_at: Any = None
        self._done_at: Any = None

    def submit(self, job: Callable[[], None]) -> None:
        self._in_flight = True
        self._submitted_at = time_mark(self.device)
        if self._thread:
            self._thread.submit(partial(self._run, job))
            self.blocked_s += time.perf_counter() - self._submitted_at
        elif not self._failure:
            assert self._stream
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream if self._side_stream else None):
                try:
                    self._run(job)
                except Exception as error:
                    self._failure = error.with_traceback(None)

    def _run(self, job: Callable[[], None]) -> None:
        job()
        self._done_at = time_mark(self.device)

    def drain(self) -> None:
        """Wait until all jobs are done, or the generation is over; on CUDA only the current stream
        waits."""
        if self._stream:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        elif self._thread and self._in_flight:
            self._thread.drain()
        self._in_flight = False

    def exposed_s(self) -> float:
        """Return the seconds of communication after the last job of the step was submitted."""
        if self._submitted_at is None or self._done_at is None:
            return 0.0
        return seconds_between(self._submitted_at, self._done_at)

    def close(self) -> None:
        """End the thread; give a job that is blocked by a dead peer five seconds."""
        if self._thread:
            self._thread.close(timeout_s=5)


def time_mark(device: torch.device) -> Any:
    """Return the time now; on CUDA an event in the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two marks; on CUDA wait for the second."""
    if isinstance(start, float):
        return max(0.0, float(end - start))
    end.synchronize()
    return max(0.0, float(start.elapsed_time(end)) / 1000)
