"""metrics.jsonl: one line per committed step, the source of truth for a run's metrics.

A process that resumes at step s first truncates what follows s (steps of a killed process that no
checkpoint has), so a resumed run has the same lines as an uninterrupted one. The truncation is one
ftruncate(); if the process is killed first, the next start does it.

tracker.json has the size and the crc32 of the file at each checkpoint (`FileState`), so a line that
was changed, lost or exchanged since is noticed.

NaN and infinities are strings, as in the JSON form of protocol buffers; readers convert them back.
Floats have their shortest exact form: equal bits give equal text.
"""

import json
import math
import os
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import DataError, LockstepError
from lockstep.files import open_regular, parse_json
from lockstep.log import log
from lockstep.units import MAX_NAMES

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
MAX_STATES = 64  # kept of a file; the older half is thinned
STEP = re.compile(rb'\{"step": (\d+)[,}]')  # start of our lines: much faster than parsing the line


class FileState(NamedTuple):
    """The state of metrics.jsonl when a checkpoint was committed."""

    step: int  # of the last line; of an empty file: at which the run resumed
    bytes: int
    crc: int  # crc32 of these bytes


def to_json_value(value: Any) -> Any:
    """Convert to JSON types: NumPy and torch scalars to numbers, non-finite numbers to strings."""
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        infinity = "Infinity" if value > 0 else "-Infinity"
        return "NaN" if math.isnan(value) else infinity
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return to_json_value(value.item()) if hasattr(value, "item") else str(value)


