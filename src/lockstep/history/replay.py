"""Replay a step: resume in a copy of the run folder, compute up to the step, compare with the
record.

The record is metrics.jsonl: of each step the losses of its micro-batches, and the digest of the
weights before it. The processes of a replay are one replica on this machine, and never
write to the run folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint.folder import committed_steps, folder_name
from lockstep.data.manifest import MANIFEST
from lockstep.errors import DataError, LockstepError, UsageError
from lockstep.files import link_or_copy
from lockstep.history.request import OBSERVED, Replay
from lockstep.record.events import iter_events
from lockstep.record.metrics import decode_line, iter_steps, read_lines
from lockstep.runtime.sockets import reserve_port
from lockstep.runtime.variables import LAYOUT

# In a run folder, what a replay writes itself, or what belongs to the processes of the run.
NOT_COPIED = (
    *("checkpoints", "metrics.jsonl", "events.jsonl", "witness.json", "tracker.json", "token"),
    *("generations", "waiting", "logs", "state", "tensorboard", "wandb", "profile"),
)
POLL_S = 0.05
TAIL_LINES = 12  # of the output of a process that failed
Line = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """How a run was started, as the event "began" tells.

    words   of `lockstep`, which start a worker
    folder  the working directory
    layout  sizes of the axes of a replica, by name
    """

    words: tuple[str, ...]
    folder: str
    layout: Mapping[str, int]


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    first       the step whose checkpoint it resumed from; 0: the start of the run
    recorded, computed  lines of metrics.jsonl after it, up to the replayed step
    observed    lines of observed.jsonl
    output      of the processes
    """

    first: int
    recorded: list[Line]
    computed: list[Line]
    observed: list[Line]
    output: str

    def difference(self) -> str:
        """Return where the replay first differs from the record; "" for equal lines."""
        for before, now in zip(self.recorded, self.computed, strict=True):
            if what := difference_of(before, now):
                return f"step {before['step']}: {what}"
        return ""


def are_comparable(before: Line, now: Line) -> bool:
    """Return whether both have a digest, of as many slices."""
    return "digest" in before and "digest" in now and slices_of(before) == slices_of(now)


def difference_of(before: Line, now: Line) -> str:
    """Return what differs between the records of a step; "" if nothing does. Digests of other
    slices cannot be compared."""
    if are_comparable(before, now) and before["digest"] != now["digest"]:
        return f"other weights before it: digest {before['digest']}, now {now['digest']}"
    if "losses" not in before or "losses" not in now:
        same = str(before["loss"]) == str(now["loss"])
        return "" if same else f"loss {before['loss']}, now {now['loss']}"
    for k, (loss, again) in enumerate(zip(before["losses"], now["losses"], strict=False)):
        if loss != again:
            return f"loss of micro-batch {k} {loss}, now {again}"
    counts = len(before["losses"]), len(now["losses"])
    return "" if counts[0] == counts[1] else f"{counts[0]} micro-batches, now {counts[1]}"


def slices_of(line: Line) -> str:
    return str(line["digest"]).partition("/")[2]


def replay(folder: Path, request: Replay, python: str, *, from_start: bool = False) -> Replayed:
    """Compute up to `request.step` in a copy of the run in `folder`. request.folder: ignored.

    python      interpreter of the processes
    from_start  compute all steps where no checkpoint before the step is left
    UsageError for a step that cannot be replayed; LockstepError when a process fails, except in the
    step at which the run stopped, if it is looked into.
    """
    lines = recorded_steps(folder, request.step, or_next=request.observes)
    first = choose_first(folder, request.step, from_start=from_start)
    start = read_start(folder, request.step)
    with copy_of_run(folder, first) as copy:
        try:
            output = run_processes(start, replace(request, folder=str(copy)), python)
        except LockstepError as error:
            stopped = request.step not in [line["step"] for line in lines]
            if not (stopped and (copy / OBSERVED).exists()):
                raise
            output = str(error)  # as the run stopped
        computed = list(iter_steps(copy / "metrics.jsonl", after=first))
        observed = [line for raw in read_lines(copy / OBSERVED) if (line := decode_line(raw))]
    recorded = [line for line in lines if line["step"] > first]
    if [line["step"] for line in computed] != [line["step"] for line in recorded]:
        raise DataError(
            f"the replay computed {len(computed)} steps after step {first}, not {len(recorded)}",
            f"the record of {folder}",
            "replay a step at which the loop commits: with learners the last one of an outer step",
        )
    return Replayed(first, recorded, computed, observed, output)


def recorded_steps(folder: Path, step: int, *, or_next: bool = False) -> list[Line]:
    """Return the record up to `step`. UsageError: the run has no such step. or_next: it may be the
    one after the last, at which the run stopped"""
    lines = list(iter_steps(folder / "metrics.jsonl"))
    steps = [line["step"] for line in lines]
    last = max(steps, default=0)
    if step not in steps and not (or_next and step == last + 1):
        raise UsageError(
            f"the run has no step {step}",
            f"{folder / 'metrics.jsonl'} ends with step {last}",
            f"give --step 1 to {last}" if last else "give the folder of a run that has trained",
        )
    return [line for line in lines if line["step"] <= step]


