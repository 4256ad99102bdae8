"""`lockstep drill`: train several times and compare the hashes of the last checkpoints.

`drill` trains twice: undisturbed, and with random faults (cli/drill_run.py). `self_check` trains a
user's loop on one worker, on several, through the loss of a worker, and through a stop and a resume
with another number of workers.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from lockstep.checkpoint.commands import digest_line
from lockstep.checkpoint.folder import committed_steps
from lockstep.cli.drill_run import FAULTS, DrillRun, plan_faults
from lockstep.cli.run_request import is_script
from lockstep.cli.start import refuse_layout, workers_per_replica
from lockstep.config.resolve import parse_flags, resolve
from lockstep.elastic.fault_injection import request_fault
from lockstep.elastic.generation_log import Generation
from lockstep.errors import UsageError
from lockstep.record.events import read_events
from lockstep.record.metrics import last_step
from lockstep.runtime.signals import stop_exit_code
from lockstep.runtime.worker_env import state_folder
from lockstep.units import format_duration


def main(args: argparse.Namespace, rest: list[str]) -> int:
    folder, host, flags = args.out or Path("runs") / "drill", socket.gethostname(), parse_flags(rest)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the runs of the drill exit too
    words = [*([args.target] if args.target else []), *rest]
    if is_script(args.target):
        if args.faults is None:
            return self_check(words, folder, workers=args.workers or 2, host=host)
        return drill(words, folder, workers=args.workers or 3, faults=args.faults, seed=args.seed, steps=None, host=host)
    run = resolve(Path(args.target) if args.target else None, flags, os.environ).run
    workers = args.workers or workers_per_replica(run) * (run.layout.replicate or 3)
    refuse_layout(run, workers, "--workers")
    steps = (run.steps, run.checkpoint.every_steps)
    return drill(words, folder, workers=workers, faults=args.faults or len(FAULTS), seed=args.seed, steps=steps, host=host)


def drill(words: Sequence[str], folder: Path, *, workers: int, faults: int, seed: int, steps: tuple[int, int] | None, host: str) -> int:
    """Train without and with faults; return 0 if the hashes are equal. A failed run is an error.

    words  of `lockstep launch` for the run, without --out and --workers
    seed   decides which faults are injected, and when
    steps  (last step, steps between checkpoints); None: those of the undisturbed run
    """
    require_empty(folder)
    with DrillRun(words, folder / "undisturbed", workers, host) as undisturbed:
        print(f"undisturbed: {workers} workers{f', {steps[0]} steps' if steps else ''}, in {undisturbed.folder}", flush=True)
        if undisturbed.agent.wait():
            raise undisturbed.failure("the undisturbed run")
    last, save_every = steps or recorded_steps(undisturbed)
    planned = plan_faults(seed, faults, last, workers, save_every)
    with DrillRun(words, folder / "disturbed", workers, host) as disturbed:
        print(f"disturbed:   {len(planned)} faults, seed {seed}, in {disturbed.folder}\n", flush=True)
        print(f"{'fault':<11} {'at step':>8} {'noticed after':>14} {'back after':>11} {'steps lost':>11}")
        generator = random.Random(seed)
        for step, fault in planned:
            print(inject_fault(disturbed, fault, step, workers, generator), flush=True)
        if disturbed.agent.wait():
            raise disturbed.failure("the disturbed run")
    digests = [digest_line(run.folder, None) for run in (undisturbed, disturbed)]
    print(f"\nundisturbed  {digests[0]}\ndisturbed    {digests[1]}")
    return compare(digests)


def inject_fault(run: DrillRun, fault: str, after_step: int, workers: int, generator: random.Random) -> str:
    """Inject a fault when the run is complete and past `after_step`; return a line of the table."""
    run.wait_for(lambda: run.committed_steps() >= after_step and len(run.members()) == workers, f"step {after_step} with {workers} workers")
    step, before = run.committed_steps(), run.newest_generation()
    started_s = time.monotonic()
    run.inject(fault, generator)
    detected = "not needed"
    if fault != "agent":
        run.wait_for(lambda: is_newer(run.newest_generation(), before), f"a new generation after {fault!r} at step {step}")
        detected = format_duration(time.monotonic() - started_s)
    run.resume_stopped()
    generation, steps = run.newest_generation(), run.committed_steps()
    resumed = generation.step if generation else 0
    run.wait_for(lambda: run.committed_steps() != steps, f"a step after {fault!r} at step {step}")
    if not resumed:  # all workers restarted from a checkpoint
        resumed = run.committed_steps()
        run.wait_for(lambda: run.committed_steps() >= step, f"step {step} again after {fault!r}")
    lost_steps = max(0, step - resumed) if fault != "agent" else 0
    return f"{fault:<11} {step:>8,} {detected:>14} {format_duration(time.monotonic() - started_s):>11} {lost_steps:>11,}"


def is_newer(generation: Generation | None, before: Generation | None) -> bool:
    return generation is not None and (before is None or generation.number > before.number)


def recorded_steps(run: DrillRun) -> tuple[int, int]:
    """Return (last step, steps between checkpoints) of a user's loop. UsageError if it records none."""
    saved, last = saved_steps(run), last_step(run.metrics, below=sys.maxsize)
    if not last:
        raise UsageError(
            f"the loop has written no step to {run.metrics}",
            "faults are injected after a step that is in the metrics",
            "call tracker.step(step, {...}) of a Tracker(out, ...) after each step; or remove --faults for the self-check",
        )
    return last, min((later - step for step, later in pairwise([0, *saved])), default=0)


