"""`metrics.jsonl`, the truth about a run: every step stands in it once, however often the run was resumed.

A line is one step. Whoever goes on at step s first cuts away what was written after s (a process that was killed wrote
steps that no checkpoint kept), so a run that was resumed a hundred times has the same lines as one that never stopped.
The cut is one ftruncate() at a line's end: a kill before it leaves the longer file, which the next start cuts again.

Numbers that JSON has no word for are the strings "NaN", "Infinity" and "-Infinity", as in the JSON form of protocol
buffers (protobuf.dev/programming-guides/json); `read` turns them back. Floats are written in their shortest exact form,
so equal bits give equal text.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import DataError, LockstepError
from lockstep.files import regular

log = logging.getLogger("lockstep")

WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
STEP = re.compile(rb'\{"step": (\d+)[,}]')  # how our lines begin; much cheaper than to parse all of a line


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy and torch scalars as numbers, numbers that are not finite as words."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return plain(value.item()) if hasattr(value, "item") else str(value)


def encode(line: Mapping[str, Any]) -> bytes:
    """`line` as one line of valid JSON."""
    return json.dumps(plain(line), ensure_ascii=False, allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The object in `line`, its words as numbers again; None when it is torn or no object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    return {key: WORDS.get(item, item) if isinstance(item, str) else item for key, item in found.items()}


def step_of(line: bytes) -> int | None:
    """The step of a whole line of metrics.jsonl; None when the line is torn or says none."""
    if not line.endswith(b"\n"):
        return None
    if (match := STEP.match(line)) and line.endswith(b"}\n"):
        return int(match[1])
    step = (decode(line) or {}).get("step")
    return step if isinstance(step, int) else None


def offset_after(path: Path, step: int) -> int:
    """Bytes of `path` that hold the steps up to `step`; what follows was written by a process that is gone.

    The file may begin at any step (an earlier part was moved aside). DataError when a step up to `step` is missing,
    torn or doubled. Cost: one pass, about a second for a million lines; the file is never in memory.
    """
    if step == 0:
        return 0
    offset = 0
    last: int | None = None
    with open(path, "rb", opener=regular) as file:
        for number, line in enumerate(file, 1):
            if last == step:
                break
            found = step_of(line)
            if last is None and (found > step if found is not None else not line.endswith(b"\n")):
                break
            if found is None or (last is not None and found != last + 1):
                problem = "is torn" if found is None else f"is step {found}, after step {last}"
                raise gap(path, f"line {number} {problem}", step)
            offset, last = offset + len(line), found
    if last is not None and last < step:
        raise gap(path, f"the last line is step {last}", step)
    return offset


def gap(path: Path, problem: str, step: int) -> DataError:
    return DataError(
        f"the metrics do not reach step {step}, at which the run goes on: {problem}",
        str(path),
        f"go on from an earlier checkpoint, or move {path.name} aside: a new one then begins at step {step + 1}",
    )


def last_newline(path: Path) -> int:
    """Bytes of `path` up to and with its last newline: what remains when a torn last line is cut away."""
    with open(path, "rb", opener=regular) as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            if (at := file.read(end - start).rfind(b"\n")) >= 0:
                return start + at + 1
            end = start
    return 0


def last_step(path: Path, below: int) -> int:
    """The last step under `below` up to which `path` has every one; 0 when it has none. It may begin at any step."""
    last = 0
    for line in stream(path):
        if line["step"] >= below or (last and line["step"] != last + 1):
            break
        last = line["step"]
    return last


def stream(path: Path, after: int = 0) -> Iterator[dict[str, Any]]:
    """The lines of `path` with a step above `after`, in order; none when there is no file. A torn line is left out."""
    if not path.exists():
        return
    with open(path, "rb", opener=regular) as file:
        for line in file:
            step = step_of(line)
            if step is not None and step > after and (found := decode(line)) is not None:
                yield found


def read(path: Path) -> list[dict[str, Any]]:
    """Every step of a metrics.jsonl as a dictionary; a torn last line is left out."""
    return list(stream(path))


class Lines:
    """A file of lines with one writer that outlasts a full disk: lines that cannot be written wait in memory, in order.

    An `add` is one write() of whole lines. One that fails or stops half-way is taken back (the file is cut to its last
    whole line) and tried again with the next line. The failure is logged once, and so is its end.
    keep_bytes  what is cut away when the file is longer
    """

    def __init__(self, path: Path, keep_bytes: int) -> None:
        self.path, self.size = path, keep_bytes
        self.waiting: deque[bytes] = deque()
        self.problem = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor: int | None = self._open()

    def _open(self) -> int:
        """Open the file, cut to what is known to be whole."""
        descriptor = regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            if os.fstat(descriptor).st_size > self.size:
                os.ftruncate(descriptor, self.size)
                os.fsync(descriptor)
            self.size = os.fstat(descriptor).st_size
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def add(self, line: Mapping[str, Any]) -> None:
        """Append `line`, after what still waits. Never raises for the disk's sake."""
        self.waiting.append(encode(line))
        self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if not self.waiting:
            return
        data = b"".join(self.waiting)
        try:
            if self.descriptor is None:
                self.descriptor = self._open()
            if (written := os.write(self.descriptor, data)) < len(data):
                raise OSError(None, f"{written} of {len(data)} bytes were written; the disk may be full")
        except OSError as error:
            self._fail(error)
            return
        if self.problem:
            log.warning("%s can be written again; nothing is missing (%d lines had waited)", self.path, len(self.waiting))
        self.problem = ""
        self.waiting.clear()
        self.size += len(data)

    def _fail(self, error: OSError) -> None:
        if not self.problem:
            log.warning("%s cannot be written (%s); training goes on, its lines wait in memory", self.path, error.strerror)
        self.problem = str(error.strerror)
        if self.descriptor is None:
            return
        # Cut at once, so that no reader sees half a line; opened anew at the next try, to find a disk mounted again.
        try:
            os.ftruncate(self.descriptor, self.size)
        except OSError as again:
            log.debug("%s is cut to its last whole line later: %s", self.path, again)
        os.close(self.descriptor)
        self.descriptor = None

    def sync(self) -> None:
        """Write what waits and flush the file to the disk, so that it outlives a power cut."""
        self.flush()
        try:
            if self.descriptor is not None:
                os.fsync(self.descriptor)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Flush to the disk and close; says so when lines are lost."""
        self.sync()
        if self.waiting:
            log.error("%s: its last %d lines are lost (%s)", self.path, len(self.waiting), self.problem)
            self.waiting.clear()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Metrics:
    """A run's `metrics.jsonl`: every committed step once, in order.

    path       the file; made when it is missing
    from_step  where the run goes on (the step of its checkpoint, 0 for a new run); later lines are cut away
    DataError when a step up to `from_step` is missing: the file would have a hole for ever. One process at a time.
    """

    def __init__(self, path: Path, from_step: int) -> None:
        self.path, self.last = path, from_step
        try:
            self.lines = Lines(path, offset_after(path, from_step) if path.exists() else 0)
        except DataError:
            raise
        except OSError as error:
            hint = "give a folder that this user can write"
            raise DataError(f"metrics cannot be written: {error.strerror}", str(path), hint) from error

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the line of `step`, which must follow the last one. A full disk never raises: the line waits."""
        if step != self.last + 1:
            hint = "log every step once, in order"
            raise LockstepError(f"step {step} was logged after step {self.last}", str(self.path), hint)
        self.lines.add({"step": step, **values})
        self.last = step

    def sync(self) -> None:
        """Make the lines durable: before a checkpoint is committed, so that none is ever ahead of its metrics."""
        self.lines.sync()

    def after(self, step: int) -> Iterator[dict[str, Any]]:
        """The lines above `step`, those that wait in memory included."""
        self.lines.flush()
        yield from stream(self.path, step)
        yield from (line for line in map(decode, self.lines.waiting) if line is not None and line["step"] > step)

    def close(self) -> None:
        self.lines.close()
