"""A training run of `lockstep drill`, and the faults that the drill injects into it.

worker      SIGKILL to a worker
leader      SIGKILL to rank 0
stop        SIGSTOP to a worker for longer than its heartbeat timeout, then SIGCONT
flip        one bit of one weight, in the memory of one worker
agent       SIGKILL to the agent; a new one is started at once, as systemd would
host        SIGKILL to the agent and all its workers; the same command is started again
checkpoint  one bit of the newest checkpoint, then SIGKILL to all workers: an older one must do
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.folder import committed_steps, folder_name
from lockstep.elastic.fault_injection import DRILL_VARIABLE, request_fault
from lockstep.elastic.generation_log import Generation, GenerationLog, Member
from lockstep.errors import LockstepError
from lockstep.runtime import status_board
from lockstep.runtime.worker_env import ProcessIdentity, running_workers, state_folder
from lockstep.units import format_duration

FAULTS = ("worker", "leader", "stop", "flip", "agent", "host", "checkpoint")
POLL_S = 0.005
PATIENCE_S = 120.0
PATIENCE_STEPS = 20


def plan_faults(seed: int, faults: int, steps: int, workers: int, save_every: int) -> list[tuple[int, str]]:
    """Return (step, fault) of each fault in order, with every kind once before any repeats.

    `stop` needs a second worker to detect it, `flip` two others to compare with, `checkpoint` an
    earlier checkpoint.
    """
    generator = random.Random(seed)
    last, two_saved = max(2, steps - 3), 2 * save_every + 1 if save_every else steps
    excluded = {"flip": workers < 3, "stop": workers < 2, "checkpoint": two_saved >= last}
    kinds = [fault for fault in FAULTS if not excluded.get(fault)]
    chosen: list[str] = []
    while len(chosen) < faults:
        chosen += generator.sample(kinds, len(kinds))
    planned = zip(sorted(generator.randrange(1, last) for _ in range(faults)), chosen[:faults], strict=True)
    delayed = [
        (generator.randrange(two_saved, last) if fault == "checkpoint" and step < two_saved else step, fault) for step, fault in planned
    ]
    return sorted(delayed, key=lambda entry: entry[0])


class DrillRun:
    """A run with its own agent, started by `lockstep launch`.

    min_workers  below which training waits
    patience_s   time without progress until `wait_for` gives up; at least 20 median steps
    """

    patience_s = PATIENCE_S

    def __init__(self, words: Sequence[str], folder: Path, workers: int, host: str, *, min_workers: int = 1) -> None:
        self.folder, self.host = folder, host
        counts = ["--workers", str(workers), "--min", str(min_workers)]
        self.command = [sys.executable, "-m", "lockstep", "launch", *words, "--out", str(folder), *counts]
        self.generations = GenerationLog(folder / "generations")
        self.metrics, self.log = folder / "metrics.jsonl", folder / "drill.log"
        self.stopped: list[Member] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.start_agent()

    def __enter__(self) -> DrillRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the agent, then the workers, which outlive it."""
        if self.agent.poll() is None:
            self.agent.kill()
            self.agent.wait()
        while workers := running_workers(state_folder(self.folder, self.host)).values():
            self.kill([*workers])
            time.sleep(POLL_S)

    def start_agent(self) -> None:
        environ = {**os.environ, DRILL_VARIABLE: "1"}
        with open(self.log, "ab") as output:
            self.agent = subprocess.Popen(self.command, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def committed_steps(self) -> int:
        """Return the number of steps in the metrics."""
        with suppress(OSError):
            return self.metrics.read_bytes().count(b"\n")
        return 0

    def newest_generation(self) -> Generation | None:
        with suppress(OSError):
            return self.generations.newest()
        return None

    def members(self) -> list[Member]:
        """Return the members of the newest generation."""
        generation = self.newest_generation()
        return list(generation.members) if generation else []

    def progress(self) -> tuple[tuple[object, ...], float]:
        """Return (values that change with any progress, the median seconds of a step)."""
        generation = self.newest_generation()
        values: list[object] = [generation.number if generation else 0]
        values += [path.stat().st_size for path in (self.log, self.metrics, self.folder / "events.jsonl") if path.exists()]
        statuses = []
        for path in sorted(state_folder(self.folder, self.host).glob("[0-9]*.board")):
            with suppress(OSError):
                statuses.append(status_board.read_status(path))
        values += [(status.pid, status.step, status.phase, status.collective) for status in statuses]
        return tuple(values), max((status.step_s for status in statuses), default=0.0)

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
                what = f"timed out waiting for {what}: the run has made no progress for {format_duration(patience_s)}"
                raise LockstepError(what, str(self.log), "lockstep status shows what the workers are doing")
            time.sleep(POLL_S)

    def failure(self, what: str) -> LockstepError:
        """Return the run's failure, from its generation log or the last error in its log."""
        code, generation, text = self.agent.wait(), self.newest_generation(), self.log.read_text(errors="replace")
        errors = re.split(r"^(?=\w+Error: )", text, flags=re.MULTILINE)[1:] or ["\n".join(text.splitlines()[-10:])]
        reason = generation.end.text if generation and generation.end and generation.end.text else errors[-1]
        error = LockstepError(f"{what} exited with code {code}", f"log: {self.log}", reason)
        error.exit_code = code or LockstepError.exit_code
        return error

    def kill(self, members: Sequence[Member | ProcessIdentity], number: int = signal.SIGKILL) -> None:
        for member in members:
            with suppress(ProcessLookupError):
                os.kill(member.pid, number)

    def inject(self, fault: str, generator: random.Random) -> None:
        members = self.members()
        others = members[1:] or members
        if fault == "worker":
            self.kill([generator.choice(others)])
        elif fault == "leader":
            self.kill(members[:1])
        elif fault == "stop":
            self.stopped = [generator.choice(members)]
            self.kill(self.stopped, signal.SIGSTOP)
        elif fault == "flip":
            request_fault(state_folder(self.folder, self.host), generator.choice(members).slot, "flip", at="forward")
        elif fault in ("agent", "host"):
            self.agent.kill()
            if fault == "host":
                self.kill(members)
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
        path = generator.choice(sorted((checkpoints / folder_name(committed_steps(checkpoints)[-1])).glob("*.safetensors")))
        with open(path, "r+b") as file:
            position = generator.randrange(path.stat().st_size)
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ (1 << generator.randrange(8))]))
