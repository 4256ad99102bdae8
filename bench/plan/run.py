"""Compare `lockstep plan` with real training over shaped links: 2 models x 3 links x 6 layouts.

    python -m bench.plan.run                                   all 36
    python -m bench.plan.run --links 100mbit --models llama    a part
    python -m bench.plan.run --keep NAME                       kept under bench/plan/DATE-NAME/

Two hosts with one worker each are network namespaces on one switch, whose links `tc tbf` limits.
Needs root. The data is prepared once. Both hosts share this machine, so two processes time the
blocks at once, before and after the runs of a model, and the mean counts. A step is the median of
steps 4 and later; memory is the peak resident memory (VmHWM) of the larger worker until the run
ends, with the checkpoint of the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from support.hosts import Host, Network, enter

from bench.results import keep, machine
from lockstep.config.resolve import parse_flags, resolve
from lockstep.config.schema import RunConfig
from lockstep.layout import Layout
from lockstep.network.moves import Link
from lockstep.planner.calibration import calibrate_together
from lockstep.planner.devices import SAME_HOST, Cluster
from lockstep.planner.memory_cost import memory_cost
from lockstep.planner.model_cost import ModelCost
from lockstep.planner.step_cost import Timing, Workload, mean_timing, step_cost

COMMON = "--compute.precision fp32 --batch.micro_batches 4 --evaluate.at_end 0 --checkpoint.every_steps 0"
MODELS = {
    "translator": f"{COMMON} --data.pairs 20000",
    "llama": f"{COMMON} --task pretrain --data.kind stdlib --llama.size 5M --tokenizer.vocab_size 4096 --batch.seq_len 256",
}
LINKS = {"50mbit": 50e6, "100mbit": 100e6, "1000mbit": 1000e6}  # bit/s
LAYOUTS = {
    "replicate 2": "",
    "shard 2": "--layout.shard 2",
    "shard 2, once per step": "--layout.shard 2 --fsdp.reduce per_step",
    "tensor 2": "--layout.tensor 2",
    "pipeline 2": "--layout.pipeline 2",
    "pipeline 2, 2 chunks": "--layout.pipeline 2 --layout.pipeline_chunks 2",
}
SKIPPED = 3  # steps that are not timed
# Times messages of the engine in both directions at once, as lockstep bench comm does: (latency, rate).
PROBE = """
import sys, time
import torch, torch.distributed as dist
from lockstep.network.measurements import fit_link
from lockstep.parallel.ordered_sum import start_exchange
from lockstep.runtime.process_group import group_timeout, init_default_group
from lockstep.runtime.work import wait_for
rank = int(sys.argv[1])
init_default_group(dist.FileStore(sys.argv[2], 2), rank, 2, torch.device("cpu"), 60.0)
def timed(sent, received):
    start_s = time.perf_counter()
    wait_for(start_exchange([(1 - rank, sent)], [(1 - rank, received)], dist.group.WORLD), group_timeout())
    return time.perf_counter() - start_s
def shortest(size, count):
    buffers = torch.zeros(2, size, dtype=torch.uint8)
    timed(*buffers)  # uses up the burst
    return min(timed(*buffers) for _ in range(count))