def encode_line(line: Mapping[str, Any]) -> bytes:
    """Encode one line. A name of a file that is not UTF-8 has lone surrogates: they become "?"."""
    return (
        json.dumps(to_json_value(line), ensure_ascii=False, allow_nan=False).encode(
            errors="replace"
        )
        + b"\n"
    )


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Decode one line, with non-finite numbers; None when it is torn or damaged, or not an
    object."""
    try:
        value = parse_json(line.decode())
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    return {
        key: NON_FINITE.get(item, item) if isinstance(item, str) else item
        for key, item in value.items()
    }


def step_of(line: bytes) -> int | None:
    """Return the step of a line; None when the line is torn or has none."""
    if not line.endswith(b"\n"):
        return None
    if (match := STEP.match(line)) and line.endswith(b"}\n"):
        return int(match[1])
    step = (decode_line(line) or {}).get("step")
    return step if isinstance(step, int) else None


def state_after(path: Path, step: int, known: Iterable[FileState] = ()) -> FileState:
    """Return the state of the file up to `step`.

    The file may start at any step (an earlier part was moved aside). DataError when a step up to
    `step` is missing, torn or repeated, or the file is not as it was at a known state. One pass in
    constant memory, about 1 s per million lines.
    """
    if step == 0:
        return FileState(0, 0, 0)
    offset = crc = 0
    last: int | None = None
    checks = StateChecks(state for state in known if state.step <= step)
    with open(path, "rb", opener=open_regular) as file:
        for number, line in enumerate(file, 1):
            if last == step:
                break
            current = step_of(line)
            if last is None and (
                current > step if current is not None else not line.endswith(b"\n")
            ):
                break
            if current is None or (last is not None and current != last + 1):
                problem = "is torn" if current is None else f"is step {current}, after step {last}"
                raise missing_steps_error(path, f"line {number} {problem}", step)
            offset += len(line)
            last = current
            crc = zlib.crc32(line, crc)
            checks.pass_line(FileState(current, offset, crc))
    if last is not None and last < step:
        raise missing_steps_error(path, f"the last line is step {last}", step)
    if problem := checks.problem():
        raise DataError(
            f"the metrics up to step {step}, at which the run resumes, were changed: {problem}",
            str(path),
            f"restore the file, or move {path.name} aside: the new file starts at step {step + 1}",
        )
    return FileState(step, offset, crc)


class StateChecks:
    """Compares a file, line by line, with the states that it had."""

    def __init__(self, known: Iterable[FileState]) -> None:
        self.expected = deque(sorted(state for state in known if state.bytes))
        self.last = 0  # step up to which the file is as it was
        self.changed = False

    def pass_line(self, state: FileState) -> None:
        """state: of the file up to the end of a line"""
        while not self.changed and self.expected and self.expected[0].bytes <= state.bytes:
            self.changed = self.expected[0][1:] != state[1:]
            if not self.changed:
                self.last = self.expected.popleft().step

    def problem(self) -> str:
        """Return what differs, "" if nothing does. Call it after the last line."""
        if not self.expected:
            return ""
        differs = "was changed after it was written" if self.changed else "is missing"
        return f"a line of steps {self.last + 1} to {self.expected[0].step} {differs}"


def find_damage(path: Path, known: Iterable[FileState], saved_step: int) -> list[str]:
    """Return which steps of a file are missing or were changed, up to the newest checkpoint."""
    known = [state for state in known if state.step <= saved_step]
    checks = StateChecks(known)
    problems = list[str]()
    offset = 0
    crc = 0
    # An earlier part was moved aside.
    last = next((state.step for state in known if not state.bytes), 0)
    for line in read_lines(path):
        offset += len(line)
        crc = zlib.crc32(line, crc)
        step = step_of(line)
        if step is None:
            continue
        if step > last + 1 and len(problems) < MAX_NAMES:
            problems.append(missing_steps(last + 1, step - 1))
        last = max(last, step)
        checks.pass_line(FileState(step, offset, crc))
    if last < saved_step:
        problems.append(missing_steps(last + 1, saved_step))
    return problems or list(filter(None, [checks.problem()]))


def missing_steps(first: int, last: int) -> str:
    return (
        f"step {first:,} is missing"
        if first == last
        else f"steps {first:,} to {last:,} are missing"
    )


def missing_steps_error(path: Path, problem: str, step: int) -> DataError:
    return DataError(
        f"the metrics do not reach step {step}, at which the run resumes: {problem}",
        str(path),
        f"resume from an earlier checkpoint, or move {path.name} aside: "
        f"the new file starts at step {step + 1}",
    )


def last_newline(path: Path) -> int:
    """Return the size of `path` up to its last newline, without a torn last line."""
    with open(path, "rb", opener=open_regular) as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            if (at := file.read(end - start).rfind(b"\n")) >= 0:
                return start + at + 1
            end = start
    return 0


def append_json(path: Path, values: Mapping[str, Any]) -> None:
    """Append a line in one write, so that lines of several processes do not interleave (O_APPEND).
    End a line that a killed writer left torn."""
    torn = path.exists() and last_newline(path) < path.stat().st_size
    with open(path, "ab", buffering=0, opener=open_regular) as file:
        file.write(b"\n" * torn + encode_line(values))


def last_step(path: Path, below: int) -> int:
    """Return the last step below `below` before the first gap; 0 when there is none."""
    last = 0
    for line in iter_steps(path):
        if line["step"] >= below or (last and line["step"] != last + 1):
            break
        last = line["step"]
    return last


def iter_steps(path: Path, after: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the lines of `path` with steps above `after`; skip torn lines. No file: no lines."""
    for line in read_lines(path):
        step = step_of(line)
        if step is not None and step > after and (values := decode_line(line)) is not None:
            yield values


def read_lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with open(path, "rb", opener=open_regular) as file:
            yield from file


class LineFollower:
    """Reads the lines that were appended to a file since the last call.

    offset      of the first line to read
    tail_bytes  begin with the last lines of this size; None: at `offset`
    A line without its end is left for the next call. A shorter file is read from the start.
    """

    def __init__(self, path: Path, offset: int = 0, *, tail_bytes: int | None = None) -> None:
        self.path = path
        self.tail_bytes = tail_bytes
        self.offset = offset
        self.bytes_read = 0

    def read(self) -> Iterator[bytes]:
        if not self.path.exists():
            return
        with open(self.path, "rb", opener=open_regular) as file:
            size = os.fstat(file.fileno()).st_size
            self.offset = self.offset if self.offset <= size else 0
            if self.tail_bytes and not self.offset and size > self.tail_bytes:
                file.seek(size - self.tail_bytes)
                self.offset = size - self.tail_bytes + len(file.readline())
            file.seek(self.offset)
            for line in file:
                if line.endswith(b"\n"):
                    self.offset += len(line)
                    self.bytes_read += len(line)
                    yield line


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return list(iter_steps(path))


