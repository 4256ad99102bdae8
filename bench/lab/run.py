"""Simulated against measured times of `lockstep lab --run`, between network namespaces with a rate limiter.

Each rank is a process in its network namespace. `tc tbf` limits the interface in both directions. The link of the simulation is
fitted first, from messages between two ranks: latency from one of 4 bytes, rate from one of the full size. Every other time is then
predicted. The sockets get small buffers: with those of megabytes a message would leave its rank long before it arrives. Needs root.

    OMP_NUM_THREADS=1 python -m bench.lab.run --keep shaped
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from support.hosts import Network, enter

from bench.results import keep, machine
from lockstep.network.collectives import COLLECTIVES, algorithms_for

PORT = 29611
SOCKET_BYTES = "4096 16384 32768"  # least, default and most of a socket buffer


def measure(network: Network, collective: str, ranks: int, words: list[str]) -> dict[str, Any]:
    """Run the lab with a rank on each of the first hosts; return rank 0's JSON."""
    command = [
        sys.executable,
        "-m",
        "lockstep",
        "lab",
        collective,
        "--ranks",
        str(ranks),
        *words,
        "--run",
        "--json",
    ]
    processes = []
    for rank, host in enumerate(network.hosts[:ranks]):
        environ = {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": PORT,
        }
        env = {
            **os.environ,
            **{name: str(value) for name, value in environ.items()},
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [*host.enter, *command],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(
            f"{' '.join(command)}\n" + "\n".join(error[-1500:] for _, error in outputs)
        )
    result: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return result


def fit_link(network: Network, size: int) -> tuple[float, float]:
    """Return (latency in seconds, bytes per second) between two ranks."""

    def seconds(count: int) -> float:
        words = ["--bytes", str(count), "--rate", "1 MB/s", "--algorithm", "tree"]
        return float(measure(network, "broadcast", 2, words)["algorithms"]["tree"]["measured_s"])

    latency_s = seconds(4)
    return latency_s, size / (seconds(size) - latency_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--size", type=int, default=1_000_000, help="bytes of the buffer")
    parser.add_argument("--tbf", default="40mbit", help="rate of each interface, as tc writes it")
    parser.add_argument("--keep", metavar="NAME", help="keep the result under bench/lab/DATE-NAME")
    args = parser.parse_args()
    load, raw = os.getloadavg(), []
    with Network(max(args.ranks)) as network:
        for host in network.hosts:
            network.limit_rate(host, args.tbf)
            for name in ("tcp_wmem", "tcp_rmem"):
                subprocess.run(
                    [*enter(host.holder), "sysctl", "-qw", f"net.ipv4.{name}={SOCKET_BYTES}"],
                    check=True,
                )
        latency_s, rate = fit_link(network, args.size)
        print(
            f"tbf {args.tbf}: latency {latency_s * 1e6:.0f} us, {rate / 1e6:.3f} MB/s", flush=True
        )
        words = ["--bytes", str(args.size), "--rate", str(rate), "--latency", str(latency_s)]
        for ranks in args.ranks:
            for collective in COLLECTIVES:
                for algorithm, result in measure(network, collective, ranks, words)[
                    "algorithms"
                ].items():
                    times = {
                        "simulated_s": result["seconds"],
                        "measured_s": result["measured_s"],
                        "torch_s": result["torch_s"],
                    }
                    raw.append(
                        {"ranks": ranks, "collective": collective, "algorithm": algorithm, **times}
                    )
                    print(json.dumps(raw[-1]), flush=True)
    table = f"Fitted: latency {latency_s * 1e6:.0f} us, {rate / 1e6:.3f} MB/s of {args.tbf}; {args.size:,} bytes.\n\n{format_table(raw)}"
    print(table)
    if args.keep:
        print(keep(args.keep, raw, table, machine("fp32", load)))


def format_table(raw: list[dict[str, Any]]) -> str:
    """Return measured / simulated time: a row for each pair, a column for each number of ranks."""
    ratios = {
        (row["collective"], row["algorithm"], row["ranks"]): row["measured_s"] / row["simulated_s"]
        for row in raw
    }
    ranks = sorted({row["ranks"] for row in raw})
    lines = [
        f"| measured / simulated | {' | '.join(f'{count} ranks' for count in ranks)} |",
        "| --- |" + " --- |" * len(ranks),
    ]
    for collective in COLLECTIVES:
        for algorithm in algorithms_for(2, 1):
            cells = [f"{ratios[collective, algorithm, count]:.2f}" for count in ranks]
            lines.append(f"| {collective} {algorithm} | {' | '.join(cells)} |")
    values = list(ratios.values())
    within = sum(abs(value - 1) <= 0.1 for value in values)
    spread = f"from {min(values):.2f} to {max(values):.2f}; {within} of {len(values)} within 10%"
    lines.append(f"\nMedian {statistics.median(values):.3f}, {spread}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
