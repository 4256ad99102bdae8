"""Where the time of a step goes, and how much of the device's peak it uses.

A step lasts from the end of the one before to its own end, so nothing falls between two steps. Inside it the loop says
what it waits for, in named parts:

    data            for the next batch
    communication   for other processes after its own computation had ended: exposed, not behind the backward pass
    saving          for a checkpoint to be copied
    overhead        for whatever else is not training (evaluation, records)

Seconds are of the very step and add up over a run; rates and shares are smoothed over the newest steps. Nothing here
waits for a device, so on a GPU single steps are only as true as the loop's own waiting; the smoothed values are right.
No torch: clock and memory are functions that are passed in.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from lockstep.units import show_bytes, show_count

PARTS = ("data", "communication", "saving", "overhead")


def peak_resident_bytes() -> int:
    """The most memory that this process ever had in RAM (getrusage(2): kibibytes on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Meter:
    """The clock of a training loop.

    window_steps      newest steps that rates and shares are taken over; the first step of a start, which warms up and
                      compiles, is left out as soon as there is another
    flops_per_token   see `flops_per_token`; None: no mfu
    peak_flops        of one device; None: no mfu
    memory            peak bytes; torch.cuda.max_memory_allocated on a GPU
    """

    def __init__(
        self,
        *,
        window_steps: int = 50,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        memory: Callable[[], int] = peak_resident_bytes,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.memory, self.clock = memory, clock
        self.window: deque[dict[str, float]] = deque(maxlen=window_steps)
        self.warm = False
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.since = clock()

    def start(self) -> None:
        """Begin the first step now: what was set up before is not its time."""
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.since = self.clock()

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Count the time of the block as `part` of this step."""
        begin = self.clock()
        try:
            yield
        finally:
            self.add(part, self.clock() - begin)

    def add(self, part: str, seconds: float) -> None:
        """Count `seconds`, measured elsewhere, as `part` of this step. KeyError for a part that is not in PARTS."""
        self.parts[part] += seconds

    def step(self, tokens: int, devices: int = 1) -> dict[str, float]:
        """End the step, in which all `devices` together trained `tokens` target tokens, and begin the next.

        seconds, tokens, data_seconds, communication_seconds, saving_seconds, overhead_seconds   of this step
        tokens_per_second, tokens_per_second_per_device, data_wait, exposed_communication (shares of 1), mfu (where the peak
        is known)   smoothed
        memory_bytes   peak since the process began, on this rank
        """
        now = self.clock()
        exact = {"tokens": tokens, "seconds": now - self.since} | {f"{k}_seconds": v for k, v in self.parts.items()}
        self.since = now
        self.parts = dict.fromkeys(PARTS, 0.0)
        if not self.warm and self.window:
            self.window.clear()
            self.warm = True
        self.window.append(exact)
        return exact | self.smoothed(devices) | {"memory_bytes": self.memory()}

    def smoothed(self, devices: int) -> dict[str, float]:
        """Rates and shares over the newest steps."""
        seconds = max(sum(step["seconds"] for step in self.window), 1e-9)
        rate = sum(step["tokens"] for step in self.window) / seconds
        values = {
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / devices,
            "data_wait": sum(step["data_seconds"] for step in self.window) / seconds,
            "exposed_communication": sum(step["communication_seconds"] for step in self.window) / seconds,
        }
        if self.flops_per_token and self.peak_flops:
            values["mfu"] = rate * self.flops_per_token / (self.peak_flops * devices)
        return values


def flops_per_token(parameters: int, layers: int, width: int, length: int) -> float:
    """Operations to train one token: 6 for each parameter, and 12 * layers * width * length for the attention.

    parameters  without those that are only looked up (an embedding that is also the output layer counts)
    length      tokens that each token attends to; recomputed activations do not count
    Source: Chowdhery et al., PaLM, 2022, appendix B (arXiv 2204.02311).
    """
    return 6.0 * parameters + 12.0 * layers * width * length


# Dense peaks in TFLOP/s (sparsity, which doubles NVIDIA's figures, is left out): bf16 with fp32 sums, fp32 without TF32.
# The first pattern that is found in the device's name counts. A device without bf16 units has None there.
# Sources: NVIDIA's data sheets of the A100, H100, H200, L4 and T4, and its white papers on the architectures Ampere GA102
# (RTX 3090) and Ada (RTX 4090).
PEAKS_TFLOPS: tuple[tuple[str, float | None, float], ...] = (
    (r"\bA100\b", 312.0, 19.5),
    (r"\bH100\b.*\bPCIE\b", 756.0, 51.0),
    (r"\bH[12]00\b.*\bNVL\b", 835.0, 60.0),
    (r"\bH[12]00\b", 989.0, 67.0),
    (r"\bL4\b", 121.0, 30.3),
    (r"\bT4\b", None, 8.1),
    (r"\bRTX 4090\b(?! (D|LAPTOP)\b)", 165.2, 82.6),
    (r"\bRTX 3090\b(?! TI\b)", 71.0, 35.6),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """The most operations a second of one device, None where it is not known (so on every CPU).

    device_name  as torch.cuda.get_device_name gives it
    precision    "bf16" or "fp32"
    """
    if re.search(r"\bMIG\b", device_name.upper()):
        return None  # a slice of a device
    for pattern, bf16, fp32 in PEAKS_TFLOPS:
        if re.search(pattern, device_name.upper()):
            peak = {"bf16": bf16, "fp32": fp32}[precision]
            return None if peak is None else peak * 1e12
    return None


def step_line(step: int, values: Mapping[str, float]) -> str:
    """One line for people: step 1,200  loss 2.314  norm 0.81  tok/s 41.2 k  mfu 38%  exposed comm 3%  mem 61.0 GiB.

    Values that are not there are left out; waiting for data is shown from 1%.
    """
    shown: dict[str, Callable[[float], str]] = {
        "loss": lambda value: f"loss {value:.3f}",
        "norm": lambda value: f"norm {value:.2f}",
        "tokens_per_second": lambda value: f"tok/s {show_count(round(value, 1) if value < 1000 else value)}",
        "mfu": lambda value: f"mfu {value:.0%}",
        "exposed_communication": lambda value: f"exposed comm {value:.0%}",
        "data_wait": lambda value: f"data wait {value:.0%}" if value >= 0.01 else "",
        "memory_bytes": lambda value: f"mem {show_bytes(value)}",
    }
    words = [f"step {step:,}"] + [show(values[key]) for key, show in shown.items() if key in values]
    return "  ".join(word for word in words if word)
