"""Read the files of a run folder, whole for a report, or as they grow for `watch`.

Memory is bounded: curves are thinned (curve.py), and the newest KEPT events are kept.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.checkpoint.fingerprints import newest_facts
from lockstep.checkpoint.folder import committed_steps
from lockstep.elastic.generation_log import GenerationLog
from lockstep.errors import LockstepError, UsageError
from lockstep.files import read_json, verify_checksum
from lockstep.record.events import is_event
from lockstep.record.goodput import CATEGORIES, valid_seconds
from lockstep.record.metrics import LineFollower, decode_line, iter_steps, missing_steps
from lockstep.record.progress import PRINTED
from lockstep.record.tracker import metrics_damage
from lockstep.report.curve import Curve
from lockstep.units import MAX_NAMES, format_seconds

# One of them makes a folder a run.
FILES = ("metrics.jsonl", "events.jsonl", "run.json", "generations")
KEPT = 1000
MAX_CURVES, MAX_STEP = 60, 2**53
NO_CURVE = re.compile(r"step|workers|generation|epoch|goodput|.*_so_far|.*_per_second_per_device")
VALIDATION = re.compile(r"(?:validation|val)_(.+)")  # a score, and its name
# What a Session measures itself, of the names of curves.
MEASURED = re.compile(
    r"loss|seconds|mfu|data_wait|exposed_communication|memory_bytes|.*_seconds"
    r"|(tokens|samples|steps)(_per_second)?"
)
NORMAL_EXIT = re.compile(r"(exited|ended|stopped) with (exit )?code (0|75|130)\b")
FAILURES = ("worker ended", "hang", "culprit found", "run ended", "SIGTERM sent", "SIGKILL sent")
# The other events of the table, by their names there.
NOTED = {
    "diverged": "diverged",
    "override": "values changed",
    "resumed with differences": "resumed with differences",
    "rolled back": "step rolled back",
    "slow": "slow worker",
    "spike": "loss spike",
    "stopped early": "stopped early",
    "worker taken over": "worker taken over",
} | {event: event for event in FAILURES}


class Formed(NamedTuple):
    """A generation, as the event of its start describes it."""

    number: int
    time_s: float  # since 1970, by the clock of its leader
    step: int  # committed steps
    workers: Sequence[str]  # "HOST/SLOT", in rank order; none are recorded without an agent
    ids: set[str]  # of the workers
    why: str
    failed: bool  # whether it lacks a worker of the generation before it, or restarts the run
    total_steps: int  # of the whole run; 0: unknown


class Stretch(NamedTuple):
    """The time of a worker in one generation, since 1970."""

    worker: str
    generation: int
    start_s: float
    end_s: float


class Note(NamedTuple):
    time_s: float
    step: int | None
    event: str
    text: str


def is_run(folder: Path) -> bool:
    """Return whether `folder` has one of the files of a run."""
    return any((folder / name).exists() for name in FILES)


def require_run(folder: Path) -> None:
    """UsageError unless `folder` is a run."""
    if not is_run(folder):
        reason = (
            f"it has none of {', '.join(FILES)}" if folder.is_dir() else "there is no such folder"
        )
        raise UsageError(
            f"{folder} is not a run: {reason}",
            "command line",
            "give the folder set with --out, such as runs/default; a start creates it in seconds",
        )


class Steps:
    """The lines of metrics.jsonl.
    tail_bytes: read only the last part of this size; None: all of it"""

    def __init__(self, path: Path, tail_bytes: int | None = None) -> None:
        self.follower = LineFollower(path, tail_bytes=tail_bytes)
        self.curves: dict[str, Curve] = {}
        self.last: dict[str, Any] = {}  # the line of the newest step
        self.newest = 0
        self.count = 0  # lines read
        self.damaged = 0
        self.gaps: deque[str] = deque(maxlen=MAX_NAMES)  # newest ones: steps without a line

    def update(self) -> bool:
        """Read what is new. False: the file was truncated by a run that resumed, and what was read
        is out of date."""
        is_follow_up = self.follower.offset > 0
        for line in self.follower.read():
            values = decode_line(line) or {}
            step = values.get("step")
            if type(step) is int and self.newest < step < MAX_STEP:
                self._add(step, values)
            elif is_follow_up:
                return False
            else:
                self.damaged += 1
        return True

    def _add(self, step: int, values: dict[str, Any]) -> None:
        if self.newest and step > self.newest + 1:
            self.gaps.append(missing_steps(self.newest + 1, step - 1))
        self.newest = step
        self.last = values
        self.count += 1
        for key, value in values.items():
            if type(value) is not float and (type(value) is not int or abs(value) >= MAX_STEP):
                continue
            if key not in self.curves:
                if len(self.curves) == MAX_CURVES or NO_CURVE.fullmatch(key):
                    continue
                self.curves[key] = Curve()
            self.curves[key].add(step, value)


class History:
    """The lines of events.jsonl."""

    def __init__(self, path: Path) -> None:
        self.follower = LineFollower(path)
        self.generations: deque[Formed] = deque(maxlen=KEPT)
        self.stretches: deque[Stretch] = deque(maxlen=2 * KEPT)
        self.notes: deque[Note] = deque(maxlen=KEPT)
        self.slow: deque[Note] = deque(maxlen=KEPT)  # apart: they may be more than all others
        self.members: dict[str, float] = {}  # worker of the newest generation -> its start
        self.shares: dict[int, list[int]] = {}  # newest ones, by the generation that they are of
        self.seconds: dict[str, float] = {}  # ledger of the last end of the run, by category
        self.best: tuple[int, float] | None = None  # step and score
        self.first_s = 0.0
        self.last_s = 0.0
        self.formed = 0  # generations in all
        self.failures = 0
        self.damaged = 0
        self.ended = False

    @property
    def total_steps(self) -> int:
        return self.generations[-1].total_steps if self.generations else 0

    def update(self) -> None:
        """Read what is new."""
        for line in self.follower.read():
            try:
                event = decode_line(line) or {}
                if not is_event(event):
                    raise ValueError("not an event")
                self._add(event)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                self.damaged += 1

    def _add(self, event: dict[str, Any]) -> None:
        now_s = datetime.fromisoformat(event["time"]).timestamp()
        kind = event["event"]
        self.first_s = self.first_s or now_s
        self.last_s = max(self.last_s, now_s)
        if kind in ("began", "regrouped"):
            self._add_generation(now_s, event)
        elif kind == "goodput":  # of a start that ended in order
            self.ended = True
            self.seconds = {name: valid_seconds(event.get(f"{name}_s", 0.0)) for name in CATEGORIES}
        elif kind == "shares":
            self.shares = {int(event["generation"]): [int(share) for share in event["shares"]]}
        elif kind == "best score":
            self.best = int(event["step"]), float(event["score"])
        elif kind == "worker ended":
            self._end_stretch(f"{event['host']}/{event['slot']}", now_s)
        if kind in NOTED and not NORMAL_EXIT.match(str(event.get("why"))):
            notes = self.slow if kind == "slow" else self.notes
            notes.append(Note(now_s, event.get("step"), NOTED[kind], note_of(event)))

    def _add_generation(self, now_s: float, event: dict[str, Any]) -> None:
        ids = [str(id) for id in event["workers"]]
        workers = [f"{host}/{int(slot)}" for host, slot, _ in (id.rsplit("/", 2) for id in ids)]
        number = int(event["generation"])
        step = int(event["step"])
        if self.best and self.best[0] > step:
            self.best = None  # of steps that are trained again
        failed = False
        why = "started"
        if self.generations:
            began = event["event"] == "began"
            failed = not (self.ended if began else self.generations[-1].ids <= set(ids))
            why = f"restarted from step {step}"
        why = str(event.get("why") or why)
        for worker in list(self.members):
            self._end_stretch(worker, now_s)
        total = min(int(event.get("steps", self.total_steps)), MAX_STEP)
        self.generations.append(Formed(number, now_s, step, workers, set(ids), why, failed, total))
        self.members = dict.fromkeys(workers, now_s)
        self.ended = False
        self.formed += 1
        self.failures += failed

    def _end_stretch(self, worker: str, now_s: float) -> None:
        if (start_s := self.members.pop(worker, None)) is not None:
            self.stretches.append(Stretch(worker, self.generations[-1].number, start_s, now_s))

    def stretches_until(self, end_s: float) -> list[Stretch]:
        """Return the stretches; one whose end is not recorded lasts until `end_s`."""
        lasting = [
            Stretch(worker, self.generations[-1].number, start_s, end_s)
            for worker, start_s in self.members.items()
        ]
        return [*self.stretches, *lasting]


def note_of(event: dict[str, Any]) -> str:
    """Return an event in words: its worker, and its reason or its values."""
    if event["event"] == "slow":
        seconds = format_seconds(float(event["seconds"]))
        median = format_seconds(float(event["median"]))
        return f"{event['worker']}: {seconds} for a micro-batch, the median is {median}"
    workers = [*event.get("wrong", ())]
    if "slot" in event:
        workers.append(f"{event['host']}/{event['slot']}")
    values = [f"{key} = {value}" for key, value in event.get("values", {}).items()]
    without = "" if event["event"] == "diverged" else "without "  # it ends before its update
    batches = [
        f"{without}micro-batch {row['k']}, loss {row['loss']}"
        for row in event.get("micro_batches", ())
    ]
    text = event.get("why") or "; ".join([*event.get("differences", ()), *values, *batches])
    return ": ".join(filter(None, [", ".join(workers), str(text)]))


class RunData:
    """The records of a run. `update` reads what is new.
    tail_bytes: read only the last part of metrics.jsonl of this size; None: all of it"""

    def __init__(self, folder: Path, tail_bytes: int | None = None) -> None:
        self.folder = folder
        self.tail_bytes = tail_bytes
        self.history = History(folder / "events.jsonl")
        self.steps = Steps(folder / "metrics.jsonl", tail_bytes)
        self.saved_step = 0

    def missing(self) -> list[str]:
        """Return which steps have no line, as far as the lines were read."""
        missing = list(self.steps.gaps)
        if self.steps.newest < self.saved_step and self.steps.follower.path.exists():
            missing.append(missing_steps(self.steps.newest + 1, self.saved_step))
        return missing

    def update(self) -> RunData:
        saved_step = 0
        with suppress(OSError):  # read before the lines: they are written before a checkpoint
            saved_step = max(committed_steps(self.folder / "checkpoints"), default=0)
        self.history.update()
        while not self.steps.update():
            self.steps = Steps(self.steps.follower.path, self.tail_bytes)
        self.saved_step = saved_step
        return self

    def all_stretches(self) -> list[Stretch]:
        """Return the stretches; one whose end is not recorded lasts until the newest record."""
        end_s = self.history.last_s
        if not self.history.ended:
            with suppress(OSError):
                end_s = max(end_s, self.steps.follower.path.stat().st_mtime)
        return self.history.stretches_until(end_s)


class Facts(NamedTuple):
    """JSON of a run that has no steps. What cannot be read is empty, with a line in `problems`."""

    run: Mapping[str, Any]  # run.json; {} for a script
    checkpoint: Mapping[str, Any]  # facts of the newest one: time account, versions, processor
    evaluations: list[dict[str, Any]]
    samples: Mapping[str, Any]
    printed: str  # newest lines of session.print
    end: str  # of the run; "" while it runs
    problems: list[str]


def read_facts(folder: Path) -> Facts:
    problems: list[str] = []

    def read(name: str, function: Callable[[], Any], default: Any) -> Any:
        try:
            return function()
        except FileNotFoundError:
            return default
        except (LockstepError, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            problem = error.what if isinstance(error, LockstepError) else error
            problems.append(f"{name} cannot be read: {problem}")
            return default

    def end() -> str:
        end = GenerationLog(folder / "generations").newest().end
        return end_text(end.code, end.text) if end else ""

    def damage() -> list[str]:
        saved_step = max(committed_steps(folder / "checkpoints"), default=0)
        return [f"metrics.jsonl: {problem}" for problem in metrics_damage(folder, saved_step)]

    problems += read("metrics.jsonl", damage, [])
    return Facts(
        read("run.json", lambda: verify_checksum(read_json(folder / "run.json")), {}),
        read(
            "the newest checkpoint",
            lambda: (newest_facts(folder / "checkpoints") or (0, {}))[1],
            {},
        ),
        read(
            "evaluations.jsonl",
            lambda: list(deque(iter_steps(folder / "evaluations.jsonl"), maxlen=KEPT)),
            [],
        ),
        read("samples.json", lambda: dict(read_json(folder / "samples.json")), {}),
        read(PRINTED, lambda: (folder / PRINTED).read_text(errors="replace"), ""),
        read("the generation log", end, ""),
        problems,
    )


def end_text(code: int, text: str) -> str:
    verb = "stopped" if code in (75, 130) else "ended"
    return f"{verb} with exit code {code}: {text}".removesuffix(": ")


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
