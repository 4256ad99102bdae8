"""`lockstep drill`: train several times and compare the hashes of the last checkpoints.

`drill` trains twice: undisturbed, and with random faults. `self_check` trains a user's loop on one
worker, on several, through the loss of a worker, and through a stop and a resume with another
number of workers. The faults:

worker      SIGKILL to a worker
leader      SIGKILL to rank 0
stop        SIGSTOP to a worker for longer than its heartbeat timeout, then SIGCONT
flip        one bit of one weight, in the memory of one worker
agent       SIGKILL to the agent; a new one is started at once, as systemd would
host        SIGKILL to the agent and all its workers; the same command is started again
checkpoint  one bit of the newest checkpoint, then SIGKILL to all workers: an older one must do

With --out s3://BUCKET/PREFIX the runs are in an object store, and so are the checkpoints compared.
The faults hit this host and its working copy.
"""

from __future__ import annotations

import argparse
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
from itertools import pairwise
from pathlib import Path
from typing import Literal

from lockstep.checkpoint.commands import digest_line
from lockstep.checkpoint.folder import committed_steps, folder_name
from lockstep.cli.start import is_script, refuse_layout, workers_per_replica
from lockstep.config.resolve import parse_flags, resolve
from lockstep.elastic.fault_injection import DRILL_VARIABLE, request_fault
from lockstep.elastic.generation_log import NO_GENERATION, Generation, GenerationLog, Member
from lockstep.errors import LockstepError, UsageError
from lockstep.object_store.address import parse_address
from lockstep.object_store.bucket import RunBucket
from lockstep.record.events import read_events
from lockstep.record.metrics import last_step
from lockstep.runtime import status_board
from lockstep.runtime.signals import STOP_EXIT_CODES
from lockstep.runtime.worker_env import ProcessIdentity, running_workers, state_folder
from lockstep.units import format_duration

FAULTS = ("worker", "leader", "stop", "flip", "agent", "host", "checkpoint")
POLL_S = 0.005
PATIENCE_S = 120.0
PATIENCE_STEPS = 20


def main(args: argparse.Namespace, rest: list[str]) -> int:
    folder, host, flags = str(args.out or "runs/drill"), socket.gethostname(), parse_flags(rest)
    folder = str(parse_address(folder) or folder)
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that the runs of the drill exit too
    words = [*([args.target] if args.target else []), *rest]
    if is_script(args.target):
        if args.faults is None:
            return self_check(words, folder, workers=args.workers or 2, host=host)
        return drill(
            words,
            folder,
            workers=args.workers or 3,
            faults=args.faults,
            seed=args.seed,
            steps=None,
            host=host,
        )
    run = resolve(Path(args.target) if args.target else None, flags, os.environ).run
    workers = args.workers or workers_per_replica(run) * (run.layout.replicate or 3)
    refuse_layout(run, workers, "--workers")
    steps = (run.steps, run.checkpoint.every_steps)
    return drill(
        words,
        folder,
        workers=workers,
        faults=args.faults or len(FAULTS),
        seed=args.seed,
        steps=steps,
        host=host,
    )


def drill(
    words: Sequence[str],
    folder: str,
    *,
    workers: int,
    faults: int,
    seed: int,
    steps: tuple[int, int] | None,
    host: str,
) -> int:
    """Train without and with faults; return 0 if the hashes are equal. A failed run is an error.

    words  of `lockstep launch` for the run, without --out and --workers
    folder, or address in an object store, that holds nothing yet
    seed   decides which faults are injected, and when
    steps  (last step, steps between checkpoints); None: those of the undisturbed run
    """
    require_empty(folder)
    with DrillRun(words, f"{folder}/undisturbed", workers, host) as undisturbed:
        print(
            f"undisturbed: {workers} workers{f', {steps[0]} steps' if steps else ''}, in {undisturbed.out}",
            flush=True,
        )
        if undisturbed.agent.wait():
            raise undisturbed.failure("the undisturbed run")
    last, save_every = steps or recorded_steps(undisturbed)
    planned = plan_faults(seed, faults, last, workers, save_every)
    with DrillRun(words, f"{folder}/disturbed", workers, host) as disturbed:
        print(f"disturbed:   {len(planned)} faults, seed {seed}, in {disturbed.out}\n", flush=True)
        print(
            f"{'fault':<11} {'at step':>8} {'noticed after':>14} {'back after':>11} {'steps lost':>11}"
        )
        generator = random.Random(seed)
        for step, fault in planned:
            print(inject_fault(disturbed, fault, step, workers, generator), flush=True)
        if disturbed.agent.wait():
            raise disturbed.failure("the disturbed run")
    digests = [run.digest() for run in (undisturbed, disturbed)]
    print(f"\nundisturbed  {digests[0]}\ndisturbed    {digests[1]}")
    return compare(digests)


