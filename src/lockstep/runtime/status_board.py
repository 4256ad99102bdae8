"""Shared-memory status of a worker, readable by its agent and membership thread without its help.

SLOT.board in the state folder (worker_env.py) is a small file mapped with mmap(2), readable while
the worker is stopped, holds the GIL, or has just died. Two records alternate, each with a sequence
number and a checksum; a reader takes the newer valid one. So one record is always valid, even if
the writer was killed while it wrote the other.
"""

from __future__ import annotations

import mmap
import os
import statistics
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Literal, get_args
from zlib import crc32

from lockstep.files import read_bytes

# In the order of a run and of its training loop.
Phase = Literal[
    "starting",
    "joining",  # a generation: forms the process group, sends or receives the training state
    "preparing",  # prepares data or loads a state while the others wait
    "compiling",
    "data",
    "forward",
    "backward",
    "reducing",  # waits for the gradient reduction after its backward pass
    "voting",
    "updating",
    "saving",
    "evaluating",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
PHASE_NUMBERS = {phase: number for number, phase in enumerate(PHASES)}

# Number, pid, generation, first step, step, phase, collective, bytes, since, moved, median step.
BODY = struct.Struct("=QiqqqBqqqqd")
CHECK = struct.Struct("=I")
RECORD_BYTES = BODY.size + CHECK.size


@dataclass(frozen=True)
class Status:
    """Status of a worker at the time of the read."""

    pid: int
    generation: int
    step: int  # current step, from 1; while it saves or evaluates, the last completed step
    phase: Phase
    first_step: bool = False  # whether this is the first step of its generation
    collective: int = 0  # number of the newest collective it entered, from 1 in each generation
    collective_bytes: int = 0  # size of its tensor in that collective; 0: unknown
    since_s: float = 0.0  # seconds since it entered the phase, by CLOCK_MONOTONIC of its host
    moved_s: float = 0.0  # seconds since it entered a phase or a collective
    step_s: float = 0.0  # median seconds of its newest steps; 0.0 before the first

    def after(self, seconds: float) -> Status:
        return replace(self, since_s=self.since_s + seconds, moved_s=self.moved_s + seconds)


class StatusBoard:
    """Writer of this worker's status at `path`; None: in private memory.
    It creates a new file: an older process may still write to the old one. OSError if that fails.
    Methods are thread-safe, but must not be called from a signal handler. Each takes about 1 us."""

    def __init__(self, path: Path | None) -> None:
        self.pid = os.getpid()
        self.phase: Phase = "starting"
        self.generation = 0
        self.step = 0
        self.collective_number = 0
        self.collective_bytes = 0
        self._first_step = -1  # unknown
        self._step_start_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=15)
        self._median_s = 0.0
        self._since_ns = self._number = 0
        self._lock = Lock()
        if path is None:
            self._memory = mmap.mmap(-1, 2 * RECORD_BYTES)
            return
        temporary = path.with_name(f".{path.name}.{self.pid}")
        with open(temporary, "w+b") as file:
            # Not truncate(): a store into a hole raises SIGBUS on a full disk.
            file.write(bytes(2 * RECORD_BYTES))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), 2 * RECORD_BYTES)
        self.enter("starting")
        os.replace(temporary, path)

    def enter(
        self, phase: Phase, step: int | None = None, *, generation: int | None = None
    ) -> None:
        now_ns = time.monotonic_ns()
        with self._lock:
            if generation is not None:
                self.generation = generation
                self._first_step = -1
                self.collective_number = 0
                self.collective_bytes = 0
            if step is not None:
                self._set_step(step, now_ns)
            self.phase, self._since_ns = phase, now_ns
            self._write(now_ns)

    def enter_collective(self, size_bytes: int = 0) -> None:
        """Count a collective. size_bytes: of its tensor, if it must be equal on all ranks."""
        now_ns = time.monotonic_ns()
        with self._lock:
            self.collective_number += 1
            self.collective_bytes = size_bytes
            self._write(now_ns)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in `phase` for the block; restore the phase before it."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def _set_step(self, step: int, now_ns: int) -> None:
        if self._first_step < 0:
            self._first_step = step
        if step == self.step:
            return
        if step == self.step + 1 and self._step_start_ns:
            self._steps_ns.append(now_ns - self._step_start_ns)
            self._median_s = statistics.median(self._steps_ns) / 1e9
        self.step, self._step_start_ns = step, now_ns

    def _write(self, now_ns: int) -> None:
        self._number += 1
        place = self.pid, self.generation, self._first_step, self.step, PHASE_NUMBERS[self.phase]
        collective = self.collective_number, self.collective_bytes
        body = BODY.pack(self._number, *place, *collective, self._since_ns, now_ns, self._median_s)
        start = self._number % 2 * RECORD_BYTES
        self._memory[start : start + RECORD_BYTES] = body + CHECK.pack(crc32(body))


def read_status(path: Path) -> Status:
    """Return the status of the worker that writes to `path`. OSError when there is no board."""
    for _ in range(100):  # both records are torn only if the writer wrote twice during the read
        raw, now_ns = read_bytes(path), time.monotonic_ns()
        if len(raw) != 2 * RECORD_BYTES:
            break
        halves = raw[:RECORD_BYTES], raw[RECORD_BYTES:]
        bodies = list(filter(None, map(valid_body, halves)))
        if bodies:
            (
                _,
                pid,
                generation,
                first_step,
                step,
                phase,
                collective,
                size_bytes,
                since_ns,
                moved_ns,
                step_s,
            ) = max(map(BODY.unpack, bodies))
            is_first = first_step < 0 or step <= first_step
            since_s, moved_s = max(0, now_ns - since_ns) / 1e9, max(0, now_ns - moved_ns) / 1e9
            return Status(
                pid,
                generation,
                step,
                PHASES[phase],
                is_first,
                collective,
                size_bytes,
                since_s,
                moved_s,
                step_s,
            )
    raise OSError(None, f"{path} is not a status board")


def valid_body(record: bytes) -> bytes | None:
    body = record[: BODY.size]
    return body if CHECK.unpack(record[BODY.size :])[0] == crc32(body) else None
