"""The promise made to a user's own machine: train twice, once undisturbed and once with random faults, and compare the hashes.

worker      SIGKILL to a worker                 leader      SIGKILL to the worker that leads
stop        SIGSTOP for longer than a worker may be silent, then SIGCONT
flip        one bit of one weight, in the memory of one worker
agent       SIGKILL to the agent; a new one is started at once, as systemd would
host        SIGKILL to the agent and all its workers; the same command is started again
checkpoint  a bit of the newest checkpoint, and then SIGKILL to all workers: the one before must serve
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.commands import digest_line
from lockstep.checkpoint.seal import committed_steps, folder_name
from lockstep.errors import LockstepError, UsageError
from lockstep.membership.arbiter import Arbiter, Member, Record
from lockstep.membership.fault import DRILL, order
from lockstep.membership.seat import Sitter, sitters, state_folder
from lockstep.units import show_seconds

log = logging.getLogger("lockstep")
FAULTS = ("worker", "leader", "stop", "flip", "agent", "host", "checkpoint")
POLL_S = 0.005
PATIENCE_S = 120.0


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
    """A training under its own agent, as a person would start it."""

    def __init__(self, words: Sequence[str], folder: Path, workers: int, host: str) -> None:
        self.folder, self.host = folder, host
        self.command = [sys.executable, "-m", "lockstep", "launch", *words, "--out", str(folder), "--workers", str(workers)]
        self.arbiter = Arbiter(folder / "generations")
        self.metrics = folder / "metrics.jsonl"
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
        while left := sitters(state_folder(self.folder, self.host)).values():
            self.kill([*left])
            time.sleep(POLL_S)

    def start(self) -> None:
        """Start the agent, or another one in its place."""
        environ = {**os.environ, DRILL: "1"}
        with open(self.folder / "drill.log", "ab") as output:
            self.agent = subprocess.Popen(self.command, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def step(self) -> int:
        """Committed steps, as far as the metrics have them."""
        with suppress(OSError):
            return self.metrics.read_bytes().count(b"\n")
        return 0

    def newest(self) -> Record | None:
        """The newest generation."""
        with suppress(OSError):
            return self.arbiter.newest()
        return None

    def members(self) -> list[Member]:
        """Those of the newest generation."""
        record = self.newest()
        return list(record.members) if record else []

    def wait_for(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds until `condition` holds. LockstepError when it never does, or the run ends first."""
        began_s = time.monotonic()
        while not condition():
            if self.agent.poll() is not None:
                raise LockstepError(f"the run ended with exit code {self.agent.returncode} before {what}", str(self.folder / "drill.log"))
            if time.monotonic() - began_s > PATIENCE_S:
                raise LockstepError(f"{what} did not come within {PATIENCE_S:g} s", str(self.folder / "drill.log"))
            time.sleep(POLL_S)
        return time.monotonic() - began_s

    def kill(self, members: Sequence[Member | Sitter], number: int = signal.SIGKILL) -> None:
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
            order(state_folder(self.folder, self.host), chance.choice(members).slot, "flip", at="forward")
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


def changed(now: Record | None, before: Record | None) -> bool:
    """Whether there is a newer generation."""
    return now is not None and (before is None or now.number > before.number)


def drill(words: Sequence[str], folder: Path, *, workers: int, faults: Sequence[tuple[int, str]], seed: int, steps: int, host: str) -> int:
    """Train twice and compare; 0 only when the hashes are equal. SIGTERM ends both trainings, too.

    words   of `lockstep launch` for the run, without --out and --workers
    faults  as planned; where each strikes follows from `seed`
    steps   the run's last step
    host    what this machine calls itself
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        return train_twice(words, folder, workers, faults, seed, steps, host)
    finally:
        signal.signal(signal.SIGTERM, before)


def train_twice(
    words: Sequence[str], folder: Path, workers: int, faults: Sequence[tuple[int, str]], seed: int, steps: int, host: str
) -> int:
    """Undisturbed and disturbed."""
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", "--out", "give a new folder: a drill begins at step 0")
    with Run(words, folder / "undisturbed", workers, host) as calm:
        print(f"undisturbed: {workers} workers, {steps} steps, in {calm.folder}", flush=True)
        if code := calm.agent.wait():
            raise LockstepError(f"the undisturbed run ended with exit code {code}", str(calm.folder / "drill.log"))
    with Run(words, folder / "disturbed", workers, host) as wild:
        print(f"disturbed:   {len(faults)} faults, seed {seed}, in {wild.folder}\n", flush=True)
        print(f"{'fault':<11} {'at step':>8} {'noticed after':>14} {'back after':>11} {'steps lost':>11}")
        disturb(wild, faults, workers, seed, lambda felt: print(row(felt), flush=True))
        code = wild.agent.wait()
    if code:
        raise LockstepError(f"the disturbed run ended with exit code {code}", str(wild.folder / "drill.log"))
    lines = [digest_line(run.folder, None) for run in (calm, wild)]
    print(f"\nundisturbed  {lines[0]}\ndisturbed    {lines[1]}")
    print("the same bits" if lines[0] == lines[1] else "NOT the same bits")
    return 0 if lines[0] == lines[1] else 1


def row(felt: Felt) -> str:
    """A line of the table."""
    noticed = show_seconds(felt.noticed_s) if felt.noticed_s is not None else "not needed"
    return f"{felt.fault:<11} {felt.step:>8,} {noticed:>14} {show_seconds(felt.back_s):>11} {felt.lost:>11,}"
