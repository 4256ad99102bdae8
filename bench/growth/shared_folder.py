"""Count accesses to the run folder and messages per second: workers that wait to start, and workers that train.

    python -m bench.growth.shared_folder               8, 32 and 64 workers
    python -m bench.growth.shared_folder --workers 256
    python -m bench.growth.shared_folder --keep NAME   kept under bench/growth/DATE-NAME/

The workers are real Membership objects in one process, 8 to a host, with sockets on loopback and one run folder. They have no model.
Opens and listings are audit events of Python; calls of stat() are not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.results import keep, machine
from lockstep.elastic.link import PeerLink
from lockstep.elastic.membership import Membership
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.run_folder import create_run_folder
from lockstep.runtime.worker_env import WorkerEnv

SIZES, WORKERS_PER_HOST = (8, 32, 64), 8
SETTLE_S, COUNT_S = 4.0, 5.0
counter: Counter[str] = Counter()
folder = ""


def on_audit(event: str, arguments: tuple[object, ...]) -> None:
    if (
        event in ("open", "os.listdir", "os.scandir")
        and folder
        and str(arguments[0]).startswith(folder)
    ):
        counter["opens" if event == "open" else "listings"] += 1


def count_messages() -> None:
    send = PeerLink.send

    def send_and_count(link: PeerLink, message: object) -> None:
        counter["messages"] += 1
        send(link, message)  # type: ignore[arg-type]

    PeerLink.send = send_and_count  # type: ignore[method-assign,assignment]


def rates() -> dict[str, float]:
    """Wait until the workers have settled, then count for a while."""
    time.sleep(SETTLE_S)
    before, started_s, cpu_s = counter.copy(), time.monotonic(), time.process_time()
    time.sleep(COUNT_S)
    passed_s = time.monotonic() - started_s
    return {
        name: (counter[name] - before[name]) / passed_s
        for name in ("opens", "listings", "messages")
    } | {"cpu": (time.process_time() - cpu_s) / passed_s}


def measure(workers: int, phase: str) -> dict[str, Any]:
    """`workers` wait for one more, or train."""
    global folder
    with tempfile.TemporaryDirectory() as top:
        folder = f"{top}/run"
        mark = create_run_folder(Path(folder), "h0")
        limits = ElasticLimits(
            expected_workers=workers + (phase == "waiting"),
            min_workers=workers + (phase == "waiting"),
        )
        members = []
        for index in range(workers):
            host, slot = f"h{index // WORKERS_PER_HOST:03d}", index % WORKERS_PER_HOST
            env = WorkerEnv(
                folder, top, host, slot, WORKERS_PER_HOST, 1, 1, 8, "127.0.0.1", folder_id=mark
            )
            members.append(Membership(env, limits, on_abort=lambda sockets: None))
        for member in members:
            member.request_join({}, is_joining=False)
        for member in members if phase == "training" else ():
            member.next_generation(0)
        row = {"workers": workers, "phase": phase, **rates()}
        folder = ""
        for member in members:
            with suppress(OSError):
                member.close()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=SIZES)
    parser.add_argument("--keep", metavar="NAME")
    args = parser.parse_args()
    sys.addaudithook(on_audit)
    count_messages()
    load, rows = (
        os.getloadavg(),
        [measure(workers, phase) for phase in ("waiting", "training") for workers in args.workers],
    )
    lines = [
        "| workers | phase | opens/s | listings/s | messages/s | processor |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        figures = " | ".join(f"{row[name]:,.0f}" for name in ("opens", "listings", "messages"))
        lines.append(f"| {row['workers']} | {row['phase']} | {figures} | {row['cpu']:.2f} |")
    print("\n".join(lines))
    if args.keep:
        print(keep(args.keep, rows, "\n".join(lines), machine("not used", load)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
