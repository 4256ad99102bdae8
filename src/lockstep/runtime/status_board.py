"""What a worker is doing now, where its agent and its own member thread read it without its help.

SLOT.board (seat.py has the folder) is a little memory shared through a file, mmap(2). The worker writes it; it can be read while the worker
is stopped, spins with Python's lock in its hands, or has just died.

Records go into two places in turn, each with its number and a checksum, and a reader takes the newer one that is whole. So there is one at
every instant, even when the writer was stopped or killed in the middle of the other, and nothing rests on the order in which one processor
sees the stores of another.
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

# In the order of a run and of its loop.
Phase = Literal[
    "idle",  # stands by, in no generation
    "starting",
    "waiting for others",  # until enough are there
    "joining",  # a generation: forming its group, sending or receiving the state
    "preparing",  # the run's data, while the others wait
    "compiling",
    "data",
    "forward",
    "backward",
    "reducing",  # its own gradients are done, the sum over all is not
    "voting",
    "updating",
    "saving",
    "evaluating",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
NUMBERS = {phase: number for number, phase in enumerate(PHASES)}

BODY = struct.Struct("=QiqqqBqqqqd")  # number, pid, generation, its first step, step, phase, collective, bytes, since, moved, median step
CHECK = struct.Struct("=I")
PLACE_BYTES = BODY.size + CHECK.size


@dataclass(frozen=True)
class Doing:
    """What a worker was doing when somebody looked.

    step              the one it is at, from 1; while it saves or evaluates, the one that it has done
    first_step        whether it is still in its generation's first step
    collective        the newest collective that it has entered, counted from 1 in each generation
    collective_bytes  what it brought to that one; 0: it did not say
    since_s           seconds since the phase began, by its host's CLOCK_MONOTONIC
    moved_s           seconds since it entered a phase or a collective
    step_s            median seconds of its newest steps; 0.0 before it has done one
    """

    pid: int
    generation: int
    step: int
    phase: Phase
    first_step: bool = False
    collective: int = 0
    collective_bytes: int = 0
    since_s: float = 0.0
    moved_s: float = 0.0
    step_s: float = 0.0

    def after(self, seconds: float) -> Doing:
        """The same, `seconds` after somebody looked, as long as nothing newer is known."""
        return replace(self, since_s=self.since_s + seconds, moved_s=self.moved_s + seconds)


class Board:
    """This worker's board at `path`; None: one that nobody reads.

    The file is a new one: a process that still writes to an older one at this path disturbs nobody. OSError when it cannot be made.
    Methods may be called from any thread, though not from a signal handler. Each costs about a microsecond.
    """

    def __init__(self, path: Path | None) -> None:
        self.pid = os.getpid()
        self.phase: Phase = "starting"
        self.generation, self.step, self.collective_number, self.collective_bytes = 0, 0, 0, 0
        self._first_step = -1  # not known yet
        self._step_began_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=15)
        self._median_s = 0.0
        self._since_ns = self._number = 0
        self._lock = Lock()
        if path is None:
            self._memory = mmap.mmap(-1, 2 * PLACE_BYTES)
            return
        beside = path.with_name(f".{path.name}.{self.pid}")
        with open(beside, "w+b") as file:
            file.write(bytes(2 * PLACE_BYTES))  # not truncate(): on a full disk the first store into a hole would be a SIGBUS
            file.flush()
            self._memory = mmap.mmap(file.fileno(), 2 * PLACE_BYTES)
        self.enter("starting")
        os.replace(beside, path)

    def enter(self, phase: Phase, step: int | None = None, *, generation: int | None = None) -> None:
        """Begin `phase`, of `step` where that is another one than before, as a member of `generation` likewise."""
        now_ns = time.monotonic_ns()
        with self._lock:
            if generation is not None:
                self.generation, self._first_step, self.collective_number, self.collective_bytes = generation, -1, 0, 0
            if step is not None:
                self._come_to(step, now_ns)
            self.phase, self._since_ns = phase, now_ns
            self._write(now_ns)

    def collective(self, size_bytes: int = 0) -> None:
        """Enter the next collective of this generation, with a tensor of `size_bytes` where that must be the same for all."""
        now_ns = time.monotonic_ns()
        with self._lock:
            self.collective_number += 1
            self.collective_bytes = size_bytes
            self._write(now_ns)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Be in `phase` for the block, and in the phase of before after it."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def tell_of_compiling(self) -> None:
        """Be in the phase "compiling" from now on whenever torch.compile is at work: in any pass, with any new shape, for minutes."""
        from torch._dynamo.callback import on_compile_end, on_compile_start  # here: an agent reads boards, and imports no torch

        before: list[Phase] = []

        def begin(_: object) -> None:
            before.append(self.phase)
            self.enter("compiling")

        on_compile_start(begin)
        on_compile_end(lambda _: self.enter(before.pop()))

    def _come_to(self, step: int, now_ns: int) -> None:
        if self._first_step < 0:
            self._first_step = step
        if step == self.step:
            return
        if step == self.step + 1 and self._step_began_ns:
            self._steps_ns.append(now_ns - self._step_began_ns)
            self._median_s = statistics.median(self._steps_ns) / 1e9
        self.step, self._step_began_ns = step, now_ns

    def _write(self, now_ns: int) -> None:
        self._number += 1
        body = BODY.pack(
            self._number,
            self.pid,
            self.generation,
            self._first_step,
            self.step,
            NUMBERS[self.phase],
            self.collective_number,
            self.collective_bytes,
            self._since_ns,
            now_ns,
            self._median_s,
        )
        begin = self._number % 2 * PLACE_BYTES
        self._memory[begin : begin + PLACE_BYTES] = body + CHECK.pack(crc32(body))


def look(path: Path) -> Doing:
    """What the worker that writes to `path` is doing. OSError when there is no board."""
    for _ in range(100):  # both places are torn only when the writer got around twice while they were read
        raw, now_ns = read_bytes(path), time.monotonic_ns()
        if len(raw) != 2 * PLACE_BYTES:
            break
        bodies = [body for body in (whole(raw[:PLACE_BYTES]), whole(raw[PLACE_BYTES:])) if body]
        if bodies:
            return read(max(bodies, key=lambda body: int(BODY.unpack(body)[0])), now_ns)
    raise OSError(None, f"{path} is no board")


def whole(place: bytes) -> bytes | None:
    """The body of the record in `place`; None while it is being written."""
    body = place[: BODY.size]
    return body if CHECK.unpack(place[BODY.size :])[0] == crc32(body) else None


def read(body: bytes, now_ns: int) -> Doing:
    """A record's body, as it stands at `now_ns`."""
    _, pid, generation, first_step, step, phase, collective, size_bytes, since_ns, moved_ns, median_s = BODY.unpack(body)
    return Doing(
        pid,
        generation,
        step,
        PHASES[phase],
        first_step < 0 or step <= first_step,
        collective,
        size_bytes,
        max(0, now_ns - since_ns) / 1e9,
        max(0, now_ns - moved_ns) / 1e9,
        median_s,
    )