def choose_first(folder: Path, step: int, *, from_start: bool) -> int:
    """Return the step of the newest checkpoint before `step`; 0: replay from the start. UsageError:
    retention has deleted the checkpoints before it."""
    kept = committed_steps(folder / "checkpoints")
    before = [saved for saved in kept if saved < step]
    if before:
        return before[-1]
    events = [event for event in iter_events(folder) if event["event"] in ("saved", "began")]
    if from_start or not any(0 < event["step"] < step for event in events):
        return 0
    raise UsageError(
        f"no checkpoint before step {step} is left",
        f"{folder / 'checkpoints'} has those of steps {', '.join(map(str, kept)) or 'none'}",
        f"--from-start computes all {step} steps; keep=0 (checkpoint.keep=0 in a recipe) keeps "
        "all checkpoints of a run",
    )


def read_start(folder: Path, step: int) -> Start:
    """Return the newest start that came to `step`. UsageError: it cannot be repeated here."""
    began = [
        event for event in iter_events(folder) if event["event"] == "began" and event["step"] < step
    ]
    if not began or not began[-1].get("words"):
        raise UsageError(
            "the start of the run is not recorded",
            f'{folder / "events.jsonl"}, event "began"',
            "replay a run of this version that a script, a module or a recipe has trained",
        )
    event = began[-1]
    start = Start(tuple(event["words"]), event["folder"], event["layout"])
    if not Path(start.folder).is_dir():  # the run folder comes from another machine
        start = replace(start, folder=os.getcwd())
    script = script_of(start.words)
    if script and not (Path(start.folder) / script).is_file():
        raise UsageError(
            f"the script {script} is missing",
            f"the run was started in {event['folder']}: lockstep {shlex.join(start.words)}",
            "put it back, or run this command in a folder that has it",
        )
    return start


def script_of(words: Sequence[str]) -> str:
    """Return the script that the words name; "" for a recipe or a module."""
    names = (word.partition(":")[0] for word in own_words(words))
    return next((name for name in names if name.endswith(".py")), "")


def own_words(words: Sequence[str]) -> Sequence[str]:
    """Return the words before the arguments of a script."""
    return words[: words.index("--")] if "--" in words else words


@contextmanager
def copy_of_run(folder: Path, first: int) -> Iterator[Path]:
    """Context manager with a folder that has what a start needs of the run.

    The checkpoint and prepared data, which no process changes, are hard links where possible. All
    other files are copied: a script may append to them, or write them again.
    """
    linked = ["data"] if (folder / "data" / MANIFEST).is_file() else []
    left_out = [*NOT_COPIED, *linked]
    if first:
        linked.append(f"checkpoints/{folder_name(first)}")
    with tempfile.TemporaryDirectory(prefix="lockstep-replay-") as name:
        copy = Path(name)
        shutil.copytree(
            folder,
            copy,
            ignore=lambda where, _: left_out if Path(where) == folder else [],
            copy_function=copy_existing,
            dirs_exist_ok=True,
        )
        for path in linked:
            shutil.copytree(folder / path, copy / path, copy_function=link)
        yield copy


def copy_existing(source: str, target: str) -> None:
    """Copy a file, unless a run that trains has deleted it, or it links to nothing."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


def link(source: str, target: str) -> None:
    link_or_copy(Path(source).resolve(), Path(target))


def replay_words(start: Start, copy: Path) -> list[str]:
    """Return the words of `lockstep` that start a worker in the copy."""
    if start.words[:1] == ("train",) and not script_of(start.words):
        axes = [f"--layout.{axis}={start.layout[axis]}" for axis in ("tensor", "pipeline")]
        own = ["--out", str(copy), "--resume", "auto", "--layout.shard=1"]
        return ["train", *own, "--layout.replicate=1", *axes]
    own = list(own_words(start.words))
    for option, value in (("--out", str(copy)), ("--resume", "auto")):
        if option in own:
            own[own.index(option) + 1] = value
    return [*own, *start.words[len(own) :]]


def run_processes(start: Start, request: Replay, python: str) -> str:
    """Run the workers of one replica; return their output. LockstepError: one of them failed."""
    copy = Path(request.folder)
    count = start.layout["tensor"] * start.layout["pipeline"]
    command = [python, "-m", "lockstep", *replay_words(start, copy)]
    common = {name: text for name, text in os.environ.items() if not name.startswith("LOCKSTEP_")}
    common |= request.environ() | {
        LAYOUT[axis]: str(start.layout[axis]) for axis in ("tensor", "pipeline")
    }
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
    common |= {
        LAYOUT["shard"]: "1",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WANDB_MODE": "disabled",  # for calls of the script itself
    }
    with open(copy / "output.log", "wb") as output:
        where = output if request.stops_at is None else None
        processes = [
            subprocess.Popen(
                command,
                cwd=start.folder,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=where,
                stderr=where,
            )
            for rank in range(count)
        ]
        try:
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                time.sleep(POLL_S)
        finally:
            for process in processes:  # they may wait for the one that has failed
                process.terminate()
                process.wait()
        text = (copy / "output.log").read_text(errors="replace")
        if any(codes):
            raise LockstepError(
                f"the replay failed with exit code {next(filter(None, codes))}",
                f"in {start.folder}: {shlex.join(command)}",
                "\n".join(text.splitlines()[-TAIL_LINES:]),
            )
    return text