def inject_fault(
    run: DrillRun, fault: str, after_step: int, workers: int, generator: random.Random
) -> str:
    """Inject a fault when the run is complete and past `after_step`; return a line of the table."""
    what = f"step {after_step} with {workers} workers"
    run.wait_for(
        lambda: (
            run.committed_steps() >= after_step and len(run.newest_generation().members) == workers
        ),
        what,
    )
    step, before = run.committed_steps(), run.newest_generation().number
    started_s = time.monotonic()
    run.inject(fault, generator)
    detected = "not needed"
    if fault != "agent":
        run.wait_for(
            lambda: run.newest_generation().number > before,
            f"a new generation after {fault!r} at step {step}",
        )
        detected = format_duration(time.monotonic() - started_s)
    run.resume_stopped()
    resumed, steps = run.newest_generation().step, run.committed_steps()
    run.wait_for(lambda: run.committed_steps() != steps, f"a step after {fault!r} at step {step}")
    if not resumed:  # all workers restarted from a checkpoint
        resumed = run.committed_steps()
        run.wait_for(lambda: run.committed_steps() >= step, f"step {step} again after {fault!r}")
    lost_steps = max(0, step - resumed) if fault != "agent" else 0
    return f"{fault:<11} {step:>8,} {detected:>14} {format_duration(time.monotonic() - started_s):>11} {lost_steps:>11,}"


def recorded_steps(run: DrillRun) -> tuple[int, int]:
    saved, last = saved_steps(run), last_step(run.metrics, below=sys.maxsize)
    if not last:
        raise UsageError(
            f"the loop has written no step to {run.metrics}",
            "faults are injected after a step that is in the metrics",
            "call tracker.step(step, {...}) of a Tracker(out, ...) after each step; or remove --faults for the self-check",
        )
    return last, min((later - step for step, later in pairwise([0, *saved])), default=0)


def saved_steps(run: DrillRun) -> list[int]:
    saved = committed_steps(run.folder / "checkpoints")
    if not saved:
        raise UsageError(
            f"the loop has saved no checkpoint in {run.folder / 'checkpoints'}",
            "a drill compares the last checkpoints",
            "use a Session(out, ...) with the function's parameter `out`, or a Checkpointer(out / 'checkpoints', ...) and its save(step)",
        )
    return saved


def self_check(words: Sequence[str], folder: str, *, workers: int, host: str) -> int:
    """Train a user's loop on 1 and on `workers` workers, through a kill and a resume, and compare.
    words: FILE.py:FUNCTION and the options of the function."""
    if workers < 2:
        raise UsageError(
            f"--workers {workers} is too few for a self-check",
            "command line",
            "give 2 or more: they are compared with one",
        )
    require_empty(folder)
    print(f"{words[0]}, in {folder}\n", flush=True)
    digest, saved, last = train_once(words, f"{folder}/one", "1 worker", 1, host)
    digests = [digest]
    if named := unsaved_state(log_of(f"{folder}/one").read_text(errors="replace")):
        print(f"  {named}", flush=True)
    if saved < last:
        print(
            f"  the last checkpoint is of step {saved} of {last}: save after the last step to compare all of them"
        )
    if max(saved, last) < 2:
        raise UsageError(
            "the run has one step",
            words[0],
            "train two steps or more: a worker is killed between them",
        )
    middle = max(saved, last) // 2
    killed, stopped = (
        f"{workers} workers, one killed in step {middle} and replaced",
        f"{workers} workers, stopped after step {middle}",
    )
    digests.append(train_once(words, f"{folder}/several", f"{workers} workers", workers, host)[0])
    digests.append(
        train_once(words, f"{folder}/killed", killed, workers, host, ("kill", middle))[0]
    )
    train_once(words, f"{folder}/resumed", stopped, workers, host, ("term", middle))
    digests.append(
        train_once(words, f"{folder}/resumed", "1 worker, resumed from there", 1, host)[0]
    )
    print()
    return compare(digests)


