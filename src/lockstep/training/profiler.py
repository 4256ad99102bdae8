"""Where the time of a few steps goes, in a trace that ui.perfetto.dev and chrome://tracing open, and in one line.

    with profiling(Steps(10, 12), folder, world) as profiler:
        ...
        profiler.step(step)        after each committed step

Each rank writes RUN/profile/rank-N.trace.json.gz and logs its line: rank 0's is on the terminal, the others' in their logs.

    compute                 something of the model's was being computed
    exposed communication   nothing was, and something was on its way between processes
    idle                    neither: the loop's own Python, waiting for data, for the disk

On a GPU its kernels are looked at, on a CPU the operations of all threads. To look costs time itself, a few microseconds an operation, so
the shares are truer than the seconds.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch._dynamo.utils import counters
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from lockstep.elastic.world import World
from lockstep.errors import UsageError
from lockstep.record.step_timer import peak_resident_bytes
from lockstep.units import show_bytes

log = logging.getLogger("lockstep")

Span = tuple[float, float]  # from, to
WIRE = re.compile(r"^(gloo:|nccl:|c10d::|ncclDevKernel|ncclKernel)")


@dataclass(frozen=True)
class Steps:
    """The steps to look at, the first and the last, as they are numbered on the screen."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Steps:
        """`steps=10..12`, or `steps=10`. UsageError for anything else."""
        match = re.fullmatch(r"steps=(\d{1,18})(?:\.\.(\d{1,18}))?", text)
        steps = cls(int(match[1]), int(match[2] or match[1])) if match else cls(0, 0)
        if not 1 <= steps.first <= steps.last:
            raise UsageError(f"--profile {text}", "command line", "give steps=FIRST..LAST, such as steps=10..12; the first step is 1")
        return steps


@dataclass(frozen=True)
class Shares:
    """Where the seconds of a window went; they add up to it."""

    compute_s: float
    exposed_s: float
    idle_s: float

    def show(self) -> str:
        whole = max(self.compute_s + self.exposed_s + self.idle_s, 1e-12)
        named = {"compute": self.compute_s, "exposed communication": self.exposed_s, "idle": self.idle_s}
        return ", ".join(f"{name} {seconds:.3f} s ({seconds / whole:.0%})" for name, seconds in named.items())


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > begin:
            found.append((begin, end))
    return found


def covered(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in merged(spans))


def shares(window: Span, compute: Iterable[Span], wire: Iterable[Span]) -> Shares:
    """Of a window, all in seconds: communication counts where nothing is computed at the same time."""

    def inside(spans: Iterable[Span]) -> list[Span]:
        return [(max(begin, window[0]), min(end, window[1])) for begin, end in spans]

    computed, sent = inside(compute), inside(wire)
    busy = covered(computed)
    either = covered([*computed, *sent])
    return Shares(busy, either - busy, window[1] - window[0] - either)


def shares_of(events: Iterable[FunctionEvent], device_type: str) -> Shares:
    """Of what the profiler saw, from its first event to its last."""
    wanted = DeviceType.CUDA if device_type == "cuda" else DeviceType.CPU
    seen = [(e.name, (e.time_range.start * 1e-6, e.time_range.end * 1e-6)) for e in events if e.device_type == wanted]
    if not seen:
        return Shares(0.0, 0.0, 0.0)
    window = min(span[0] for _, span in seen), max(span[1] for _, span in seen)
    wire = [span for name, span in seen if WIRE.match(name)]
    own = [span for name, span in seen if not WIRE.match(name) and (wanted is DeviceType.CUDA or name.startswith(("aten::", "lockstep::")))]
    return shares(window, own, wire)


def graphs_made() -> str:
    """A sentence on what torch.compile made so far: its graphs, and each reason for which one had to end early. "" for nothing."""
    made, reasons = counters["stats"]["unique_graphs"], counters["graph_break"]
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
    return f"torch.compile: {made} graphs, {sum(reasons.values())} graph breaks{': ' + listed if listed else ''}" if made else ""


class Profiler:
    """Looks at the steps of `spec` as they come by; at nothing when there is none."""

    def __init__(self, spec: Steps | None, folder: Path, world: World) -> None:
        self.spec, self.folder, self.world = spec, folder, world
        self.running: profile | None = None
        self.began = self.latest = 0  # steps: committed when it began to look, and by now
        if spec and spec.first == 1:
            self._start(0)

    def step(self, step: int) -> None:
        """`step` is committed."""
        if self.spec is None:
            return
        self.latest = step
        if self.running and step >= self.spec.last:
            self.stop()
        elif not self.running and self.spec.first - 1 <= step < self.spec.last:
            self._start(step)

    def _start(self, step: int) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.world.device.type == "cuda" else [])]
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the courier's too
        self.running, self.began = profile(activities=activities, experimental_config=everywhere), step
        self.running.start()

    def stop(self) -> None:
        """Write the trace of what was seen, and log its line."""
        seen, self.running = self.running, None
        if seen is None:
            return
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        seen.stop()
        path = self.folder / "profile" / f"rank-{self.world.rank}.trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(path))
        found = shares_of(seen.events() or [], self.world.device.type).show()
        peak = torch.cuda.max_memory_allocated(self.world.device) if self.world.device.type == "cuda" else peak_resident_bytes()
        log.info("steps %d..%d: %s; peak memory %s; %s", self.began + 1, self.latest, found, show_bytes(peak), path)
        if made := graphs_made():
            log.info("%s", made)


@contextmanager
def profiling(spec: Steps | None, folder: Path, world: World) -> Iterator[Profiler]:
    """What to tell each step to. A run that ends in between leaves the trace of the steps that it did."""
    profiler = Profiler(spec, folder, world)
    try:
        yield profiler
    finally:
        profiler.stop()


def product_flops(device: torch.device, precision: str, seconds: float = 0.5) -> float:
    """Operations a second of the best of several matrix products on this device: its ceiling, where no data sheet tells it.

    precision  "bf16" or "fp32". Measured by the threads that torch has here, while whatever else runs on the machine runs
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    size, best = (8192 if device.type == "cuda" else 1024), float("inf")
    a, b = torch.randn(size, size, device=device).to(dtype), torch.randn(size, size, device=device).to(dtype)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        before = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - before)
    return 2.0 * size**3 / best