class MetricsFile:
    """Writer of metrics.jsonl: every committed step once, in order. One process at a time.

    from_step  step at which the run resumes (0 for a new run); later lines are truncated, and a
               warning names the first repeated step whose loss is another one
    known      states of the file, to be compared up to `from_step`
    A failed or partial write is undone by a truncation, and its lines stay in memory until a later
    step writes them: a full disk loses nothing. DataError when a step up to `from_step` is missing.
    """

    def __init__(self, path: Path, from_step: int, known: Iterable[FileState] = ()) -> None:
        self.path, self.last_step = path, from_step
        self.pending: deque[bytes] = deque()
        self.problem = ""
        try:
            state = (
                state_after(path, from_step, known) if path.exists() else FileState(from_step, 0, 0)
            )
            self.earlier = {line["step"]: line.get("loss") for line in iter_steps(path, from_step)}
            self.size, self.crc = state.bytes, state.crc
            path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor: int | None = self._open()
        except DataError:
            raise
        except OSError as error:
            raise DataError(
                f"metrics cannot be written: {error.strerror}",
                str(path),
                "use a folder with write permission",
            ) from error

    def _open(self) -> int:
        """Open the file and truncate it to its known size."""
        descriptor = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            if os.fstat(descriptor).st_size > self.size:
                os.ftruncate(descriptor, self.size)
                os.fsync(descriptor)
            self.size = os.fstat(descriptor).st_size
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the line of `step`, which must follow the last. Does not raise on a full disk."""
        if step != self.last_step + 1:
            raise LockstepError(
                f"step {step} was logged after step {self.last_step}",
                str(self.path),
                "log every step once, in order",
            )
        self._compare_with_earlier(step, to_json_value(values.get("loss")))
        self.pending.append(encode_line({"step": step, **values}))
        self._write_pending()
        self.last_step = step

    def _compare_with_earlier(self, step: int, loss: Any) -> None:
        before = self.earlier.pop(step, None)
        if before is not None and str(before) != str(loss):
            self.earlier.clear()
            log.warning(
                "step %d is repeated with loss %s, and had %s before this start: data, "
                "code or values differ, or something that decides the loss is in no checkpoint",
                *(step, loss, before),
            )

    def _write_pending(self) -> None:
        if not self.pending:
            return
        data = b"".join(self.pending)
        try:
            if self.descriptor is None:
                self.descriptor = self._open()
            if (written := os.write(self.descriptor, data)) < len(data):
                raise OSError(
                    None, f"only {written} of {len(data)} bytes were written; the disk may be full"
                )
        except OSError as error:
            self._fail(error)
            return
        if self.problem:
            log.warning(
                "%s can be written again; %d lines were pending, none is missing",
                self.path,
                len(self.pending),
            )
        self.problem = ""
        self.pending.clear()
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def _fail(self, error: OSError) -> None:
        if not self.problem:
            log.warning(
                "%s cannot be written (%s); training continues, its lines stay in memory",
                self.path,
                error.strerror,
            )
        self.problem = str(error.strerror)
        if self.descriptor is None:
            return
        # Truncate now: no reader sees a partial line. Reopen later, for a remounted disk.
        try:
            os.ftruncate(self.descriptor, self.size)
        except OSError as truncate_error:
            log.debug("%s is truncated to its last whole line later: %s", self.path, truncate_error)
        os.close(self.descriptor)
        self.descriptor = None

    def sync(self) -> None:
        """Flush to the disk: a committed checkpoint must not be ahead of its metrics."""
        self._write_pending()
        try:
            if self.descriptor is not None:
                os.fsync(self.descriptor)
        except OSError as error:
            self._fail(error)

    def state(self) -> FileState | None:
        """Return the state of the file; None while lines are pending."""
        return None if self.pending else FileState(self.last_step, self.size, self.crc)

    def after(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield the lines above `step`, including those pending in memory."""
        self._write_pending()
        yield from iter_steps(self.path, step)
        yield from (
            line
            for line in map(decode_line, self.pending)
            if line is not None and line["step"] > step
        )

    def close(self) -> None:
        self.sync()
        if self.pending:
            log.error(
                "%s: its last %d lines are lost (%s)", self.path, len(self.pending), self.problem
            )
            self.pending.clear()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