link = fit_link({size: shortest(size, count) for size, count in {1 << 10: 50, 1 << 16: 50, 1 << 20: 9, 1 << 23: 3}.items()})
print(link.latency_s, link.bytes_per_s)
"""


def shape(network: Network, host: Host, rate: float) -> None:
    """Limit the link of a host in each direction; the burst is what arrives in 4 ms."""
    for pid, name in (
        (network.switch, f"to{network.hosts.index(host) + 1}"),
        (host.holder, "eth0"),
    ):
        command = f"tc qdisc replace dev {name} root tbf rate {rate:.0f}bit burst {max(16_000, rate / 8 * 0.004):.0f} latency 400ms"
        subprocess.run([*enter(pid), *command.split()], check=True)


def probe(hosts: list[Host], store: Path) -> Link:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
    commands = [
        [*host.enter, sys.executable, "-c", PROBE, str(rank), str(store)]
        for rank, host in enumerate(hosts)
    ]
    peers = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    return Link(*map(float, next(iter([peer.communicate()[0] for peer in peers])).split()))


def train(folder: Path, hosts: list[Host], words: list[str]) -> tuple[float, int, list[float]]:
    """Return (seconds of a step, peak bytes of the larger worker, seconds of all steps)."""
    tables = [
        f'[[host]]\nname = "{host.name}"\naddress = "{host.address}"\nworkers = 1\n'
        for host in hosts
    ]
    (folder / "hosts.toml").write_text("\n".join(tables))
    environ, agents, peaks = {**os.environ, "OMP_NUM_THREADS": "1"}, [], dict[int, int]()
    for host in hosts:
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "launch",
            "--hosts",
            "hosts.toml",
            "--host",
            host.name,
            "--out",
            "run",
            "--min",
            "2",
        ]
        with open(folder / f"{host.name}.out", "wb") as output:
            agents.append(
                subprocess.Popen(
                    [*host.enter, *command, *words],
                    cwd=folder,
                    env=environ,
                    stdout=output,
                    stderr=output,
                )
            )
    while any(agent.poll() is None for agent in agents):
        for agent in agents:
            with suppress(psutil.Error, OSError, IndexError):
                for child in psutil.Process(agent.pid).children(recursive=True):
                    status = Path(f"/proc/{child.pid}/status").read_text()
                    peaks[child.pid] = int(status.split("VmHWM:")[1].split()[0]) * 1024
        time.sleep(0.05)
    if codes := [agent.returncode for agent in agents if agent.returncode]:
        raise RuntimeError(f"exit codes {codes}: {(folder / 'a.out').read_text()[-2000:]}")
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    return median(seconds[SKIPPED:]), max(peaks.values()), seconds


def predict(model: ModelCost, timing: Timing, words: list[str], link: Link) -> tuple[float, int]:
    run = with_precision(resolve(flags=parse_flags(words)).run)
    axes = run.layout
    size = axes.shard * axes.tensor * axes.pipeline
    layout, cluster = (
        Layout(2 // size, axes.shard, axes.tensor, axes.pipeline),
        Cluster(2, 1, "cpu", 1 << 40, SAME_HOST["cpu"], link),
    )
    seconds = step_cost(Workload(model, run, cluster, timing), layout).seconds
    return seconds, memory_cost(model, run, layout, "cpu").total


def with_precision(run: RunConfig) -> RunConfig:
    precision = Cluster(1, 1, "cpu", 0, SAME_HOST["cpu"], SAME_HOST["cpu"]).precision()
    auto = run.compute.precision == "auto"
    return replace(run, compute=replace(run.compute, precision=precision)) if auto else run


def measure(
    name: str, flags: str, args: argparse.Namespace, folder: Path, network: Network
) -> list[dict[str, Any]]:
    data, words, rows = folder / name, flags.split(), list[dict[str, Any]]()
    run = with_precision(resolve(flags=parse_flags(words)).run)
    model, timing = calibrate_together(run, data, "cpu", [2], 2)
    timings = [timing]
    for link_name in args.links:
        for host in network.hosts:
            shape(network, host, LINKS[link_name])
        link = probe(network.hosts, folder / f"{name}-{link_name}")
        for layout in args.layouts:
            work = folder / "work"
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(data, work / "run")
            layout_words = LAYOUTS[layout].split()
            seconds, peak, steps = train(
                work, network.hosts, [*words, *layout_words, "--steps", str(args.steps)]
            )
            row = {
                "model": name,
                "link": link_name,
                "link_bytes_per_s": link.bytes_per_s,
                "link_latency_s": link.latency_s,
            }
            rows.append(
                row
                | {
                    "layout": layout,
                    "seconds": seconds,
                    "bytes": peak,
                    "steps": steps,
                    "words": [*words, *layout_words],
                }
            )
            print(
                f"{name:11} {link_name:9} {layout:24} {seconds:7.3f} s {peak / 1e6:7.1f} MB",
                file=sys.stderr,
                flush=True,
            )
    timings.append(calibrate_together(run, data, "cpu", [2], 2)[1])
    for row in rows:
        link = Link(row["link_latency_s"], row["link_bytes_per_s"])
        row["predicted_s"], row["predicted_bytes"] = predict(
            model, mean_timing(timings), row.pop("words"), link
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | link | layout | step | predicted | ratio | memory | predicted | ratio |",
        "| --- |" + " --- |" * 8,
    ]
    for row in rows:
        time_ratio, memory_ratio = (
            row["predicted_s"] / row["seconds"],
            row["predicted_bytes"] / row["bytes"],
        )
        times = f"{row['seconds']:.3f} s | {row['predicted_s']:.3f} s | {time_ratio:.2f}"
        sizes = f"{row['bytes'] / 1e6:.0f} MB | {row['predicted_bytes'] / 1e6:.0f} MB | {memory_ratio:.3f}"
        lines.append(f"| {row['model']} | {row['link']} | {row['layout']} | {times} | {sizes} |")
    for model, link in dict.fromkeys((row["model"], row["link"]) for row in rows):
        cell = [row for row in rows if (row["model"], row["link"]) == (model, link)]
        chosen, best = (
            min(cell, key=lambda row: row["predicted_s"]),
            min(cell, key=lambda row: row["seconds"]),
        )
        ratio = chosen["seconds"] / best["seconds"]
        lines.append(
            f"\n{model}, {link}: the plan picks {chosen['layout']}, {ratio:.2f} times the step of the best, {best['layout']}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--keep", metavar="NAME")
    args = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="plan-") as folder, Network(2) as network:
        rows = [
            row
            for name in args.models
            for row in measure(name, MODELS[name], args, Path(folder), network)
        ]
    print(table(rows))
    if args.keep:
        print(keep(args.keep, rows, table(rows), machine("auto", load)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
