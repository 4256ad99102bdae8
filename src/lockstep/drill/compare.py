"""Train several times and compare the hashes of the last checkpoints.

`drill` trains twice: undisturbed, and with random faults (run.py). `self_check` trains a user's
loop on one worker, on several, through the loss of a worker, and through a stop and a resume with
another number of workers.
"""

from __future__ import annotations

import random
import re
import socket
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from lockstep.checkpoint.folder import committed_steps
from lockstep.drill.run import DrillRun, plan_faults
from lockstep.elastic.fault_injection import request_fault
from lockstep.errors import UsageError
from lockstep.record.events import read_events
from lockstep.record.metrics import last_step
from lockstep.remote.working_copy import RunPlace
from lockstep.runtime.signals import STOP_EXIT_CODES
from lockstep.runtime.worker_env import state_folder
from lockstep.units import format_duration


def drill(
    words: Sequence[str],
    folder: str,
    *,
    workers: int,
    faults: int,
    seed: int,
    steps: tuple[int, int] | None,
) -> int:
    """Train without and with faults; return 0 if the hashes are equal. A failed run is an error.

    words  of `lockstep launch` for the run, without --out and --workers
    folder, or address in an object store, that holds nothing yet
    seed   decides which faults are injected, and when
    steps  (last step, steps between checkpoints); None: those of the undisturbed run
    """
    require_empty(folder)
    with DrillRun(words, f"{folder}/undisturbed", workers) as undisturbed:
        counted = f", {steps[0]} steps" if steps else ""
        print(f"undisturbed: {workers} workers{counted}, in {undisturbed.out}", flush=True)
        undisturbed.wait("the undisturbed run")
    last, save_every = steps or recorded_steps(undisturbed)
    planned = plan_faults(seed, faults, last, workers, save_every)
    with DrillRun(words, f"{folder}/disturbed", workers) as disturbed:
        print(f"disturbed:   {len(planned)} faults, seed {seed}, in {disturbed.out}\n", flush=True)
        print(
            f"{'fault':<11} {'at step':>8} "
            f"{'noticed after':>14} {'back after':>11} {'steps lost':>11}"
        )
        generator = random.Random(seed)
        for step, fault in planned:
            print(inject_fault(disturbed, fault, step, workers, generator), flush=True)
        disturbed.wait("the disturbed run")
    digests = [undisturbed.digest(), disturbed.digest()]
    print(f"\nundisturbed  {digests[0]}\ndisturbed    {digests[1]}")
    return compare(digests)


def inject_fault(
    run: DrillRun, fault: str, after_step: int, workers: int, generator: random.Random
) -> str:
    """Inject a fault when the run is complete and past `after_step`; return a line of the table."""
    run.wait_for(
        lambda: (
            run.committed_steps() >= after_step and len(run.newest_generation().members) == workers
        ),
        f"step {after_step} with {workers} workers",
    )
    step = run.committed_steps()
    before = run.newest_generation().number
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
    resumed = run.newest_generation().step
    steps = run.committed_steps()
    run.wait_for(lambda: run.committed_steps() != steps, f"a step after {fault!r} at step {step}")
    if not resumed:  # all workers restarted from a checkpoint
        resumed = run.committed_steps()
        run.wait_for(lambda: run.committed_steps() >= step, f"step {step} again after {fault!r}")
    back = format_duration(time.monotonic() - started_s)
    lost_steps = max(0, step - resumed) if fault != "agent" else 0
    return f"{fault:<11} {step:>8,} {detected:>14} {back:>11} {lost_steps:>11,}"


def recorded_steps(run: DrillRun) -> tuple[int, int]:
    saved = saved_steps(run)
    last = last_step(run.metrics, below=sys.maxsize)
    if not last:
        raise UsageError(
            f"the loop has written no step to {run.metrics}",
            "faults are injected after a step that is in the metrics",
            "call tracker.step(step, {...}) of a Tracker(out, ...) after each step; "
            "or remove --faults for the self-check",
        )
    return last, min(later - step for step, later in pairwise([0, *saved]))


