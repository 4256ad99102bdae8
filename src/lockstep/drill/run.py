"""A run of a drill: a subprocess `lockstep launch`, with faults on purpose.

worker      SIGKILL to a worker
leader      SIGKILL to rank 0
stop        SIGSTOP to a worker for longer than its heartbeat timeout, then SIGCONT
flip        one bit of one weight, in the memory of one worker
agent       SIGKILL to the agent; a new one is started at once, as systemd would
host        SIGKILL to the agent and all its workers; the same command is started again
checkpoint  one bit of the newest checkpoint, then SIGKILL to all workers: an older one must do

In an object store the faults hit this host and its working copy, and the checkpoints compared are
those of the store.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from lockstep.checkpoint.folder import committed_steps, folder_name
from lockstep.elastic.fault_injection import DRILL_VARIABLE, request_fault
from lockstep.elastic.generation_log import NO_GENERATION, Generation, GenerationLog, Member
from lockstep.errors import LockstepError
from lockstep.remote.working_copy import RunPlace
from lockstep.runtime import status_board
from lockstep.runtime.worker_env import ProcessIdentity, running_workers, state_folder
from lockstep.units import format_duration

FAULTS = ("worker", "leader", "stop", "flip", "agent", "host", "checkpoint")
POLL_S = 0.005
PATIENCE_S = 120.0
PATIENCE_STEPS = 20


def plan_faults(
    seed: int, faults: int, steps: int, workers: int, save_every: int
) -> list[tuple[int, str]]:
    """Return (step, fault) of each fault in order, with every kind once before any repeats. `stop`
    needs a second worker, `flip` two others to compare with, `checkpoint` an earlier checkpoint."""
    generator = random.Random(seed)
    last = max(2, steps - 3)
    two_saved = 2 * save_every + 1 if save_every else steps
    excluded = {"flip": workers < 3, "stop": workers < 2, "checkpoint": two_saved >= last}
    kinds = [fault for fault in FAULTS if not excluded.get(fault)]
    chosen: list[str] = []
    while len(chosen) < faults:
        chosen += generator.sample(kinds, len(kinds))
    planned = []
    steps_of_faults = sorted(generator.randrange(1, last) for _ in range(faults))
    for step, fault in zip(steps_of_faults, chosen, strict=False):
        if fault == "checkpoint" and step < two_saved:
            step = generator.randrange(two_saved, last)
        planned.append((step, fault))
    return sorted(planned, key=lambda entry: entry[0])


class DrillRun(AbstractContextManager["DrillRun"]):
    """A run with its own agent, started by `lockstep launch`.
    agent: the process that was started; with a store it mirrors the run, and the agent is its child
    min_workers: below which training waits
    patience_s: time without progress until `wait_for` gives up; at least 20 median steps."""

    patience_s = PATIENCE_S

    def __init__(
        self, words: Sequence[str], out: str, workers: int, *, min_workers: int = 1
    ) -> None:
        counts = ["--workers", str(workers), "--min", str(min_workers)]
        launch = [sys.executable, "-m", "lockstep", "launch", "--out", out, *counts]
        self.command = [*launch, *words]
        self.out = out
        self.place = RunPlace(out)
        self.folder = self.place.folder
        self.state = state_folder(self.folder, socket.gethostname())
        self.generations = GenerationLog(self.folder / "generations")
        self.metrics = self.folder / "metrics.jsonl"
        # A working copy is made by its run, so the log is beside it.
        self.log = self.place.log_folder / "drill.log"
        self.stopped: list[Member] = []
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.start_agent()

    def __exit__(self, *_: object) -> None:
        """Kill the agent, then the workers, which outlive it."""
        if self.agent.poll() is None:
            self.kill_agent()
            self.agent.kill()
            self.agent.wait()
        while workers := running_workers(self.state).values():
            self.kill([*workers])
            time.sleep(POLL_S)

    def start_agent(self) -> None:
        environ = {**os.environ, DRILL_VARIABLE: "1"}
        with open(self.log, "ab") as output:
            self.agent = subprocess.Popen(
                self.command, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def wait(self, name: str) -> None:
        """Return when the run has exited. LockstepError if it failed."""
        if self.agent.wait():
            raise self.failure(name)

    def kill_agent(self) -> None:
        """Kill the agent. With a store the process that mirrors ends after it."""
        started = self.agent.pid
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            children = Path(f"/proc/{started}/task/{started}/children").read_text().split()
            for pid in map(int, children) if self.place.address else [started]:
                os.kill(pid, signal.SIGKILL)

    def digest(self) -> str:
        """Return `step S sha256 HEX` of the last checkpoint, of what a store holds."""
        words = [sys.executable, "-m", "lockstep", "checkpoint", "digest", self.out]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LockstepError(
                f"the checkpoint in {self.out} cannot be read",
                "lockstep checkpoint digest",
                done.stderr.strip(),
            )
        return done.stdout.strip()

    def committed_steps(self) -> int:
        with suppress(OSError):
            return self.metrics.read_bytes().count(b"\n")
        return 0

    def newest_generation(self) -> Generation:
        with suppress(OSError):
            return self.generations.newest()
        return NO_GENERATION

    def progress(self) -> tuple[list[object], float]:
        """Return (values that change with any progress, the median seconds of a step)."""
        values: list[object] = [self.newest_generation().number]
        for path in (self.log, self.metrics, self.folder / "events.jsonl"):
            with suppress(OSError):
                values.append(path.stat().st_size)
        step_s = 0.0
        for path in sorted(self.state.glob("[0-9]*.board")):
            with suppress(OSError):
                status = status_board.read_status(path)
                values.append((status.pid, status.step, status.phase, status.collective))
                step_s = max(step_s, status.step_s)
        return values, step_s

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds. LockstepError if the run exits or stalls first."""
        progress_s = time.monotonic()
        before, _ = self.progress()
        while not condition():
            if self.agent.poll() is not None:
                raise self.failure(f"the run, before {what},")
            now, step_s = self.progress()
            if now != before:
                before, progress_s = now, time.monotonic()
            patience_s = max(self.patience_s, PATIENCE_STEPS * step_s)
            if time.monotonic() - progress_s > patience_s:
                raise LockstepError(
                    f"timed out waiting for {what}: "
                    f"the run has made no progress for {format_duration(patience_s)}",
                    str(self.log),
                    "lockstep status shows what the workers are doing",
                )
            time.sleep(POLL_S)

    def failure(self, what: str) -> LockstepError:
        """Return the run's failure, from its generation log or the last error in its log."""
        code = self.agent.wait()
        end = self.newest_generation().end
        text = self.log.read_text(errors="replace")
        _, *errors = re.split(r"^(?=\w+Error: )", text, flags=re.MULTILINE)
        error_text = errors[-1] if errors else "\n".join(text.splitlines()[-10:])
        reason = end.text if end and end.text else error_text
        error = LockstepError(f"{what} exited with code {code}", f"log: {self.log}", reason)
        error.exit_code = code or LockstepError.exit_code
        return error

    def kill(
        self, members: Sequence[Member | ProcessIdentity], number: int = signal.SIGKILL
    ) -> None:
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member.pid, number)

    def inject(self, fault: str, generator: random.Random) -> None:
        members = self.newest_generation().members
        others = members[1:] or members
        if fault == "worker":
            self.kill([generator.choice(others)])
        elif fault == "leader":
            self.kill(members[:1])
        elif fault == "stop":
            self.stopped = [generator.choice(members)]
            self.kill(self.stopped, signal.SIGSTOP)
        elif fault == "flip":
            request_fault(
                self.state,
                generator.choice(members).slot,
                "flip",
                at="forward",
            )
        elif fault in ("agent", "host"):
            self.kill_agent()
            if fault == "host":
                self.kill(members)
                self.agent.kill()
            self.agent.wait()
            self.start_agent()
        else:
            self.damage_checkpoint(generator)
            self.kill(members)

    def resume_stopped(self) -> None:
        """Send SIGCONT to the stopped worker, which is evicted, unless its agent has killed it."""
        self.kill(self.stopped, signal.SIGCONT)
        self.stopped = []

    def damage_checkpoint(self, generator: random.Random) -> None:
        """Flip a bit of the newest checkpoint, as soon as there is an older one."""
        checkpoints = self.folder / "checkpoints"
        self.wait_for(lambda: len(committed_steps(checkpoints)) > 1, "a second checkpoint")
        newest = checkpoints / folder_name(committed_steps(checkpoints)[-1])
        path = generator.choice(sorted(newest.glob("*.safetensors")))
        with open(path, "r+b") as file:
            position = generator.randrange(path.stat().st_size)
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ (1 << generator.randrange(8))]))
