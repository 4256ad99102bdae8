"""What trains: hosts, devices and links, from the words of a command."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import UsageError
from lockstep.network.moves import Link
from lockstep.record.step_timer import peak_flops
from lockstep.runtime.environment import bf16_flag
from lockstep.runtime.memory import machine_memory
from lockstep.units import parse_bytes, parse_rate, parse_seconds

EFFICIENCY = 0.4  # of a GPU's peak that training reaches: assumed; `--measure` replaces it
CPU_FLOPS = {"fp32": 20e9, "bf16": 60e9}  # of one core: assumed
# Assumed: NVLink; gloo over the loopback device.
SAME_HOST = {"gpu": Link(20e-6, 100e9), "cpu": Link(100e-6, 1e9)}
LATENCY_S = 100e-6  # between hosts, if none is given: assumed
GPU_NAMES = "A100, H100, H200, B200, MI300X, L40S, L4, A10, V100, T4, P4000, RTX 4090, RTX 3090"
GPUS = GPU_NAMES.split(", ")
MAX_DEVICES = 1 << 14
DEVICES_HINT = "write HOSTSxDEVICES:KIND-MEMORY, such as 4x8:H100-80GB or 2x1:cpu-4GiB"
OTHER_HINT = (
    "of another GPU write its dense peak, too, as KIND-MEMORY@TFLOPS[,GB/s]: 2x8:H800-80GB@989,3350"
)
DEVICES = re.compile(
    r"(\d{1,6})x(\d{1,6}):([A-Za-z][\w ]*?)(?:-(\d[\w.]*))?"
    r"(?:@(\d{1,7}(?:\.\d{1,7})?)(?:,(\d{1,7}(?:\.\d{1,7})?))?)?"
)


@dataclass(frozen=True)
class Cluster:
    """Hosts with equal devices, ranks host by host.

    kind         "cpu", or the name of a GPU: of record/step_timer.py unless its peak is given
    memory       bytes of a device; of a CPU, of one worker
    other_host   of a host, shared by its workers
    peak         FLOP/s of a device in the run's precision; 0: that of its kind
    memory_bytes_per_s   of a GPU; 0: not given
    """

    hosts: int
    per_host: int
    kind: str
    memory: int
    same_host: Link
    other_host: Link
    peak: float = 0.0
    memory_bytes_per_s: float = 0.0

    @property
    def devices(self) -> int:
        return self.hosts * self.per_host

    @property
    def device_type(self) -> str:
        return "cpu" if self.kind == "cpu" else "cuda"

    def precision(self) -> Literal["bf16", "fp32"]:
        """Return what compute.precision = auto means there; a CPU is this machine's, and a GPU
        whose peak is given has bf16 units."""
        if self.kind == "cpu":
            return "bf16" if bf16_flag() else "fp32"
        return "bf16" if self.peak or peak_flops(self.kind, "bf16") else "fp32"

    def flops(self, precision: str) -> tuple[float, str]:
        """Return the assumed FLOP/s of a device in training, and the assumption."""
        if self.kind == "cpu":
            flops = CPU_FLOPS[precision]
            return flops, f"{flops / 1e9:g} GFLOP/s per worker, assumed"
        peak = self.peak or peak_flops(self.kind, precision)
        assert peak is not None
        text = f"{EFFICIENCY:.0%} of the peak of {peak / 1e12:g} TFLOP/s, assumed"
        return peak * EFFICIENCY, text

    def link(self, rank: int, peer: int, sharing: int = 0) -> Link:
        """Return the link of two ranks when `sharing` workers of a host send at once; 0: all."""
        if rank // self.per_host == peer // self.per_host:
            return self.same_host
        return Link(
            self.other_host.latency_s, self.other_host.bytes_per_s / (sharing or self.per_host)
        )


def parse_cluster(devices: str, link: str, host_link: str, profile: Path | None) -> Cluster:
    """Return the cluster of --devices, --link, --host-link and --profile. UsageError."""
    match = DEVICES.fullmatch(devices)
    if not match:
        raise UsageError(
            f"{devices!r} names no devices", "--devices", f"{DEVICES_HINT}; {OTHER_HINT}"
        )
    hosts = int(match[1])
    per_host = int(match[2])
    kind = match[3]
    if not (hosts and per_host and hosts * per_host <= MAX_DEVICES):
        raise UsageError(
            f"{hosts * per_host:,} devices", f"--devices {devices}", f"give 1 to {MAX_DEVICES:,}"
        )
    is_cpu = kind.lower() == "cpu"
    peak, memory_rate = 1e12 * float(match[5] or 0), 1e9 * float(match[6] or 0)
    if (match[5] and not peak) or (match[6] and not memory_rate) or (is_cpu and match[5]):
        raise UsageError(
            "the speed of a CPU is given" if is_cpu else "a speed is zero",
            f"--devices {devices}",
            "time the model on this CPU: --measure" if is_cpu else OTHER_HINT,
        )
    if not is_cpu and not match[4]:
        raise UsageError(f"the memory of {kind} is not given", f"--devices {devices}", DEVICES_HINT)
    if not is_cpu and not peak and peak_flops(kind, "fp32") is None:
        raise UsageError(
            f"the device {kind!r} is not known",
            f"--devices {devices}",
            f"{OTHER_HINT}; known GPUs: {GPU_NAMES}",
        )
    own = machine_memory() // per_host
    memory = parsed(parse_bytes, match[4], f"--devices {devices}") if match[4] else own
    links = read_profile(profile) if profile else {}
    if link:
        links["other_host"] = parse_link(link, "--link")
    if host_link:
        links["same_host"] = parse_link(host_link, "--host-link")
    if hosts > 1 and "other_host" not in links:
        raise UsageError(
            f"{hosts} hosts, and the link between them is not known",
            "command line",
            "give --link RATE, such as 100Gbit/s or 1Gbit/s,200us, "
            "or --profile FILE.json of lockstep bench comm",
        )
    same = links.get("same_host", SAME_HOST["cpu" if is_cpu else "gpu"])
    kind = "cpu" if is_cpu else kind
    return Cluster(
        hosts, per_host, kind, memory, same, links.get("other_host", same), peak, memory_rate
    )


def parse_link(text: str, where: str) -> Link:
    """Return the link in RATE or RATE,LATENCY. UsageError."""
    rate, comma, latency = text.partition(",")
    return Link(
        parsed(parse_seconds, latency, where) if comma else LATENCY_S,
        parsed(parse_rate, rate, where),
    )


def parsed(parse: Any, text: str, where: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(
            str(error), where, "give a quantity with a unit, such as 80GB, 100Gbit/s or 50us"
        ) from None


def read_profile(path: Path) -> dict[str, Link]:
    """Return the links in the JSON of `lockstep bench comm`. UsageError."""
    try:
        links = json.loads(path.read_text(encoding="utf-8"))["links"]
        read = {
            name: Link(float(link["latency_s"]), float(link["bytes_per_s"]))
            for name, link in links.items()
            if link is not None
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a profile of links: {type(error).__name__}: {error}",
            "--profile",
            "write it with lockstep bench comm --out FILE.json",
        ) from None
    for name, link in read.items():
        if not (0 < link.bytes_per_s < inf and 0 <= link.latency_s < inf):
            rates = f"{link.bytes_per_s:g} bytes/s and a latency of {link.latency_s:g} s"
            raise UsageError(
                f"{path}: the link {name} has {rates}",
                "--profile",
                "measure it again with lockstep bench comm --out FILE.json",
            )
    return read
