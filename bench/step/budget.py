"""Measure what Lockstep adds to a step, item by item: two processes, a thread each, in a Session.

    python -m bench.step.budget                  a model of 47 tensors, and one of 300
    python -m bench.step.budget --seconds 20

`cpu` is the processor time of the thread that runs the item, without other items that run
within it; `waits` the rest of its wall time. Medians over the steps of rank 0, in a step; each
measurement adds two microseconds, so hooks are shown too expensive.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.results import TOP
from bench.step.rounds import Cell, bare_ddp, in_session, more_time
from lockstep import Session
from lockstep.parallel.bucket_source import BucketSource
from lockstep.parallel.buckets import GradientBuckets
from lockstep.parallel.reducer import Reducer
from lockstep.parallel.replica import Replica
from lockstep.training.divergence import ReplicaState
from lockstep.training.loop_changes import LoopChanges
from lockstep.training.replica_group import ReplicaGroup
from lockstep.training.started_run import StartedRun
from lockstep.training.step_runner import StepRunner

WARM_UP = 5
# (what it is for, class, its method)
ITEMS: list[tuple[str, type, str]] = [
    ("begin a step: stop requests, progress", ReplicaGroup, "_begin"),
    ("find the trained parameters, forget gradients", Replica, "_prepare"),
    ("seed the generators of a micro-batch", Replica, "_start_pass"),
    ("snapshot of weights, modes and buffers", LoopChanges, "start"),
    ("the same after the passes, compared", LoopChanges, "refuse"),
    ("hooks: count gradients, copy them to buckets", GradientBuckets, "_on_gradient"),
    ("hand a bucket to the reducer's thread", Reducer, "submit"),
    ("exchange and add the buckets (thread)", Reducer, "_run"),
    ("test the summed slice for infinities (thread)", BucketSource, "note_slice"),
    ("digest of the weights, during the exchange", ReplicaState, "digest"),
    ("wait for the last bucket", Reducer, "drain"),
    ("vote: losses, counts, digests, signals", StepRunner, "vote"),
    ("commit: shares, division, seeds", ReplicaGroup, "_commit"),
    ("metrics, screen, account of time", StartedRun, "end_step"),
]


class Meter:
    """Seconds of each item in the current step, by thread: of a processor, and waiting."""

    def __init__(self) -> None:
        self.steps: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._now: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._inside = threading.local()  # seconds of the items within the current one

    def end_step(self) -> None:
        for name, (cpu_s, waits_s) in self._now.items():
            self.steps[name].append((cpu_s, waits_s))
        self._now.clear()

    def watch(self, name: str, owner: type, method: str) -> None:
        """Measure all calls of a method."""
        function, inside = getattr(owner, method), self._inside

        @wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            outer = getattr(inside, "seconds", (0.0, 0.0))
            inside.seconds = (0.0, 0.0)
            start_cpu_s, start_s = time.thread_time(), time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                cpu_s, wall_s = time.thread_time() - start_cpu_s, time.perf_counter() - start_s
                own_cpu_s = cpu_s - inside.seconds[0]
                seconds = self._now[name]
                seconds[0] += own_cpu_s
                seconds[1] += wall_s - inside.seconds[1] - own_cpu_s
                inside.seconds = (outer[0] + cpu_s, outer[1] + wall_s)

        setattr(owner, method, measured)


def measure(layers: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Train in turn with bare DDP and in a Session. Return the medians, in seconds."""
    meter = Meter()
    for item in ITEMS:
        meter.watch(*item)
    steps_s: dict[str, list[float]] = {"bare DDP": [], "Session": []}
    with Session(folder / "session", micro_batches=2, save_every=0) as session:
        cell = Cell(128, "fp32", 1, seconds, layers=layers)
        tensors = len(list(cell.model().parameters()))
        contestants = {"bare DDP": bare_ddp(cell), "Session": in_session(cell, session)}
        deadline, number = time.perf_counter() + seconds, 0
        while more_time(deadline):
            for name, step in contestants.items():
                dist.barrier()
                begin = time.perf_counter()
                step(number)
                dist.barrier()
                if number >= WARM_UP:
                    steps_s[name].append(time.perf_counter() - begin)
            if number == WARM_UP:
                meter.steps.clear()
            meter.end_step()
            number += 1
    return {
        "tensors": tensors,
        "rounds": number - WARM_UP,
        "step_s": {name: median(values) for name, values in steps_s.items()},
        "items": {
            name: [median(column) for column in zip(*meter.steps[name], strict=True)]
            for name, *_ in ITEMS
        },
    }


def rows_of(found: dict[str, Any]) -> Iterator[str]:
    """Yield a Markdown table of milliseconds."""
    bare_s, session_s = found["step_s"]["bare DDP"], found["step_s"]["Session"]
    yield (
        f"{found['tensors']} tensors: a step takes {1e3 * bare_s:.1f} ms with bare DDP, "
        f"{1e3 * session_s:.1f} ms in a Session ({session_s / bare_s:.2f} times); "
        f"{found['rounds']} rounds"
    )
    yield "| what it is for | cpu, ms | waits, ms |"
    yield "| --- | ---: | ---: |"
    for name, (cpu_s, waits_s) in found["items"].items():
        yield f"| {name} | {1e3 * cpu_s:.2f} | {1e3 * waits_s:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each model")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)  # this process is a worker
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.layers:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        found = measure(arguments.layers, arguments.seconds, arguments.folder)
        (arguments.folder / f"{found['tensors']}.{time.monotonic_ns()}.json").write_text(
            json.dumps(found)
        )
        return
    for layers in (3, 14):
        with tempfile.TemporaryDirectory() as folder:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            worker = ["--nproc-per-node", "2", "-m", "bench.step.budget", "--folder", folder]
            values = ["--layers", str(layers), "--seconds", str(arguments.seconds)]
            subprocess.run([*torchrun, *worker, *values], check=True, cwd=TOP)
            first = min(Path(folder).glob("*.json"))
            print(*rows_of(json.loads(first.read_text())), "", sep="\n")


if __name__ == "__main__":
    main()
