"""Record steps, evaluations and events of a run, on disk first and then in metric backends.

The backends (TensorBoard, Weights & Biases) follow metrics.jsonl and evaluations.jsonl. Each
reports its cursor when it opens and is sent what it lacks, in order, so a backend that was down,
missing or killed loses and duplicates nothing. A failure is logged once; training continues.
"""

import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import ConfigError, DataError, LockstepError, UsageError
from lockstep.files import (
    add_checksum,
    read_json,
    try_lock,
    verify_checksum,
    write_json,
)
from lockstep.log import log
from lockstep.record.backends import (
    Axis,
    Backend,
    Cursor,
    TensorBoard,
    WeightsAndBiases,
    load_backend,
    without_secrets,
)
from lockstep.record.metrics import (
    MAX_STATES,
    FileState,
    LineFollower,
    MetricsFile,
    decode_line,
    find_damage,
    iter_steps,
    last_step,
    to_json_value,
)
from lockstep.record.recorder_lock import RECORDER_LOCK

REMEMBERED_STEPS = 10_000  # newest steps that a rank other than the leader keeps in memory
STATE, STATES = "tracker.json", "metrics"  # file, and its key of the states of metrics.jsonl
LOCK_TIMEOUT_S = 30.0  # for an evaluator that is forwarding its lines when training starts


