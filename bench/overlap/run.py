"""Draw when a worker computes and when it communicates, from the traces of real steps over a shaped link.

    python -m bench.overlap.run                              both pictures and the table, three minutes
    python -m bench.overlap.run --keep NAME                  keep bench/overlap/DATE-NAME/
    python -m bench.overlap.run --pictures docs/pictures     write the pictures there

Two hosts with one worker each are network namespaces; `tc tbf` limits their links in each direction. Needs root.
Each cell is `lockstep train --profile steps=N` on both; the picture shows rank 0 in that step, from its first forward pass to its end.
Step time: the median of the steps without a profile. Memory: peak resident memory of rank 0.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.results import TOP, keep, machine
from lockstep.record.metrics import read_metrics
from lockstep.training.profiler import Interval, merge_intervals, total_length

sys.path.insert(0, str(TOP / "tests"))
from support.hosts import Host, Network

LLAMA = (
    "--task pretrain --data.kind stdlib --tokenizer.vocab_size 4096 --batch.seq_len 256 --batch.micro_batches 2 --compute.precision fp32"
)
# {picture: {name of the cell: flags}}
PICTURES = {
    "overlap": {
        "one bucket": "--parallel.bucket_bytes 1000000000",
        "buckets of 2 MB": "--parallel.bucket_bytes 2000000",
    },
    "rate-limiter": {
        "no unit ahead": "--layout.shard 2 --fsdp.prefetch_units 0",
        "1 unit ahead": "--layout.shard 2 --fsdp.prefetch_units 1",
        "all units ahead": "--layout.shard 2 --fsdp.prefetch_units 64",
    },
}
STEPS, PROFILED = 12, 12
LANES = ("forward", "backward", "update", "communication")
GAP_S = 0.001  # shorter gaps are not drawn
WIDTH, LEFT, LANE, TOP_MARGIN = 860, 130, 22, 30  # pixels
STYLE = """text{font:13px system-ui,sans-serif;fill:#333}.forward{fill:#06c}.backward{fill:#6a3d9a}.update{fill:#888}
.communication{fill:#c50}line{stroke:#bbb}@media(prefers-color-scheme:dark){text{fill:#ddd}.forward{fill:#6bf}
.backward{fill:#b9f}.update{fill:#aaa}.communication{fill:#fa5}line{stroke:#555}}"""


@dataclass(frozen=True)
class Cell:
    """A measured run. lanes: {lane: intervals of the profiled step, s from its start}."""

    name: str
    step_s: float
    peak_bytes: int
    lanes: Mapping[str, Sequence[Interval]]

    @property
    def exposed_s(self) -> float:
        """Seconds in which rank 0 only communicated."""
        computing = [interval for lane in LANES[:3] for interval in self.lanes[lane]]
        return total_length([*computing, *self.lanes["communication"]]) - total_length(computing)


def read_lanes(path: Path) -> dict[str, list[Interval]]:
    """Return when the rank of a trace ran forward passes, backward passes, the update and transfers."""
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    found: dict[str, list[Interval]] = {lane: [] for lane in LANES}
    (main,) = {event["tid"] for event in events if event["name"].startswith("autograd::engine::evaluate_function")}
    for event in events:
        lane = lane_of(event["name"], event["tid"] == main)
        if lane:
            found[lane].append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    backward = merge_intervals(found["backward"])
    found["forward"] = [x for x in found["forward"] if not any(begin <= x[0] <= end for begin, end in [*backward, *found["update"]])]
    start_s = min(begin for begin, _ in found["forward"])
    return {lane: close_gaps((a - start_s, b - start_s) for a, b in intervals if b > start_s) for lane, intervals in found.items()}


def lane_of(name: str, is_main: bool) -> str:
    if name.startswith("gloo:"):
        return "communication"
    if not is_main:
        return ""
    if name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    return "update" if name.startswith("Optimizer.step") else "forward" if name.startswith(("aten::", "lockstep::")) else ""


def close_gaps(intervals: Iterable[Interval]) -> list[Interval]:
    return [(begin, end - GAP_S) for begin, end in merge_intervals((begin, end + GAP_S) for begin, end in intervals)]


def draw(cells: Sequence[Cell], title: str) -> str:
    """Return an SVG: for each cell one row for each lane, all with the same scale."""
    whole_s = max(end for cell in cells for intervals in cell.lanes.values() for _, end in intervals)
    scale, y, parts = (WIDTH - LEFT - 20) / whole_s, TOP_MARGIN, [f'<text x="12" y="20">{title}</text>']
    for cell in cells:
        y += 24
        parts.append(f'<text x="12" y="{y - 6}" font-weight="bold">{cell.name}: {cell.exposed_s * 1000:.0f} ms exposed</text>')
        for lane in LANES:
            parts.append(
                f'<text x="24" y="{y + 14}">{lane}</text><line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y + LANE - 2}" y2="{y + LANE - 2}"/>'
            )
            for begin, end in cell.lanes[lane]:
                x, width = LEFT + begin * scale, max(1.0, (end - begin) * scale)
                parts.append(f'<rect class="{lane}" x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{LANE - 6}"/>')
            y += LANE
        y += 8
    step_ms = next(size for size in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if whole_s * 1000 / size <= 10)
    for tick in range(0, int(whole_s * 1000) + 1, step_ms):
        parts.append(f'<text x="{LEFT + tick / 1000 * scale:.1f}" y="{y + 14}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="24" y="{y + 14}">milliseconds</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 28}" width="{WIDTH}" role="img" aria-label="{title}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def measure(name: str, flags: Sequence[str], hosts: Sequence[Host], folder: Path) -> Cell:
    folder.mkdir(exist_ok=True)
    fixed = ["--steps", str(STEPS), "--evaluate.at_end", "0", "--checkpoint.every_steps", "0", "--profile", f"steps={PROFILED}"]
    group = {
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": "29517",
    }
    workers = []
    for rank, host in enumerate(hosts):
        command = [sys.executable, "-m", "lockstep", "train", "--out", "run", *fixed, *flags]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "RANK": str(rank), **group}
        with open(folder / f"{host.name}.out", "wb") as output:
            workers.append(subprocess.Popen([*host.enter, *command], cwd=folder, env=environ, stdout=output, stderr=output))
    if any([worker.wait() for worker in workers]):
        raise RuntimeError("\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.out")))
    lines = list(read_metrics(folder / "run/metrics.jsonl"))
    steps = [line["seconds"] for line in lines if 3 < line["step"] < PROFILED]
    peak = max(line["memory_bytes"] for line in lines)
    return Cell(name, median(steps), peak, read_lanes(folder / "run/profile/rank-0.trace.json.gz"))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rate", default="500mbit")
    options.add_argument("--pictures", type=Path, default=Path(tempfile.gettempdir()))
    options.add_argument("--size", default="5M", help="of the Llama")
    options.add_argument("--keep", metavar="NAME")
    args = options.parse_args()
    load, rows = os.getloadavg(), list[dict[str, Any]]()
    lines = ["| | step | exposed | peak memory |", "| --- | --- | --- | --- |"]
    words = [*LLAMA.split(), "--llama.size", args.size]
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder, Network(2) as network:
        for host in network.hosts:
            network.limit_rate(host, args.rate)
        for picture, cells in PICTURES.items():
            found = []
            for number, (name, flags) in enumerate(cells.items()):
                cell = measure(name, [*words, *flags.split()], network.hosts, Path(folder) / f"{picture}-{number}")
                row = {"picture": picture, "cell": name, "step_s": cell.step_s, "exposed_s": cell.exposed_s, "bytes": cell.peak_bytes}
                cells_of_row = f"{cell.step_s * 1000:.0f} ms | {cell.exposed_s * 1000:.0f} ms | {cell.peak_bytes / 1e6:.0f} MB"
                found.append(cell)
                rows.append(row)
                lines.append(f"| {name} | {cells_of_row} |")
                print(lines[-1], flush=True)
            title = f"Rank 0 of two, Llama {args.size}, {args.rate} between them"
            (args.pictures / f"{picture}.svg").write_text(draw(found, title))
    if args.keep:
        print(keep(args.keep, rows, "\n".join(lines), machine("fp32", load)))


if __name__ == "__main__":
    main()
