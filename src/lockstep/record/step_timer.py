"""Time per step by category, and throughput; the peak FLOP/s of devices.

A step lasts from the end of the previous step to its end; rates and shares are averages over the
newest steps. No function synchronizes a device, so on a GPU single steps are only as exact as the
waits of the loop; the averages are exact. No torch: the caller passes clock and memory functions.
"""

import math
import re
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lockstep.network.shares import format_shares
from lockstep.units import format_bytes, format_count, format_duration

CATEGORIES = (
    "data",  # waiting for the next batch
    "communication",  # waiting for other processes after its computation (not overlapped)
    "saving",  # copying a checkpoint
    "overhead",  # anything else that is not training: evaluation, metrics
)


def peak_resident_bytes() -> int:
    """Return the peak resident set size (getrusage(2): in KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_memory() -> dict[str, int]:
    return {"memory_bytes": peak_resident_bytes()}


class StepTimer:
    """The clock of a training loop.

    window_steps      number of newest steps for rates and shares; the first step of a start
                      (warm-up, compilation) is dropped once there is another
    memory            returns metrics: memory_bytes, allocator_retries unless 0
    """

    def __init__(
        self,
        *,
        window_steps: int = 50,
        memory: Callable[[], Mapping[str, int]] = resident_memory,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.memory, self.clock = memory, clock
        self.window: deque[dict[str, float]] = deque(maxlen=window_steps)
        self.warm = False
        self.start()

    def start(self) -> None:
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        self.since = self.clock()

    @contextmanager
    def timing(self, category: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.add(category, self.clock() - start)

    def add(self, category: str, seconds: float) -> None:
        self.seconds[category] += seconds

    def step(self, count: int, devices: int = 1, unit: str = "tokens") -> dict[str, float]:
        """End the step, in which `devices` trained `count` tokens or samples; return its metrics.

        Of this step: seconds, tokens, data_, communication_, saving_ and overhead_seconds.
        Averages: tokens_per_second(_per_device), data_wait and exposed_communication (shares of 1).
        memory_bytes, allocator_retries: peak and number, of this rank since its start.
        unit  what `count` counts, "tokens" or "samples"
        """
        now = self.clock()
        exact = {unit: count, "seconds": now - self.since} | {
            f"{name}_seconds": seconds for name, seconds in self.seconds.items()
        }
        self.since = now
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        if (not self.warm and self.window) or (self.window and unit not in self.window[0]):
            self.window.clear()
            self.warm = True
        self.window.append(exact)
        sums = {name: sum(step[name] for step in self.window) for name in exact}
        seconds = max(sums["seconds"], 1e-9)
        rate = sums[unit] / seconds
        values = exact | {
            f"{unit}_per_second": rate,
            f"{unit}_per_second_per_device": rate / devices,
            "data_wait": sums["data_seconds"] / seconds,
            "exposed_communication": sums["communication_seconds"] / seconds,
        }
        return {**values, **self.memory()}

    @property
    def mean_step_s(self) -> float:
        """Return the mean seconds of the newest steps; 0 before the first."""
        return sum(step["seconds"] for step in self.window) / max(1, len(self.window))


def flops_per_token(parameters: int, layers: int, width: int, length: int) -> float:
    """Return the FLOPs per trained token: 6 per parameter, 12 * layers * width * length more.

    parameters  without lookup-only embeddings (a tied embedding counts)
    length      tokens that each token attends to; recomputed activations do not count
    Source: Chowdhery et al., PaLM, 2022, appendix B (arXiv 2204.02311).
    """
    return 6.0 * parameters + 12.0 * layers * width * length


# Dense peaks in TFLOP/s (without sparsity): bf16 with fp32 accumulation, fp32 without TF32. The
# first pattern found in the device name counts. None: no bf16 units. Sources: NVIDIA's data sheets
# and white papers (Ampere GA102 for the RTX 3090, Ada for the RTX 4090; of the B200, an eighth of
# an HGX board), and AMD's for the MI300X.
PEAKS_TFLOPS: tuple[tuple[str, float | None, float], ...] = (
    (r"\bA100\b", 312.0, 19.5),
    (r"\bH100\b.*\bPCIE\b", 756.0, 51.0),
    (r"\bH[12]00\b.*\bNVL\b", 835.0, 60.0),
    (r"\bH[12]00\b", 989.0, 67.0),
    (r"\bB200\b", 2250.0, 75.0),
    (r"\bMI300X\b", 1307.4, 163.4),
    (r"\bL40S\b", 362.0, 91.6),
    (r"\bL4\b", 121.0, 30.3),
    (r"\bA10\b", 125.0, 31.2),
    (r"\bV100\b.*\bPCIE\b", None, 14.0),
    (r"\bV100\b", None, 15.7),
    (r"\bT4\b", None, 8.1),
    (r"\bP4000\b", None, 5.3),
    (r"\bRTX 4090\b(?! (D|LAPTOP)\b)", 165.2, 82.6),
    (r"\bRTX 3090\b(?! TI\b)", 71.0, 35.6),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of the device that torch.cuda.get_device_name names, in "bf16" or
    "fp32"; None when unknown, as for every CPU."""
    if re.search(r"\bMIG\b", device_name.upper()):
        return None  # a part of a GPU
    for pattern, bf16, fp32 in PEAKS_TFLOPS:
        if re.search(pattern, device_name.upper()):
            peak = bf16 if precision == "bf16" else fp32
            return None if peak is None else peak * 1e12
    return None


