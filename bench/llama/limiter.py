"""The rate limiter: how many blocks may be gathered ahead, over a link of 1 Gbit/s between two hosts (network namespaces, as root).

    .venv/bin/python -m bench.llama.limiter --keep limiter

A Llama cut into two shards, one on each host. For each setting of fsdp.prefetch_units and fsdp.reshard_after_forward: the step, what of it
waited for the wire, and the most memory that a worker had; the settings in turn, several times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from support.hosts import Host, Network

from bench.results import TOP, keep, machine

SETTINGS = {
    "nothing ahead": ["--fsdp.prefetch_units", "0"],
    "one block ahead": ["--fsdp.prefetch_units", "1"],
    "two blocks ahead": ["--fsdp.prefetch_units", "2"],
    "all blocks ahead": ["--fsdp.prefetch_units", "100"],
    "one ahead, kept until the backward pass": [
        "--fsdp.prefetch_units",
        "1",
        "--fsdp.reshard_after_forward",
        "false",
    ],
}
WARM = 2
RECIPE = TOP / "recipes" / "llama-pretrain.toml"
SOURCE = TOP / "src" / "lockstep"


def flags(shape: str, steps: int) -> list[str]:
    values = {
        "steps": steps,
        "llama.size": shape,
        "data.kind": "text",
        "data.train": f"{SOURCE}/*/*.py",
        "data.held_out_share": 0.2,
        "tokenizer.vocab_size": 1000,
        "batch.micro_batches": 2,
        "batch.tokens": 2048,
        "batch.seq_len": 512,
        "checkpoint.every_steps": 0,
        "layout.shard": 2,
        "evaluate.at_end": 0,
    }
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def shape_cable(network: Network, host: Host, rate: str) -> None:
    """Let `rate` through, each way; bursts of a millisecond."""
    network.limit_rate(host, rate)
    for pid in (network.switch, host.holder):
        name = f"to{network.hosts.index(host) + 1}" if pid == network.switch else "eth0"
        change = f"tc qdisc change dev {name} root tbf rate {rate} burst 256kb latency 50ms"
        subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", *change.split()], check=True)


def train(network: Network, words: list[str], limit_s: float = 400.0) -> list[dict[str, Any]]:
    """The metrics of a run on both hosts, a line for each step."""
    with tempfile.TemporaryDirectory(prefix="lockstep-limiter-") as folder:
        tables = [
            f'[[host]]\nname = "{one.name}"\naddress = "{one.address}"\nworkers = 1\n'
            for one in network.hosts
        ]
        (Path(folder) / "hosts.toml").write_text("\n".join(tables))
        processes = []
        for host in network.hosts:
            command = [
                *host.enter,
                sys.executable,
                "-m",
                "lockstep",
                "launch",
                str(RECIPE),
                "--hosts",
                "hosts.toml",
                "--host",
                host.name,
            ]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "LOCKSTEP_TMP": folder}
            with open(Path(folder) / f"{host.name}.out", "wb") as output:
                whole = [*command, "--out", "run", *words]
                processes.append(
                    subprocess.Popen(whole, cwd=folder, env=environ, stdout=output, stderr=output)
                )
        codes = [process.wait(limit_s) for process in processes]
        if any(codes):
            raise SystemExit((Path(folder) / "a.out").read_text()[-3000:])
        return [
            json.loads(line)
            for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        ]


def main() -> None:
    """The command."""
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--shape", default="25M")
    asked.add_argument("--rate", default="1gbit")
    asked.add_argument("--steps", type=int, default=6)
    asked.add_argument("--repetitions", type=int, default=3)
    asked.add_argument("--keep", default="")
    args = asked.parse_args()
    load, lines = os.getloadavg(), []
    with Network(2) as network:
        for host in network.hosts:
            shape_cable(network, host, args.rate)
        for repetition in range(args.repetitions):
            for setting, words in SETTINGS.items():
                steps = train(network, [*flags(args.shape, args.steps), *words])[WARM:]
                line = {
                    "setting": setting,
                    "repetition": repetition,
                    "seconds": [round(one["seconds"], 4) for one in steps],
                }
                line["waited"] = [round(one["communication_seconds"], 4) for one in steps]
                line["memory_bytes"] = max(one["memory_bytes"] for one in steps)
                lines.append(line)
                print(json.dumps(line), flush=True)
    first = next(iter(SETTINGS))

    def middle(setting: str, key: str, repetition: int) -> float:
        return median(
            next(
                one[key]
                for one in lines
                if one["setting"] == setting and one["repetition"] == repetition
            )
        )

    rows = [
        "| setting | step | waited for the wire | step / nothing ahead | most memory |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for setting in SETTINGS:
        turns = range(args.repetitions)
        ratios = sorted(middle(setting, "seconds", n) / middle(first, "seconds", n) for n in turns)
        step, waited = (
            median(middle(setting, key, n) for n in turns) for key in ("seconds", "waited")
        )
        memory = max(one["memory_bytes"] for one in lines if one["setting"] == setting) / 2**20
        told = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append(f"| {setting} | {step:.2f} s | {waited:.2f} s | {told} | {memory:.0f} MiB |")
    text = (
        f"Llama {args.shape} in two shards, one worker on each of two hosts, {args.rate} between them; 2 micro-batches of 2,048 tokens; "
        f"median of {args.repetitions} repetitions (lowest to highest). "
        f"Load before {load[0]:.1f}, after {os.getloadavg()[0]:.1f}.\n\n" + "\n".join(rows) + "\n"
    )
    print(text)
    if args.keep:
        keep(args.keep, lines, text, machine("bf16 products, one thread a process", load))


if __name__ == "__main__":
    main()
