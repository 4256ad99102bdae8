"""The record of a run: its steps, evaluations and events, on disk first and then wherever people look.

metrics.jsonl (`record/metrics.py`) is the truth; TensorBoard and Weights & Biases (`record/backends.py`) only follow it. Each sink knows
how far it has come and is sent what it lacks, in order, when it opens. So a sink that was down, absent or killed loses
nothing and doubles nothing, and no sink can stop the training: a failure is said once, and the lines stay on disk.

evaluations.jsonl is the same for evaluations. Another process may write it (`lockstep evaluate`), so the tracker looks
for new lines and passes them on. events.jsonl is a diary: it has every start, however often.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

from lockstep.errors import ConfigError, DataError, LockstepError, UsageError
from lockstep.files import append_line, read_json, regular, try_lock, write_json
from lockstep.record.backends import Held, Opener, Sink, TensorBoard, WeightsAndBiases
from lockstep.record.events import note
from lockstep.record.metrics import Metrics, decode, encode, last_newline, last_step, plain, stream

log = logging.getLogger("lockstep")


REMEMBERED = 10_000  # steps that another than the leader keeps in memory


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn over the steps: the numbers among `values`, less the step itself."""
    known = {key: plain(value) if hasattr(value, "item") else value for key, value in values.items() if key != "step"}
    return {key: value for key, value in known.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}


def take_lock(path: Path, patience_s: float) -> int:
    """The descriptor that holds the lock on `path`. UsageError when another process still holds it after `patience_s`."""
    give_up_s = time.monotonic() + patience_s
    while (lock := try_lock(path)) is None:
        if time.monotonic() >= give_up_s:
            hint = "wait until it has ended, or give another folder"
            raise UsageError("another process keeps the record of this run", str(path.parent), hint)
        time.sleep(0.05)
    return lock


