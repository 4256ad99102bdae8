"""One of two workers slows down during a run: the time of a step with and without uneven shares.

    python -m bench.shares.run [--slower 3] [--steps 80] [--keep NAME]

A cgroup gives worker 1 a third of the processor time that it had, from step 20 on. Needs root, two
quiet cores, and a writable cgroup hierarchy of the cpu controller (version 1 or 2). Times are
ratios to the ideal split within each run: with a worker of a third of the speed the 8 micro-batches
take at best 8 / (1 + 1/3) / 4 = 1.5 times a step of two equal workers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.results import keep, machine
from lockstep.checkpoint.commands import digest_line
from lockstep.record.events import read_events
from lockstep.record.metrics import iter_steps

PERIOD_US, WARM_UP, SLOW_FROM, SETTLED = 10_000, 6, 20, 35  # steps
LEAVES = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slower", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--keep", default="")
    args = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="lockstep-shares-") as folder:
        runs = [
            measure(Path(folder) / balance, balance, args.slower, args.steps)
            for balance in ("off", "auto")
        ]
    assert runs[0]["digest"] == runs[1]["digest"], "the bits do not depend on the shares"
    ideal = LEAVES / (1 + 1 / args.slower) / (LEAVES / 2)
    lines = [
        "| balance | slow / healthy step | over the ideal split | steps until new shares | shares |",
        "|" + " --- |" * 5,
    ]
    for run in runs:
        ratio = statistics.median(run["slow"]) / statistics.median(run["healthy"])
        lines.append(
            f"| {run['balance']} | {ratio:.2f} | {ratio / ideal:.2f} | {run['delay']} | {run['shares']} |"
        )
    table = "\n".join(lines)
    print(table)
    if args.keep:
        print(keep(args.keep, runs, table, machine("auto", load)))


def measure(folder: Path, balance: str, slower: float, steps: int) -> dict[str, Any]:
    """Train a run; return the seconds of its steps before and after worker 1 slows down."""
    options = [
        "--workers",
        "2",
        "--steps",
        str(steps),
        "--optim.decay_steps",
        "300",
        "--evaluate.at_end",
        "0",
        "--layout.balance",
        balance,
    ]
    command = [sys.executable, "-m", "lockstep", "train", "--out", str(folder), *options]
    process = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    wait_for_step(folder, WARM_UP, process)
    status = subprocess.run(
        [sys.executable, "-m", "lockstep", "status", "--json", str(folder)],
        capture_output=True,
        check=True,
    )
    pid = json.loads(status.stdout)["members"][1]["pid"]
    cpu_s, start_s = processor_seconds(pid), time.monotonic()
    slow_from = wait_for_step(folder, SLOW_FROM, process)
    rate = (processor_seconds(pid) - cpu_s) / (time.monotonic() - start_s)
    with limited(pid, rate / slower):
        assert process.wait() == 0
    seconds = {line["step"]: line["seconds"] for line in iter_steps(folder / "metrics.jsonl")}
    changes = [
        (event["step"], event["shares"])
        for event in read_events(folder)
        if event["event"] == "shares"
    ]
    return {
        "balance": balance,
        "processor_share": rate,
        "healthy": [seconds[step] for step in range(WARM_UP, slow_from + 1)],
        "slow": [seconds[step] for step in range(SETTLED, steps + 1)],
        "delay": next((step - slow_from for step, _ in changes if step > slow_from), None),
        "shares": changes[-1][1] if changes else "equal",
        "digest": digest_line(folder),
    }


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[bytes]) -> int:
    """Wait until the metrics have this step; return the newest step."""
    while True:
        newest = (
            max((line["step"] for line in iter_steps(folder / "metrics.jsonl")), default=0)
            if folder.exists()
            else 0
        )
        if newest >= step:
            return newest
        assert process.poll() is None, f"the run ended with exit code {process.returncode}"
        time.sleep(0.1)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def limited(pid: int, share: float) -> Iterator[None]:
    """Limit a process to a share of one processor."""
    quota_us = max(1000, int(share * PERIOD_US))
    version_1 = Path("/sys/fs/cgroup/cpu")
    group = (
        version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    ) / f"lockstep-bench-{os.getpid()}"
    group.mkdir()
    if version_1.is_dir():
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        group.rmdir()


if __name__ == "__main__":
    main()
