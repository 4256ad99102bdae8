"""Profile a few steps: a trace for ui.perfetto.dev, and a log line of where the time went.

    with Profiler(ProfiledSteps(10, 12), folder, runtime) as profiler:
        profiler.step(step)        after each committed step

Each rank writes RUN/profile/rank-N.trace.json.gz and logs one line:

    compute                 a computation of the model was running
    exposed communication   only a transfer between processes was running
    idle                    neither: Python code of the loop, waiting for data or the disk

On a GPU kernels are measured, on a CPU the operations of all threads. Profiling costs a few
microseconds per operation, so the shares are more accurate than the seconds.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # public at run time
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import UsageError
from lockstep.runtime.device import measure_memory
from lockstep.runtime.torch_private import compile_counters, graph_breaks, profile_all_threads
from lockstep.units import format_bytes

log = logging.getLogger("lockstep")

Interval = tuple[float, float]  # start and end, s
CPU_COMPUTE = ("aten::", "lockstep::", "## Call CompiledFxGraph")  # the last: of torch.compile
COMMUNICATION = re.compile(r"^(gloo:|nccl:|c10d::|ncclDevKernel|ncclKernel)")


@dataclass(frozen=True)
class ProfiledSteps:
    """The first and the last step to profile, numbered as on the screen."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> ProfiledSteps:
        """Parse `steps=10..12` or `steps=10`. UsageError for anything else."""
        match = re.fullmatch(r"steps=(\d{1,18})(?:\.\.(\d{1,18}))?", text)
        steps = cls(int(match[1]), int(match[2] or match[1])) if match else cls(0, 0)
        if not 1 <= steps.first <= steps.last:
            raise UsageError(
                f"--profile {text}",
                "--profile or LOCKSTEP_PROFILE",
                "give steps=FIRST..LAST, such as steps=10..12; the first step is 1",
            )
        return steps


@dataclass(frozen=True)
class TimeShares:
    """The seconds of a window by kind; they add up to its length."""

    compute_s: float
    exposed_s: float
    idle_s: float

    def show(self) -> str:
        whole = max(self.compute_s + self.exposed_s + self.idle_s, 1e-12)
        named = {
            "compute": self.compute_s,
            "exposed communication": self.exposed_s,
            "idle": self.idle_s,
        }
        return ", ".join(
            f"{name} {seconds:.3f} s ({seconds / whole:.0%})" for name, seconds in named.items()
        )


def total_length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of the intervals."""
    total = 0.0
    latest = -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, latest))
        latest = max(latest, end)
    return total


def shares(
    window: Interval, compute: Sequence[Interval], communication: Sequence[Interval]
) -> TimeShares:
    """Return the shares of a window, s, that holds the intervals. Communication during compute
    does not count."""
    compute_s = total_length(compute)
    either_s = total_length([*compute, *communication])
    return TimeShares(compute_s, either_s - compute_s, window[1] - window[0] - either_s)


def shares_of(events: Iterable[FunctionEvent], device_type: str) -> TimeShares:
    """Return the shares of the recorded events, from the first to the last."""
    event_device = DeviceType.CUDA if device_type == "cuda" else DeviceType.CPU
    computing = ("",) if device_type == "cuda" else CPU_COMPUTE
    timed = [
        (event.name, (event.time_range.start * 1e-6, event.time_range.end * 1e-6))
        for event in events
        if event.device_type == event_device
    ]
    if not timed:
        return TimeShares(0.0, 0.0, 0.0)
    window = min(interval[0] for _, interval in timed), max(interval[1] for _, interval in timed)
    communication = [interval for name, interval in timed if COMMUNICATION.match(name)]
    compute = [
        interval
        for name, interval in timed
        if name.startswith(computing) and not COMMUNICATION.match(name)
    ]
    return shares(window, compute, communication)


def compile_summary() -> str:
    """Describe what torch.compile did: graphs, graph breaks, each with its line of the model and
    its reason; "" for nothing."""
    graphs = compile_counters()["stats"]["unique_graphs"]
    breaks = graph_breaks()
    lines = [f"torch.compile: {graphs} graphs, {len(breaks)} graph breaks"]
    for (line, reason), count in Counter(breaks).items():
        why = "branch on a tensor" if reason.startswith("generic_jump") else reason.splitlines()[0]
        lines.append(f"  {count} x {line}  ({why})")
    return "\n".join(lines) if graphs or breaks else ""


class Profiler:
    """Profiles the steps of `spec`. A context manager: a run that ends before their last one writes
    the trace of the steps so far."""

    def __init__(self, spec: ProfiledSteps, folder: Path, runtime: ElasticRuntime) -> None:
        self.spec = spec
        self.folder = folder
        self.runtime = runtime
        self.running: profile | None = None
        self.first_step = 0  # committed steps at the start of the profile
        self.latest = 0  # and now
        self.step(0)

    def step(self, step: int) -> None:
        """Start or stop profiling after `step` committed steps."""
        self.latest = step
        if self.running and step >= self.spec.last:
            self.stop()
        elif not self.running and self.spec.first - 1 <= step < self.spec.last:
            activities = [ProfilerActivity.CPU]
            if self.runtime.world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            all_threads = profile_all_threads()  # the reducing thread too
            self.running = profile(activities=activities, experimental_config=all_threads)
            self.first_step = step
            self.running.start()

    def stop(self) -> None:
        """Write the trace and log its line; nothing when no profile is running."""
        finished, self.running = self.running, None
        if finished is None:
            return
        device = self.runtime.world.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        finished.stop()
        path = self.folder / "profile" / f"rank-{self.runtime.world.rank}.trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(path))
        log.info(
            "steps %d..%d: %s; peak memory %s; %s",
            self.first_step + 1,
            self.latest,
            shares_of(finished.events() or [], device.type).show(),
            format_bytes(measure_memory(device)["memory_bytes"]),
            path,
        )
        if summary := compile_summary():
            log.info("%s", summary)

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def measure_matmul_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Measure the FLOP/s of matrix products on this device: a substitute for an unknown peak.

    seconds  how long to measure. The best product counts; threads as set in torch
    """
    size = 8192 if device.type == "cuda" else 1024
    best_s = float("inf")
    own = torch.Generator(device).manual_seed(0)  # the loop's next draws stay as they are
    a = torch.randn(size, size, device=device, generator=own).to(dtype)
    b = torch.randn(size, size, device=device, generator=own).to(dtype)
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        product_start_s = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - product_start_s)
    return 2.0 * size**3 / best_s