class Tracker:
    """The record of a run, kept by its global leader; every other rank only remembers the last steps, should it become the leader.

    leader       whether this process keeps the record: it may come to, when the leader before it is lost
    folder       the run's: metrics.jsonl, events.jsonl, evaluations.jsonl, tracker.json, tensorboard/, wandb/
    from_step    where the run goes on; None to pass evaluations on without training, metrics.jsonl is then only read
    run          its resolved values, shown in Weights & Biases, but for those named like a secret
    tensorboard, wandb, project     as in the section [track] of a run
    patience_s   how long a training waits for an evaluator that is just passing its lines on

    Steps that a resumed run does again: TensorBoard forgets the first time (purge_step); Weights & Biases cannot, so it
    keeps the first values and is not sent the second, which have the same bits as long as the run's promise holds.
    UsageError when another process keeps this record; ConfigError when a package is missing or nobody is logged in.
    """

    def __init__(
        self,
        folder: Path,
        *,
        leader: bool | Callable[[], bool],
        from_step: int | None,
        run: Mapping[str, Any] | None = None,
        tensorboard: bool = False,
        wandb: Literal["off", "offline", "online"] = "off",
        project: str = "lockstep",
        patience_s: float = 30.0,
    ) -> None:
        self.folder, self.from_step, self.run, self.patience_s = folder, from_step, run or {}, patience_s
        self.leads = leader if callable(leader) else lambda: leader
        self.sinks_wanted: tuple[bool, str, str] = (tensorboard, wandb, project)
        self.evaluations = folder / "evaluations.jsonl"
        self.metrics: Metrics | None = None
        self.openers: dict[str, Opener] = {}
        self.sinks: dict[str, Sink] = {}
        self.at: dict[str, Held] = {}  # what each open sink was sent; `notes` has what it surely holds
        self.unwritten: deque[dict[str, Any]] = deque()
        self.recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=REMEMBERED)
        self.warned: set[str] = set()
        self.lock: int | None = None
        if self.leads():
            folder.mkdir(parents=True, exist_ok=True)
            self._keep(take_lock(folder / "tracker.lock", patience_s if from_step is not None else 0.0), from_step)

    @property
    def leader(self) -> bool:
        """Whether this process keeps the record now."""
        return self.lock is not None

    def _keep(self, lock: int, from_step: int | None) -> None:
        """Open the record, to go on after `from_step`."""
        folder, (tensorboard, wandb, project) = self.folder, self.sinks_wanted
        self.lock = lock
        try:
            self.notes = self._read_notes()
            self.metrics = Metrics(folder / "metrics.jsonl", from_step) if from_step is not None else None
            self.evaluated = {(line["step"], frozenset(line)) for line in stream(self.evaluations)}
            if tensorboard:
                self.openers["tensorboard"] = partial(TensorBoard, folder, from_step=from_step, note=self._note)
            if wandb != "off":
                mode = cast(Literal["offline", "online"], wandb)
                self.openers["wandb"] = partial(WeightsAndBiases, folder, mode=mode, project=project, run=self.run, run_id=self._wandb_id())
            for name in self.openers:
                self._open(name)
            self.sync()
        except BaseException:
            self.openers.clear()
            self.close(failed=True)
            raise

    def take_over(self, step: int) -> None:
        """Where this process leads, keep the record from `step` on, in the place of a leader that is gone.

        What that one did not write is still remembered here. While it is only stopped and holds the lock, the steps wait in memory.
        """
        if self.leader or not self.leads():
            return
        lock = try_lock(self.folder / "tracker.lock")
        if lock is None:
            self._warn("the leader before this one still holds the record; the steps wait in memory")
            return
        path = self.folder / "metrics.jsonl"
        written = last_step(path, below=step)
        self._keep(lock, written)
        for one, values in self.recent:
            if one == written + 1:
                written = one
                self._record(one, values)
        if written < step - 1:
            self._warn(f"steps {written + 1} to {step - 1} were not written by the leader before; they are missing in {path}")
            assert self.metrics is not None
            self.metrics.last = step - 1
        self.recent.clear()

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Record a committed step: at least loss, tokens and seconds, as Python numbers. Steps come in order."""
        self.take_over(step)
        if self.leader:
            self._record(step, values)
        else:
            self.recent.append((step, dict(values)))

    def _record(self, step: int, values: Mapping[str, Any]) -> None:
        if self.metrics is None:
            raise LockstepError(f"step {step} came to a tracker that only reads", str(self.folder), "give it from_step")
        self.metrics.log(step, values)
        for name in list(self.sinks):
            self._send_step(name, step, values)

    def validation(self, step: int, values: Mapping[str, Any]) -> None:
        """Record an evaluation that this process made. One that was recorded (the step is done again) is left out."""
        if not self.leader or (step, frozenset({"step", *values})) in self.evaluated:
            return
        self.evaluated.add((step, frozenset({"step", *values})))
        self.unwritten.append({"step": step, **values})
        self.forward_evaluations()

    def event(self, kind: str, **facts: Any) -> None:
        """Append what happened, and when by this machine's clock, to events.jsonl."""
        if self.leader:
            note(self.folder, kind, **facts)

    def forward_evaluations(self) -> None:
        """Pass new lines of evaluations.jsonl on to the sinks, at their checkpoint's step. None new: costs a stat()."""
        if not self.leader:
            return
        self._write_evaluations()
        try:
            size = self.evaluations.stat().st_size if self.evaluations.exists() else 0
            for name in list(self.sinks):
                if size < self.at[name].evaluations_bytes:
                    self._warn(f"{self.evaluations} became shorter than what {name} was sent; it is sent from the start")
                    self.at[name] = replace(self.at[name], evaluations_bytes=0)
                if size > self.at[name].evaluations_bytes:
                    self._send_evaluations(name)
        except OSError as error:
            self._warn(f"{self.evaluations} cannot be read ({error.strerror}); training goes on, it is read again later")

    def sync(self) -> None:
        """Make the record durable and note how far each sink is. Before a checkpoint is committed: see Metrics.sync."""
        if not self.leader:
            return
        if self.metrics is not None:
            self.metrics.sync()
        # A disk may have room again. The process of wandb, once lost, cannot be had back before the next start.
        if "tensorboard" in self.openers and "tensorboard" not in self.sinks:
            self._open("tensorboard")
        self.forward_evaluations()
        for name, sink in list(self.sinks.items()):
            try:
                sink.flush()
            except Exception as error:
                self._drop(name, error)
            else:
                self._note(name, asdict(self.at[name]))

    def close(self, failed: bool = False) -> None:
        """Send the rest, close everything and let go of the run. `failed` is what Weights & Biases will say of it."""
        if self.recent and not failed:  # the leader was lost in the last step
            self.take_over(self.recent[-1][0] + 1)
        if not self.leader or self.lock is None:
            return
        self.sync()
        for name, sink in self.sinks.items():
            try:
                sink.close(failed)
            except Exception as error:
                self._warn(f"{name} did not close ({error}); the next start sends it what it lacks")
        self.sinks.clear()
        if self.metrics is not None:
            self.metrics.close()
        os.close(self.lock)
        self.lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(failed=error is not None and not isinstance(error, SystemExit))

    def _open(self, name: str) -> None:
        """Open a sink and send it what it lacks. Only a wrong configuration is an error; the rest is said, once."""
        try:
            sink = self.openers[name](held=Held(**self.notes.get(name, {})))
        except ConfigError:
            raise
        except Exception as error:
            self._warn(f"{name} cannot be opened ({error}); training goes on, the next start sends it what it lacks")
            return
        self.sinks[name], self.at[name] = sink, sink.held
        after = sink.held.step
        try:
            for line in self.metrics.after(after) if self.metrics else stream(self.folder / "metrics.jsonl", after):
                self._send_step(name, line["step"], line)
        except OSError as error:
            self._drop(name, error)
        self.forward_evaluations()

    def _send_step(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        if name not in self.sinks or step <= self.at[name].step:
            return
        now = replace(self.at[name], step=step, rows=self.at[name].rows + 1)
        try:
            self.sinks[name].train(numbers(values), now)
        except Exception as error:
            self._drop(name, error)
        else:
            self.at[name] = now

    def _send_evaluations(self, name: str) -> None:
        """Send the whole lines that `name` has not had; a torn last line is left for later."""
        with open(self.evaluations, "rb", opener=regular) as file:
            file.seek(self.at[name].evaluations_bytes)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                at = self.at[name]
                now = replace(at, evaluations_bytes=at.evaluations_bytes + len(raw), rows=at.rows + 1)
                line = decode(raw)
                if line is None or not isinstance(line.get("step"), int):
                    self._warn(f"{self.evaluations}: a line that is torn or has no step is left out: {raw[:80]!r}")
                    self.at[name] = replace(now, rows=at.rows)
                    continue
                if line.get("split", "validation") != "validation":
                    self.at[name] = replace(now, rows=at.rows)  # scores on the test split are for the end, not for a curve to choose by
                    continue
                try:
                    self.sinks[name].validation(line["step"], numbers(line), now)
                except Exception as error:
                    self._drop(name, error)
                    return
                self.at[name] = now

    def _write_evaluations(self) -> None:
        """Append this process's own evaluations; on a line of their own where somebody was killed inside a line."""
        path = self.evaluations
        try:
            while self.unwritten:
                torn = path.exists() and last_newline(path) < path.stat().st_size
                append_line(path, "\n" * torn + encode(self.unwritten[0]).decode().rstrip("\n"))
                self.unwritten.popleft()
        except OSError as error:
            self._warn(f"{path} cannot be written ({error.strerror}); training goes on, its lines wait in memory")

    def _drop(self, name: str, error: Exception) -> None:
        """Go on without a sink that failed."""
        self._warn(f"{name} failed ({type(error).__name__}: {error}); training goes on, what it lacks is sent later")
        sink = self.sinks.pop(name)
        try:
            sink.close(failed=True)
        except Exception as again:
            log.debug("%s did not close either: %s", name, again)

    def _warn(self, problem: str) -> None:
        """Say it once."""
        if problem not in self.warned:
            self.warned.add(problem)
            log.warning("%s", problem)

    def _wandb_id(self) -> str:
        """This run's id at Weights & Biases: made once, kept in tracker.json."""
        if "wandb_id" not in self.notes:
            self._note("wandb_id", secrets.token_hex(8))
        return str(self.notes["wandb_id"])

    def _read_notes(self) -> dict[str, Any]:
        path = self.folder / "tracker.json"
        try:
            return dict(read_json(path)) if path.exists() else {}
        except (ValueError, TypeError) as error:
            hint = "move it aside; the sinks are then filled anew"
            raise DataError(f"{path.name} is damaged: {error}", str(path), hint) from error

    def _note(self, name: str, value: Any) -> None:
        """Keep `value` in tracker.json, at once and whole."""
        if self.notes.get(name) == value:
            return
        self.notes[name] = value
        try:
            write_json(self.folder / "tracker.json", self.notes)
        except OSError as error:
            self._warn(f"{self.folder / 'tracker.json'} cannot be written ({error.strerror}); training goes on")


class BackgroundTracker:
    """A tracker whose work is done in a thread of its own, in the order in which it was asked for: no step waits for a disk.

    What fails there is raised by the next call, or in the end. Its methods are those of a Tracker.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._failure: BaseException | None = None

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Returns at once."""
        self._begin(self.tracker.step, step, dict(values))

    def take_over(self, step: int) -> None:
        """Returns when it is done: what others are given next depends on it."""
        self._begin(self.tracker.take_over, step).result()

    def sync(self) -> None:
        """Returns when it is done. For any thread."""
        self._begin(self.tracker.sync).result()

    def _begin(self, work: Callable[..., None], *args: Any) -> Future[None]:
        self._raise()
        begun = self._thread.submit(work, *args)
        begun.add_done_callback(self._note_failure)
        return begun

    def _note_failure(self, done: Future[None]) -> None:
        self._failure = self._failure or done.exception()

    def _raise(self) -> None:
        if self._failure:
            raise self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown()
        if error is None:
            self._raise()