def train_once(
    words: Sequence[str],
    out: str,
    title: str,
    workers: int,
    host: str,
    fault: tuple[Literal["kill", "term"], int] | None = None,
) -> tuple[str, int, int]:
    """Train, print a line of the table, and return (the last hash, "" if the fault stopped the run;
    step of the last checkpoint; last step in the metrics).
    fault: (kind, step) of a fault that the last worker injects into itself."""
    kind, step = fault or ("", 0)
    expected = STOP_EXIT_CODES["SIGTERM"] if kind == "term" else 0
    if fault:
        request_fault(
            state_folder(local_folder_of(out), host), workers - 1, fault[0], at="forward", step=step
        )
    with DrillRun(words, out, workers, host, min_workers=workers) as run:
        code = run.agent.wait()
    if code not in (0, expected):
        raise run.failure(title)
    injected = (
        code == expected
        if kind == "term"
        else any("SIGKILL" in event.get("why", "") for event in read_events(run.folder))
    )
    if fault and not injected:
        raise UsageError(
            f"no worker reached step {step}: {title} had no fault",
            f"{words[0]}; the fault is injected in `for batch in loader(step)`",
            "train with a Session or a ReplicaGroup, and take the same steps on any number of workers",
        )
    saved = saved_steps(run)[-1]
    digest = "" if expected else run.digest()
    print(f"{title:<46} {digest or f'saved, exit code {code}'}", flush=True)
    return digest, saved, last_step(run.metrics, below=sys.maxsize)


def log_of(out: str) -> Path:
    """Return the file with the output of a run: a working copy is made by its run, so it is beside
    it."""
    folder = local_folder_of(out)
    return (folder.parent if parse_address(out) else folder) / "drill.log"


def unsaved_state(log: str) -> str:
    """Return what a run has named as state that no checkpoint holds; "" without."""
    found = re.search(r"the loop changes what no checkpoint holds: .*?(?=\. After a resume)", log)
    return found[0] if found else ""


def require_empty(out: str) -> None:
    address = parse_address(out)
    if RunBucket(address).names() if address else os.path.isdir(out) and os.listdir(out):
        raise UsageError(
            f"{out} is not empty", "--out", "give a new folder: a drill starts at step 0"
        )


def local_folder_of(out: str) -> Path:
    """Return the folder in which the workers of this host train."""
    address = parse_address(out)
    return address.working_copy if address else Path(out)


def compare(digests: Sequence[str]) -> int:
    equal = len(set(digests)) == 1
    print("the same bits" if equal else "NOT the same bits")
    return 0 if equal else 1


def plan_faults(
    seed: int, faults: int, steps: int, workers: int, save_every: int
) -> list[tuple[int, str]]:
    """Return (step, fault) of each fault in order, with every kind once before any repeats. `stop`
    needs a second worker, `flip` two others to compare with, `checkpoint` an earlier checkpoint."""
    generator = random.Random(seed)
    last, two_saved = max(2, steps - 3), 2 * save_every + 1 if save_every else steps
    excluded = {"flip": workers < 3, "stop": workers < 2, "checkpoint": two_saved >= last}
    kinds = [fault for fault in FAULTS if not excluded.get(fault)]
    chosen: list[str] = []
    while len(chosen) < faults:
        chosen += generator.sample(kinds, len(kinds))
    planned = zip(
        sorted(generator.randrange(1, last) for _ in range(faults)), chosen[:faults], strict=True
    )
    delayed = [
        (
            generator.randrange(two_saved, last)
            if fault == "checkpoint" and step < two_saved
            else step,
            fault,
        )
        for step, fault in planned
    ]
    return sorted(delayed, key=lambda entry: entry[0])