def saved_steps(run: DrillRun) -> list[int]:
    """Return the steps that a user's loop has saved. UsageError if there are none."""
    saved = committed_steps(run.folder / "checkpoints")
    if not saved:
        raise UsageError(
            f"the loop has saved no checkpoint in {run.folder / 'checkpoints'}",
            "a drill compares the last checkpoints",
            "use a Session(out, ...) with the function's parameter `out`, or a Checkpointer(out / 'checkpoints', ...) and its save(step)",
        )
    return saved


def self_check(words: Sequence[str], folder: Path, *, workers: int, host: str) -> int:
    """Train a user's loop on 1 and on `workers` workers, through a kill and a resume, and compare.

    words  FILE.py:FUNCTION and the options of the function
    """
    if workers < 2:
        raise UsageError(f"--workers {workers} is too few for a self-check", "command line", "give 2 or more: they are compared with one")
    require_empty(folder)
    print(f"{words[0]}, in {folder}\n", flush=True)
    digests = [train_once(words, folder / "one", "1 worker", 1, host)]
    saved, last = committed_steps(folder / "one" / "checkpoints")[-1], last_step(folder / "one" / "metrics.jsonl", below=sys.maxsize)
    if saved < last:
        print(f"  the last checkpoint is of step {saved} of {last}: save after the last step to compare all of them")
    if max(saved, last) < 2:
        raise UsageError("the run has one step", words[0], "train two steps or more: a worker is killed between them")
    middle = max(saved, last) // 2
    killed, stopped = f"{workers} workers, one killed in step {middle} and replaced", f"{workers} workers, stopped after step {middle}"
    digests.append(train_once(words, folder / "several", f"{workers} workers", workers, host))
    digests.append(train_once(words, folder / "killed", killed, workers, host, ("kill", middle)))
    train_once(words, folder / "resumed", stopped, workers, host, ("term", middle))
    digests.append(train_once(words, folder / "resumed", "1 worker, resumed from there", 1, host))
    print()
    return compare(digests)


def train_once(
    words: Sequence[str], folder: Path, title: str, workers: int, host: str, fault: tuple[Literal["kill", "term"], int] | None = None
) -> str:
    """Train, print a line of the table, and return the last hash; "" if the fault stopped the run.

    fault  (kind, step) of a fault that the last worker injects into itself
    """
    kind, step = fault or ("", 0)
    expected = stop_exit_code("SIGTERM") if kind == "term" else 0
    if fault:
        request_fault(state_folder(folder, host), workers - 1, fault[0], at="forward", step=step)
    with DrillRun(words, folder, workers, host, min_workers=workers) as run:
        code = run.agent.wait()
    if code not in (0, expected):
        raise run.failure(title)
    injected = code == expected if kind == "term" else any("SIGKILL" in event.get("why", "") for event in read_events(folder))
    if fault and not injected:
        raise UsageError(
            f"no worker reached step {step}: {title} had no fault",
            f"{words[0]}; the fault is injected in `for k in replicas.micro_batches(step)`",
            "train with a Session or a ReplicaGroup, and take the same steps on any number of workers",
        )
    saved_steps(run)
    digest = "" if expected else digest_line(folder, None)
    print(f"{title:<46} {digest or f'saved, exit code {code}'}", flush=True)
    return digest


def require_empty(folder: Path) -> None:
    """UsageError if `folder` is not empty."""
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", "--out", "give a new folder: a drill starts at step 0")


def compare(digests: Sequence[str]) -> int:
    """Print whether the hashes are equal; return the exit code."""
    equal = len(set(digests)) == 1
    print("the same bits" if equal else "NOT the same bits")
    return 0 if equal else 1
