"""Measure the cost of `lockstep report`, and of a refresh of `lockstep watch`.

A separate process writes the report, over runs of given lengths; its peak memory counts. A refresh is
measured on a run with two workers that trains meanwhile: processor time of this process, and bytes read of metrics.jsonl.

    OMP_NUM_THREADS=1 python -m bench.watch.run --keep NAME
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from support.launching import OWN_LOOP, start_lockstep
from support.waiting import wait_until
from support.written_run import write_events, write_long_metrics

from bench.results import keep, machine
from lockstep.cli.watch import TAIL_BYTES, refresh
from lockstep.report.frame import frame
from lockstep.report.run_data import RunData

WRITE = """
import re, sys, time
from pathlib import Path
from lockstep.report.page import write_report
peak_kib = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before, start_s = peak_kib(), time.perf_counter()
write_report([Path(sys.argv[1])], Path(sys.argv[2]))
print(time.perf_counter() - start_s, before, peak_kib())
"""

COSTS = (("cpu_s", 1e3), ("bytes", 1), ("steps", 1))


def time_report(folder: Path, steps: int) -> dict[str, Any]:
    """Write the report of a run of `steps` steps; return seconds, bytes and peak memory."""
    run = folder / f"{steps}"
    run.mkdir()
    write_long_metrics(run / "metrics.jsonl", steps)
    write_events(run, steps)
    command = [sys.executable, "-c", WRITE, str(run), str(run / "report.html")]
    seconds, before, after = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    sizes = {
        "metrics_bytes": (run / "metrics.jsonl").stat().st_size,
        "bytes": (run / "report.html").stat().st_size,
    }
    (run / "metrics.jsonl").unlink()
    return {
        "what": "report",
        "steps": steps,
        "seconds": float(seconds),
        **sizes,
        "peak_kib": int(after),
        "before_kib": int(before),
    }


def time_refreshes(folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """Watch a run that trains; yield the cost of each refresh, the first one included."""
    process = start_lockstep(
        "train",
        OWN_LOOP,
        "--workers",
        "2",
        "--out",
        folder / "live",
        "--steps",
        "100000",
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until((folder / "live" / "metrics.jsonl").exists, "the first step", process=process)
        data = RunData(folder / "live", TAIL_BYTES)
        with open(os.devnull, "w") as nowhere:
            console = Console(file=nowhere, force_terminal=True, width=140, height=50)
            for number in range(count):
                time.sleep(1.0)
                cpu_s, read, step = (
                    time.process_time(),
                    data.steps.follower.bytes_read,
                    data.steps.newest,
                )
                console.print(frame(data, refresh(data), console, console.height))
                cost = {
                    "cpu_s": time.process_time() - cpu_s,
                    "bytes": data.steps.follower.bytes_read - read,
                    "steps": data.steps.newest - step,
                }
                yield {"what": "refresh", "number": number, **cost}
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--refreshes", type=int, default=20)
    parser.add_argument(
        "--keep", metavar="NAME", help="keep the result under bench/watch/DATE-NAME"
    )
    args = parser.parse_args()
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        reports = [time_report(Path(folder), steps) for steps in args.steps]
        refreshes = list(time_refreshes(Path(folder), args.refreshes))
    rows = [
        "| steps | metrics.jsonl | report | time | peak memory, of which Python |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in reports:
        size = f"{row['metrics_bytes'] / 1e6:.1f} MB | {row['bytes'] / 1e3:.0f} kB"
        memory = f"{row['peak_kib'] / 1024:.0f} MiB, {row['before_kib'] / 1024:.0f} MiB"
        rows.append(f"| {row['steps']:,} | {size} | {row['seconds']:.2f} s | {memory} |")
    later = refreshes[1:]
    cpu_ms, read, steps = (median(row[key] for row in later) * scale for key, scale in COSTS)
    rows += [
        "",
        f"Refresh, median of {len(later)}: {cpu_ms:.1f} ms of a processor; {read:,.0f} bytes of metrics.jsonl, {steps:,.0f} steps.",
    ]
    table = "\n".join(rows)
    print(table)
    if args.keep:
        keep(args.keep, [*reports, *refreshes], table, machine("not used", before))


if __name__ == "__main__":
    main()
