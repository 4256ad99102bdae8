"""`lockstep drill`: train several times and compare the hashes of the last checkpoints.

`drill` trains twice, once undisturbed and once with random faults. `self_check` trains a user's own loop on one worker, on several, through
the loss of a worker, and through a stop and a resume with another number of workers.

worker      SIGKILL to a worker                 leader      SIGKILL to the worker that leads
stop        SIGSTOP for longer than a worker may be silent, then SIGCONT
flip        one bit of one weight, in the memory of one worker
agent       SIGKILL to the agent; a new one is started at once, as systemd would
host        SIGKILL to the agent and all its workers; the same command is started again
checkpoint  a bit of the newest checkpoint, and then SIGKILL to all workers: the one before must serve
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from lockstep.checkpoint.commands import digest_line
from lockstep.checkpoint.folder import committed_steps, folder_name
from lockstep.elastic.fault_injection import DRILL_VARIABLE, request_fault
from lockstep.elastic.generation_log import Generation, GenerationLog, Member
from lockstep.errors import LockstepError, UsageError
from lockstep.record import events
from lockstep.record.metrics import last_step
from lockstep.runtime import status_board as board
from lockstep.runtime.worker_env import ProcessIdentity, running_workers, state_folder
from lockstep.units import format_duration

FAULTS = ("worker", "leader", "stop", "flip", "agent", "host", "checkpoint")
POLL_S = 0.005
PATIENCE_S = 120.0
STEPS_OF_PATIENCE = 20
SAVED_AND_STOPPED = 75


@dataclass(frozen=True)
class Felt:
    """What a fault cost.

    noticed_s  until the next generation; None: none was needed
    back_s     until the next committed step
    lost       committed steps that had to be done again
    """

    fault: str
    step: int
    noticed_s: float | None
    back_s: float
    lost: int


def plan(seed: int, faults: int, steps: int, workers: int, save_every: int) -> list[tuple[int, str]]:
    """(after which step, which fault), in order; every kind before any comes again.

    A lone worker cannot be compared with another, and nobody sees that it was stopped. A checkpoint can be damaged when there are two.
    """
    chance = random.Random(seed)
    last, two_saved = max(2, steps - 3), 2 * save_every + 1 if save_every else steps
    left_out = {"flip": workers < 3, "stop": workers < 2, "checkpoint": two_saved >= last}
    kinds = [fault for fault in FAULTS if not left_out.get(fault)]
    chosen: list[str] = []
    while len(chosen) < faults:
        chosen += chance.sample(kinds, len(kinds))
    moments = sorted(chance.randrange(1, last) for _ in range(faults))
    planned = zip(moments, chosen[:faults], strict=True)
    late = [
        (chance.randrange(two_saved, last) if fault == "checkpoint" and moment < two_saved else moment, fault) for moment, fault in planned
    ]
    return sorted(late, key=lambda one: one[0])


class Run:
    """A training with its own agent, started by `lockstep launch`.

    least       minimum number of workers
    patience_s  without progress, or 20 median steps where these are longer, after which `wait_for` gives up
    """

    patience_s = PATIENCE_S

    def __init__(self, words: Sequence[str], folder: Path, workers: int, host: str, *, least: int = 1) -> None:
        self.folder, self.host = folder, host
        counts = ["--workers", str(workers), "--min", str(least)]
        self.command = [sys.executable, "-m", "lockstep", "launch", *words, "--out", str(folder), *counts]
        self.arbiter = GenerationLog(folder / "generations")
        self.metrics, self.log = folder / "metrics.jsonl", folder / "drill.log"
        self.stopped: list[Member] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left: the agent, then the workers, which outlive it."""
        if self.agent.poll() is None:
            self.agent.kill()
            self.agent.wait()
        while left := running_workers(state_folder(self.folder, self.host)).values():
            self.kill([*left])
            time.sleep(POLL_S)

    def start(self) -> None:
        """Start the agent, or another one in its place."""
        environ = {**os.environ, DRILL_VARIABLE: "1"}
        with open(self.log, "ab") as output:
            self.agent = subprocess.Popen(self.command, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def step(self) -> int:
        """Committed steps, as far as the metrics have them."""
        with suppress(OSError):
            return self.metrics.read_bytes().count(b"\n")
        return 0

    def newest(self) -> Generation | None:
        """The newest generation."""
        with suppress(OSError):
            return self.arbiter.newest()
        return None

    def members(self) -> list[Member]:
        """Those of the newest generation."""
        record = self.newest()
        return list(record.members) if record else []

    def progress(self) -> tuple[tuple[object, ...], float]:
        """Return (values that change with any progress, the median seconds of a step)."""
        newest = self.newest()
        signs: list[object] = [newest.number if newest else 0]
        signs += [path.stat().st_size for path in (self.log, self.metrics, self.folder / "events.jsonl") if path.exists()]
        doing = []
        for path in sorted(state_folder(self.folder, self.host).glob("[0-9]*.board")):
            with suppress(OSError):
                doing.append(board.read_status(path))
        signs += [(one.pid, one.step, one.phase, one.collective) for one in doing]
        return tuple(signs), max((one.step_s for one in doing), default=0.0)

    def wait_for(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds until `condition` holds. LockstepError when the run ends first, or no longer makes progress."""
        began_s = moved_s = time.monotonic()
        before, _ = self.progress()
        while not condition():
            if self.agent.poll() is not None:
                raise self.failure(f"the run, before {what},")
            now, step_s = self.progress()
            if now != before:
                before, moved_s = now, time.monotonic()
            patience_s = max(self.patience_s, STEPS_OF_PATIENCE * step_s)
            if time.monotonic() - moved_s > patience_s:
                what = f"{what} did not come, and the run has made no progress for {format_duration(patience_s)}"
                raise LockstepError(what, str(self.log), "lockstep status shows what the workers are doing")
            time.sleep(POLL_S)
        return time.monotonic() - began_s

    def failure(self, what: str) -> LockstepError:
        """Return the failure of the run as an error with its exit code: the text of its last generation, else the last error in the log."""
        code, record, text = self.agent.wait(), self.newest(), self.log.read_text(errors="replace")
        told = re.split(r"^(?=\w+Error: )", text, flags=re.MULTILINE)[1:] or ["\n".join(text.splitlines()[-10:])]
        words = record.end.text if record and record.end and record.end.text else told[-1]
        error = LockstepError(f"{what} ended with exit code {code}", f"log: {self.log}", words)
        error.exit_code = code or LockstepError.exit_code
        return error

    def kill(self, members: Sequence[Member | ProcessIdentity], number: int = signal.SIGKILL) -> None:
        """Send a signal to workers."""
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member.pid, number)

    def strike(self, fault: str, chance: random.Random) -> None:
        """Do it."""
        members = self.members()
        others = members[1:] or members
        if fault == "worker":
            self.kill([chance.choice(others)])
        elif fault == "leader":
            self.kill(members[:1])
        elif fault == "stop":
            self.stopped = [chance.choice(members)]
            self.kill(self.stopped, signal.SIGSTOP)
        elif fault == "flip":
            request_fault(state_folder(self.folder, self.host), chance.choice(members).slot, "flip", at="forward")
        elif fault in ("agent", "host"):
            self.agent.kill()
            if fault == "host":
                self.kill(members)
            self.agent.wait()
            self.start()
        else:
            self.tear_checkpoint(chance)
            self.kill(members)

    def tear_checkpoint(self, chance: random.Random) -> None:
        """Flip a bit of the newest checkpoint, as soon as there is an older one."""
        self.wait_for(lambda: len(committed_steps(self.folder / "checkpoints")) > 1, "a second checkpoint")
        steps = committed_steps(self.folder / "checkpoints")
        path = chance.choice(sorted((self.folder / "checkpoints" / folder_name(steps[-1])).glob("*.safetensors")))
        with open(path, "r+b") as file:
            place = chance.randrange(path.stat().st_size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ (1 << chance.randrange(8))]))


def disturb(run: Run, faults: Sequence[tuple[int, str]], workers: int, seed: int, tell: Callable[[Felt], None]) -> None:
    """Let each fault happen when its step has come and the one before is healed."""
    chance = random.Random(seed)
    for moment, fault in faults:
        run.wait_for(lambda moment=moment: run.step() >= moment and len(run.members()) == workers, f"step {moment} with {workers} workers")  # type: ignore[misc]
        step, before = run.step(), run.newest()
        began_s = time.monotonic()
        run.strike(fault, chance)
        noticed_s = None
        if fault != "agent":
            run.wait_for(lambda before=before: changed(run.newest(), before), f"a new generation after {fault!r} at step {step}")  # type: ignore[misc]
            noticed_s = time.monotonic() - began_s
        run.kill(run.stopped, signal.SIGCONT)  # it finds that the run went on without it, if its agent has not ended it before
        run.stopped = []
        resumed = record.step if (record := run.newest()) else 0
        again = run.step()
        run.wait_for(lambda again=again: run.step() > again or run.step() < again, f"a step after {fault!r} at step {step}")  # type: ignore[misc]
        if not resumed:  # all began anew, from a checkpoint
            resumed = run.step()
            run.wait_for(lambda step=step: run.step() >= step, f"step {step} again after {fault!r}")  # type: ignore[misc]
        tell(Felt(fault, step, noticed_s, time.monotonic() - began_s, max(0, step - resumed) if noticed_s is not None else 0))


def changed(now: Generation | None, before: Generation | None) -> bool:
    """Whether there is a newer generation."""
    return now is not None and (before is None or now.number > before.number)


def drill(words: Sequence[str], folder: Path, *, workers: int, faults: int, seed: int, steps: tuple[int, int] | None, host: str) -> int:
    """Train twice and compare; 0 only when the hashes are equal. A failed run raises an error with its message and exit code.

    words   of `lockstep launch` for the run, without --out and --workers
    faults  how many; which, and where each strikes, follows from `seed`
    steps   (the last step, steps from one checkpoint to the next); None: those of the undisturbed run
    host    what this machine calls itself
    """
    refuse_used(folder)
    with Run(words, folder / "undisturbed", workers, host) as calm:
        print(f"undisturbed: {workers} workers{f', {steps[0]} steps' if steps else ''}, in {calm.folder}", flush=True)
        if calm.agent.wait():
            raise calm.failure("the undisturbed run")
    last, save_every = steps or steps_between_faults(calm)
    planned = plan(seed, faults, last, workers, save_every)
    with Run(words, folder / "disturbed", workers, host) as wild:
        print(f"disturbed:   {len(planned)} faults, seed {seed}, in {wild.folder}\n", flush=True)
        print(f"{'fault':<11} {'at step':>8} {'noticed after':>14} {'back after':>11} {'steps lost':>11}")
        disturb(wild, planned, workers, seed, lambda felt: print(row(felt), flush=True))
        if wild.agent.wait():
            raise wild.failure("the disturbed run")
    lines = [digest_line(run.folder, None) for run in (calm, wild)]
    print(f"\nundisturbed  {lines[0]}\ndisturbed    {lines[1]}")
    return compare(lines)


def steps_between_faults(calm: Run) -> tuple[int, int]:
    """(the last step of a user's own loop, the steps from one checkpoint to the next). UsageError when it writes no metrics."""
    saved, last = checkpoints_of(calm), last_step(calm.metrics, below=sys.maxsize)
    if not last:
        raise UsageError(
            f"the loop has written no step to {calm.metrics}",
            "faults strike after a step that the metrics have",
            "call tracker.step(step, {...}) of a Tracker(out, ...) after each step; or leave --faults out for the self-check",
        )
    return last, min((later - step for step, later in pairwise([0, *saved])), default=0)


def checkpoints_of(run: Run) -> list[int]:
    """The steps that a user's own loop has saved. UsageError when there is none to compare."""
    saved = committed_steps(run.folder / "checkpoints")
    if not saved:
        raise UsageError(
            f"the loop has saved no checkpoint in {run.folder / 'checkpoints'}",
            "a drill compares the last checkpoints",
            "give the function a parameter `out`, save with Checkpointer(out / 'checkpoints', ...), and end with keeper.save(step)",
        )
    return saved


def self_check(words: Sequence[str], folder: Path, *, workers: int, host: str) -> int:
    """Train a user's own loop on 1 and on `workers` workers, through a kill and through a resume, and compare; 0 only when the hashes
    are equal. A failed run raises an error with its message and exit code.

    words  FILE.py:FUNCTION and the options of the function
    """
    if workers < 2:
        raise UsageError(f"a self-check with --workers {workers}", "command line", "give 2 or more: they are compared with one")
    refuse_used(folder)
    print(f"{words[0]}, in {folder}\n", flush=True)
    lines = [train_once(words, folder / "one", "1 worker", 1, host)]
    saved, last = committed_steps(folder / "one" / "checkpoints")[-1], last_step(folder / "one" / "metrics.jsonl", below=sys.maxsize)
    if saved < last:
        print(f"  the last checkpoint is of step {saved}, and the run took {last}: end with keeper.save(step) to compare the rest, too")
    if max(saved, last) < 2:
        raise UsageError("a run of one step", words[0], "let the function take two steps or more: a worker is lost between them")
    middle = max(saved, last) // 2
    killed, stopped = f"{workers} workers, one killed in step {middle} and replaced", f"{workers} workers, stopped after step {middle}"
    lines.append(train_once(words, folder / "several", f"{workers} workers", workers, host))
    lines.append(train_once(words, folder / "killed", killed, workers, host, "kill", middle))
    train_once(words, folder / "resumed", stopped, workers, host, "term", middle)
    lines.append(train_once(words, folder / "resumed", "1 worker, resumed from there", 1, host))
    print()
    return compare(lines)


def train_once(
    words: Sequence[str], folder: Path, title: str, workers: int, host: str, strike: Literal["", "kill", "term"] = "", step: int = 0
) -> str:
    """Train, print a line of the table, and return the hash of the last checkpoint; "" where the run was stopped before its end.

    title   in the table
    strike  fault that the last worker applies to itself in `step`
    """
    code = SAVED_AND_STOPPED if strike == "term" else 0
    if strike:
        request_fault(state_folder(folder, host), workers - 1, strike, at="forward", step=step)
    with Run(words, folder, workers, host, least=workers) as run:
        ended = run.agent.wait()
    struck = ended == code if strike == "term" else any("SIGKILL" in one.get("why", "") for one in events.read_events(folder))
    if ended not in (0, code):
        raise run.failure(title)
    if strike and not struck:
        raise UsageError(
            f"no worker was in step {step}: {title} went by undisturbed",
            f"{words[0]}; a worker is struck inside of `for k in team.micro_batches(step)`",
            "a loop that is checked trains with a ReplicaGroup, and takes the same steps whatever the number of workers",
        )
    checkpoints_of(run)
    line = "" if code else digest_line(folder, None)
    print(f"{title:<46} {line or f'saved, exit code {ended}'}", flush=True)
    return line


def refuse_used(folder: Path) -> None:
    """UsageError when something is in `folder`."""
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", "--out", "give a new folder: a drill begins at step 0")


def compare(lines: Sequence[str]) -> int:
    """Print whether the hashes are equal; return the exit code."""
    print("the same bits" if len(set(lines)) == 1 else "NOT the same bits")
    return 0 if len(set(lines)) == 1 else 1


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the trainings of the drill end too."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def row(felt: Felt) -> str:
    """A line of the table."""
    noticed = format_duration(felt.noticed_s) if felt.noticed_s is not None else "not needed"
    return f"{felt.fault:<11} {felt.step:>8,} {noticed:>14} {format_duration(felt.back_s):>11} {felt.lost:>11,}"