def format_rate(rate: float) -> str:
    return format_count(round(rate, 1) if rate < 1000 else rate)


# Of the line about a step: key of its metrics, name, and text ("": omitted).
FIELDS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("tokens_per_second", "tok/s", format_rate),
    ("samples_per_second", "samples/s", format_rate),
    ("eta_s", "eta", partial(format_duration, decimals=0)),
    ("mfu", "mfu", "{:.0%}".format),
    ("exposed_communication", "exposed comm", lambda share: f"{share:.0%}" if share else ""),
    ("memory_bytes", "mem", format_bytes),
    ("data_wait", "data wait", lambda share: f"{share:.0%}" if share >= 0.01 else ""),
    ("allocator_retries", "alloc retries", "{:,}".format),
    ("shares", "shares", format_shares),
)


def step_fields(
    step: int, values: Mapping[str, Any], logged: Mapping[str, float], total: int
) -> list[tuple[str, str]]:
    """Return (name, text) of what the line about a step shows; missing values are omitted.

    logged  numbers of the user's loop, behind the loss: {"accuracy": 0.91}
    """
    count = f"{total:,}"
    fields = [("step", f"{step:,}".rjust(len(count)) + f"/{count}")]
    if "loss" in values:
        fields.append(("loss", f"{values['loss']:#.4g}".rstrip(".")))
    fields += [(name, f"{value:.4g}") for name, value in logged.items()]
    return fields + measured_fields(values)


def measured_fields(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) of the rate, the waits and the memory of a step."""
    fields = [(name, text(values[key])) for key, name, text in FIELDS if key in values]
    return [field for field in fields if field[1]]


def format_fields(
    fields: Sequence[tuple[str, str]], widths: dict[str, int], columns: float = math.inf
) -> str:
    """Return "step  7/60  loss 2.314  tok/s 41.2 k  +2 more": the first fields that fit in
    `columns`, and how many others there are.

    widths  of the longest text so far by name, which align the columns of further lines
    """
    shown: list[str] = []
    for name, text in fields:
        widths[name] = max(widths.get(name, 0), len(text))
        shown.append(f"{name} {text.rjust(widths[name])}")
    line = "  ".join(shown)
    while len(line) > columns and shown:
        shown.pop()
        line = "  ".join([*shown, f"+{len(fields) - len(shown)} more"])
    return line