def numeric_values(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for key, value in values.items():
        scalar = to_json_value(value) if hasattr(value, "item") else value
        if key != "step" and isinstance(scalar, (int, float)) and not isinstance(scalar, bool):
            numbers[key] = scalar
    return numbers


def read_states(state: Mapping[str, Any]) -> list[FileState]:
    """Return the states of metrics.jsonl in tracker.json. ValueError, TypeError."""
    return [FileState(*map(int, fields)) for fields in state.get(STATES, [])]


def metrics_damage(folder: Path, saved_step: int) -> list[str]:
    """Return which steps of a run's metrics.jsonl are missing or were changed, up to its newest
    checkpoint, `saved_step`: later states may belong to a run that has resumed meanwhile."""
    try:
        known = read_states(verify_checksum(read_json(folder / STATE)))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return [f"{STATE} is damaged, so changed lines are not noticed: {error}"]
    return find_damage(folder / "metrics.jsonl", known, saved_step) if known else []


def wait_for_lock(path: Path, timeout_s: float) -> int:
    deadline_s = time.monotonic() + timeout_s
    while (lock := try_lock(path)) is None:
        if time.monotonic() >= deadline_s:
            raise UsageError(
                "another process is recording this run",
                str(path.parent),
                "wait until it has exited, or use another folder",
            )
        time.sleep(0.05)
    return lock


class BackendOptions(NamedTuple):
    """Of Weights & Biases; other backends ignore them."""

    mode: str = "online"
    project: str = "lockstep"


def parse_backends(names: Sequence[str], where: str) -> dict[str, BackendOptions]:
    """Return the options of each backend by name: "tensorboard", "wandb" and "MODULE:CLASS".

    names  as of Session(track=...): also "wandb:offline", "wandb:MODE:PROJECT"
    UsageError for others, and for a second class.
    """
    backends: dict[str, BackendOptions] = {}
    for name in names:
        if match := re.fullmatch(r"wandb(?::(online|offline)(?::(.+))?)?", name):
            project = match[2] or os.environ.get("WANDB_PROJECT", "lockstep")
            backends["wandb"] = BackendOptions(match[1] or "online", project)
        elif name == "tensorboard" or (name.count(":") == 1 and not any(map(is_class, backends))):
            backends[name] = BackendOptions()
        else:
            what = "a second class" if is_class(name) else "no metric backend"
            raise UsageError(
                f"{name!r} is {what}",
                where,
                "give tensorboard, wandb, wandb:offline, or MODULE:CLASS",
            )
    return backends


def is_class(name: str) -> bool:
    return ":" in name


class Tracker(AbstractContextManager["Tracker"]):
    """Records a run on its leader; other ranks remember the newest steps, to take over.

    leader       whether this process records, or a function that returns it: the leader may change
    folder       run folder: {metrics,events,evaluations}.jsonl, tracker.json, tensorboard/, wandb/
    from_step    step at which the run resumes; None: only forward evaluations
    run          resolved configuration, shown in Weights & Biases without secrets
    track        metric backends, as of Session(track=...)

    UsageError when another process records this run; ConfigError for a missing package or login.
    """

    def __init__(
        self,
        folder: Path,
        *,
        leader: bool | Callable[[], bool],
        from_step: int | None,
        run: Mapping[str, Any] | None = None,
        track: Sequence[str] = (),
    ) -> None:
        self.folder, self.run = folder, run or {}
        self.is_leader = leader if callable(leader) else lambda: leader
        self.options = parse_backends(track, "Tracker(track=...)")
        self.evaluations = folder / "evaluations.jsonl"
        self.metrics: MetricsFile | None = None
        self.from_step = from_step
        self.backends: dict[str, Backend] = {}
        # Each open backend was sent the lines up to here; `state` has what it has flushed.
        self.cursors: dict[str, Cursor] = {}
        self.recent_steps: deque[tuple[int, dict[str, Any]]] = deque(maxlen=REMEMBERED_STEPS)
        self.warnings_logged: set[str] = set()
        self.lock: int | None = None
        if self.is_leader():
            folder.mkdir(parents=True, exist_ok=True)
            timeout_s = LOCK_TIMEOUT_S if from_step is not None else 0.0
            self._open_record(wait_for_lock(folder / RECORDER_LOCK, timeout_s), from_step)

    @property
    def leader(self) -> bool:
        return self.lock is not None

    def _open_record(self, lock: int, from_step: int | None, *, verifies: bool = True) -> None:
        """Open files and backends, to continue after `from_step`.
        verifies: refuse a metrics.jsonl that was changed. A run that trains continues."""
        self.lock = lock
        self.from_step = from_step
        try:
            self.state = self._read_state()
            if from_step is not None:
                known = [state for state in read_states(self.state) if state.step <= from_step]
                path = self.folder / "metrics.jsonl"
                self.metrics = MetricsFile(path, from_step, known if verifies else ())
                self._store_states(known if self.metrics.size else [])
            for name in self.options:
                self._open(name)
            self.sync()
        except BaseException:
            self.options.clear()
            self.close(failed=True)
            raise

    def _construct(self, name: str, noted: Cursor) -> Backend:
        if name == "tensorboard":
            return TensorBoard(self.folder, noted, from_step=self.from_step, note=self._store)
        if "wandb_id" not in self.state:  # created once
            self._store("wandb_id", secrets.token_hex(8))
        public: dict[str, Any] = {
            "run": without_secrets(self.run),
            "run_id": str(self.state["wandb_id"]),
        }
        if name == "wandb":
            return WeightsAndBiases(self.folder, noted, **public, **self.options[name]._asdict())
        return load_backend(name)(self.folder, noted, **public)

    def take_over(self, step: int) -> None:
        """If this process has become leader, write the steps that the previous leader did not, and
        record from `step` on. While that leader holds the lock, steps stay in memory."""
        if self.leader or not self.is_leader():
            return
        lock = try_lock(self.folder / RECORDER_LOCK)
        if lock is None:
            self._warn("the previous leader still holds tracker.lock; steps stay in memory")
            return
        path = self.folder / "metrics.jsonl"
        written = last_step(path, below=step)
        self._open_record(lock, written, verifies=False)
        for number, values in self.recent_steps:
            if number == written + 1:
                written = number
                self._record(number, values)
        if written < step - 1:
            self._warn(
                f"the previous leader did not write steps {written + 1} to {step - 1}; "
                f"they are missing in {path}"
            )
            assert self.metrics is not None
            self.metrics.last_step = step - 1
        self.recent_steps.clear()

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Record a committed step, in order: at least loss, tokens and seconds, as numbers."""
        self.take_over(step)
        if self.leader:
            self._record(step, values)
        else:
            self.recent_steps.append((step, dict(values)))

    def _record(self, step: int, values: Mapping[str, Any]) -> None:
        if self.metrics is None:
            raise LockstepError(
                f"step {step} was given to a read-only tracker", str(self.folder), "pass from_step"
            )
        self.metrics.log(step, values)
        for name in list(self.backends):
            self._send_step(name, step, values)

    def forward_evaluations(self) -> None:
        """Send new lines of evaluations.jsonl to the backends, at the step of their checkpoint."""
        if not self.leader:
            return
        try:
            size = self.evaluations.stat().st_size if self.evaluations.exists() else 0
            for name in list(self.backends):
                if size < self.cursors[name].evaluations_bytes:
                    self._warn(
                        f"{self.evaluations} is shorter than what {name} was sent; "
                        "sending it from the start"
                    )
                    self.cursors[name] = replace(self.cursors[name], evaluations_bytes=0)
                self._send_evaluations(name)
        except OSError as error:
            self._warn(
                f"{self.evaluations} cannot be read ({error.strerror}); "
                "training continues, retrying later"
            )

    def sync(self) -> None:
        """Flush to the disk and store the cursors. Call before committing a checkpoint."""
        if not self.leader:
            return
        if self.metrics is not None:
            self.metrics.sync()
            self._store_states(read_states(self.state))
        # Its process cannot be restarted.
        for name in self.options.keys() - self.backends.keys() - {"wandb"}:
            self._open(name)
        self.forward_evaluations()
        for name, backend in list(self.backends.items()):
            try:
                backend.flush()
            except Exception as error:
                self._drop(name, error)
            else:
                self._store(name, asdict(self.cursors[name]))

    def close(self, failed: bool = False) -> None:
        """Send the rest, close all and release the lock. failed: state shown in wandb."""
        if self.recent_steps and not failed:  # the leader failed in the last step
            self.take_over(self.recent_steps[-1][0] + 1)
        if not self.leader or self.lock is None:
            return
        self.sync()
        for name, backend in self.backends.items():
            try:
                backend.close(failed)
            except Exception as error:
                self._warn(f"{name} did not close ({error}); the next start sends what it lacks")
        self.backends.clear()
        if self.metrics is not None:
            self.metrics.close()
        os.close(self.lock)
        self.lock = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(failed=error is not None and not isinstance(error, SystemExit))

    def _open(self, name: str) -> None:
        """Open a backend and send what it lacks. Only ConfigError raises; log other errors."""
        try:
            noted = Cursor(**self.state.get(name, {}))
            backend = self._construct(name, noted)
        except ConfigError:
            raise
        except Exception as error:
            self._warn(
                f"{name} cannot be opened ({error}); "
                "training continues, the next start sends what it lacks"
            )
            return
        self.backends[name] = backend
        self.cursors[name] = cursor = getattr(backend, "cursor", noted)
        path = self.folder / "metrics.jsonl"
        steps = self.metrics.after if self.metrics else partial(iter_steps, path)
        try:
            for line in steps(cursor.step):
                self._send_step(name, line["step"], line)
        except OSError as error:
            self._drop(name, error)
        self.forward_evaluations()

    def _send_step(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        if name in self.backends and step > self.cursors[name].step:
            self._send(name, replace(self.cursors[name], step=step), "train", step, values)

    def _send(
        self, name: str, now: Cursor, axis: Axis, step: int, values: Mapping[str, Any]
    ) -> None:
        now = replace(now, rows=now.rows + 1)
        try:
            self.backends[name].add(axis, step, numeric_values(values), now)
        except Exception as error:
            self._drop(name, error)
        else:
            self.cursors[name] = now

    def _send_evaluations(self, name: str) -> None:
        """Send the lines that `name` lacks; leave a torn last line for later."""
        lines = LineFollower(self.evaluations, self.cursors[name].evaluations_bytes)
        for raw in lines.read():
            if name not in self.backends:
                return
            sent = replace(self.cursors[name], evaluations_bytes=lines.offset)
            line = decode_line(raw) or {}
            step = line.get("step")
            if not isinstance(step, int):
                self._warn(
                    f"{self.evaluations}: skipped a line that is torn or has no step: {raw[:80]!r}"
                )
            elif line.get("split", "validation") == "validation":
                self._send(name, sent, "validation", step, line)
                continue
            self.cursors[name] = sent  # test scores are not for model selection

    def _drop(self, name: str, error: Exception) -> None:
        self._warn(
            f"{name} failed ({type(error).__name__}: {error}); "
            "training continues, what it lacks is sent later"
        )
        backend = self.backends.pop(name)
        try:
            backend.close(failed=True)
        except Exception as close_error:
            log.debug("%s did not close either: %s", name, close_error)

    def _warn(self, problem: str) -> None:
        if problem not in self.warnings_logged:
            self.warnings_logged.add(problem)
            log.warning("%s", problem)

    def _store_states(self, known: list[FileState]) -> None:
        """Store the states of metrics.jsonl: the known ones and the present one."""
        assert self.metrics is not None
        if (state := self.metrics.state()) and state.step and state not in known:
            known = [*known, state]
        if len(known) > MAX_STATES:
            known = known[: MAX_STATES // 2 : 2] + known[MAX_STATES // 2 :]
        self._store(STATES, [list(state) for state in known])

    def _read_state(self) -> dict[str, Any]:
        path = self.folder / STATE
        try:
            state = verify_checksum(read_json(path)) if path.exists() else {}
            read_states(state)
            return state
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path.name} is damaged: {error}",
                str(path),
                "move it aside; the backends are then filled from the start",
            ) from error

    def _store(self, name: str, value: Any) -> None:
        if self.state.get(name) == value:
            return
        self.state[name] = value
        try:
            write_json(self.folder / STATE, add_checksum(self.state))
        except OSError as error:
            self._warn(
                f"{self.folder / STATE} cannot be written ({error.strerror}); training continues"
            )


class BackgroundTracker(AbstractContextManager["BackgroundTracker"]):
    """Runs the methods of a Tracker in a thread, in call order, so that no step waits for a disk.
    The next call, or the end of the block, raises an error of the thread."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._failure: BaseException | None = None

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        self._submit(self.tracker.step, step, dict(values))

    def take_over(self, step: int) -> None:
        self._submit(self.tracker.take_over, step).result()

    def sync(self) -> None:
        """Wait for Tracker.sync. Any thread may call it."""
        self._submit(self.tracker.sync).result()

    def _submit(self, work: Callable[..., None], *args: Any) -> Future[None]:
        def keep_failure(future: Future[None]) -> None:
            self._failure = self._failure or future.exception()

        self._raise()
        future = self._thread.submit(work, *args)
        future.add_done_callback(keep_failure)
        return future

    def _raise(self) -> None:
        if self._failure:
            raise self._failure

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._thread.shutdown()
        if error is None:
            self._raise()