def saved_steps(run: DrillRun) -> list[int]:
    saved = committed_steps(run.folder / "checkpoints")
    if not saved:
        raise UsageError(
            f"the loop has saved no checkpoint in {run.folder / 'checkpoints'}",
            "a drill compares the last checkpoints",
            "use a Session(out, ...) with the function's parameter `out`, "
            "or a Checkpointer(out / 'checkpoints', ...) and its save(step)",
        )
    return saved


def self_check(words: Sequence[str], folder: str, workers: int) -> int:
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
    alone, digest = train_once(words, f"{folder}/one", "1 worker", 1)
    digests = [digest]
    saved = saved_steps(alone)[-1]
    last = last_step(alone.metrics, below=sys.maxsize)
    if named := unsaved_state(alone.log.read_text(errors="replace")):
        print(f"  {named}", flush=True)
    if saved < last:
        print(
            f"  the last checkpoint is of step {saved} of {last}: "
            "save after the last step to compare all of them"
        )
    if max(saved, last) < 2:
        raise UsageError(
            "the run has one step",
            words[0],
            "train two steps or more: a worker is killed between them",
        )
    middle = max(saved, last) // 2
    several = f"{workers} workers"
    killed = f"{several}, one killed in step {middle} and replaced"
    stopped = f"{several}, stopped after step {middle}"
    resumed = f"{folder}/resumed"
    digests.append(train_once(words, f"{folder}/several", several, workers)[1])
    digests.append(train_once(words, f"{folder}/killed", killed, workers, ("kill", middle))[1])
    train_once(words, resumed, stopped, workers, ("term", middle))
    digests.append(train_once(words, resumed, "1 worker, resumed from there", 1)[1])
    print()
    return compare(digests)


def train_once(
    words: Sequence[str],
    out: str,
    title: str,
    workers: int,
    fault: tuple[Literal["kill", "term"], int] | None = None,
) -> tuple[DrillRun, str]:
    """Train, print a line of the table, and return the run and its last hash, "" if it was stopped.
    fault: (kind, step) of a fault that the last worker injects into itself"""
    kind, step = fault or ("", 0)
    expected = STOP_EXIT_CODES["SIGTERM"] if kind == "term" else 0
    if fault:
        state = state_folder(RunPlace(out).folder, socket.gethostname())
        request_fault(state, workers - 1, fault[0], at="forward", step=step)
    with DrillRun(words, out, workers, min_workers=workers) as run:
        code = run.agent.wait()
    if code not in (0, expected):
        raise run.failure(title)
    killed = any("SIGKILL" in event.get("why", "") for event in read_events(run.folder))
    if code != expected or (kind == "kill" and not killed):
        raise UsageError(
            f"no worker reached step {step}: {title} had no fault",
            f"{words[0]}; the fault is injected in `for batch in loader(step)`",
            "train with a Session or a ReplicaGroup, "
            "and take the same steps on any number of workers",
        )
    saved_steps(run)
    digest = "" if expected else run.digest()
    print(f"{title:<46} {digest or f'saved, exit code {code}'}", flush=True)
    return run, digest


def unsaved_state(log: str) -> str:
    """Return what a run has named as state that no checkpoint holds; "" without."""
    found = re.search(r"the loop changes what no checkpoint holds: .*?(?=\. After a resume)", log)
    return found[0] if found else ""


def require_empty(out: str) -> None:
    if not RunPlace(out).is_empty():
        raise UsageError(
            f"{out} is not empty", "--out", "give a new folder: a drill starts at step 1"
        )


def compare(digests: Sequence[str]) -> int:
    equal = len(set(digests)) == 1
    print("the same bits" if equal else "NOT the same bits")
    return 0 if equal else 1