class DrillRun(AbstractContextManager["DrillRun"]):
    """A run with its own agent, started by `lockstep launch`.
    agent: the process that was started; with a store it mirrors the run, and the agent is its child
    min_workers: below which training waits
    patience_s: time without progress until `wait_for` gives up; at least 20 median steps."""

    patience_s = PATIENCE_S

    def __init__(
        self, words: Sequence[str], out: str, workers: int, host: str, *, min_workers: int = 1
    ) -> None:
        self.out, self.folder, self.host = out, local_folder_of(out), host
        counts = ["--workers", str(workers), "--min", str(min_workers)]
        self.command = [sys.executable, "-m", "lockstep", "launch", *words, "--out", out, *counts]
        self.generations = GenerationLog(self.folder / "generations")
        self.metrics = self.folder / "metrics.jsonl"
        self.log = log_of(out)
        self.stopped: list[Member] = []
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.start_agent()

    def __exit__(self, *_: object) -> None:
        """Kill the agent, then the workers, which outlive it."""
        if self.agent.poll() is None:
            self.kill_agent()
            self.agent.kill()
            self.agent.wait()
        while workers := running_workers(state_folder(self.folder, self.host)).values():
            self.kill([*workers])
            time.sleep(POLL_S)

    def start_agent(self) -> None:
        environ = {**os.environ, DRILL_VARIABLE: "1"}
        with open(self.log, "ab") as output:
            self.agent = subprocess.Popen(
                self.command, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def kill_agent(self) -> None:
        """Kill the agent. With a store the process that mirrors ends after it."""
        started = self.agent.pid
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            children = Path(f"/proc/{started}/task/{started}/children").read_text().split()
            for pid in map(int, children) if parse_address(self.out) else [started]:
                os.kill(pid, signal.SIGKILL)

    def digest(self) -> str:
        """Return `step S sha256 HEX` of the last checkpoint; with a store, of what the store
        holds."""
        if not parse_address(self.out):
            return digest_line(self.folder, None)
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
            return self.generations.newest() or NO_GENERATION
        return NO_GENERATION

    def progress(self) -> tuple[tuple[object, ...], float]:
        """Return (values that change with any progress, the median seconds of a step)."""
        values: list[object] = [self.newest_generation().number]
        values += [
            path.stat().st_size
            for path in (self.log, self.metrics, self.folder / "events.jsonl")
            if path.exists()
        ]
        statuses = []
        for path in sorted(state_folder(self.folder, self.host).glob("[0-9]*.board")):
            with suppress(OSError):
                statuses.append(status_board.read_status(path))
        values += [
            (status.pid, status.step, status.phase, status.collective) for status in statuses
        ]
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
                raise LockstepError(
                    what, str(self.log), "lockstep status shows what the workers are doing"
                )
            time.sleep(POLL_S)

    def failure(self, what: str) -> LockstepError:
        """Return the run's failure, from its generation log or the last error in its log."""
        code, end, text = (
            self.agent.wait(),
            self.newest_generation().end,
            self.log.read_text(errors="replace"),
        )
        errors = re.split(r"^(?=\w+Error: )", text, flags=re.MULTILINE)[1:] or [
            "\n".join(text.splitlines()[-10:])
        ]
        reason = end.text if end and end.text else errors[-1]
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
                state_folder(self.folder, self.host),
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
        path = generator.choice(
            sorted(
                (checkpoints / folder_name(committed_steps(checkpoints)[-1])).glob("*.safetensors")
            )
        )
        with open(path, "r+b") as file:
            position = generator.randrange(path.stat().st_size)
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ (1 << generator.randrange(8))]))
