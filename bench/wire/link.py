"""Step time of the wire formats over shaped links between hosts (network namespaces, as root), and the bytes of a step.

    python -m bench.wire.link                        2 and 4 hosts, 100 Mbit/s, three minutes on two cores
    python -m bench.wire.link --rate 1gbit --keep NAME
    python -m bench.wire.link --codec                only the cost of encoding and decoding

One worker on each host trains a Llama of 3.7 M parameters. Each process trains a step in each format in turn, in an order that
rotates, each after a barrier; a ratio is taken within a round, and its median counts. MB sent: by the rank that sends most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import timeit
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from support.hosts import Network
from support.traffic import counted_traffic

from bench.results import keep, machine
from lockstep.models.llama import Llama, init_param
from lockstep.models.llama_config import LlamaConfig
from lockstep.network.wire_format import FORMATS, MAX_BLOCK, Section
from lockstep.parallel.build_replica import build_replica
from lockstep.parallel.replica import Replica
from lockstep.parallel.wire_sum import decode, encode

CONFIG = LlamaConfig(2000, 256, 4, 4, 4, 64, 704, 128, 10_000.0, tie_embeddings=True)
ROWS, LENGTH = 4, 64
WARM_UP = 2


def make_replica(wire: str, leaves: int) -> Replica:
    model = Llama(CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(init_param(name, parameter.shape, CONFIG.n_layers, 1))
    return build_replica(
        model, micro_batches=leaves, wire=cast(Any, wire), bucket_bytes=4_000_000, init_sync=False
    )


def train_step(replica: Replica, step: int) -> float:
    """Return the seconds of a step."""
    dist.barrier()
    start_s = time.perf_counter()
    for k in replica.micro_batches(step):
        tokens = torch.randint(
            CONFIG.vocab_size, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(k)
        )
        replica.backward(
            replica(
                tokens[:, :-1],
                tokens[:, 1:].contiguous(),
                torch.zeros(ROWS, LENGTH, dtype=torch.long),
            )
        )
    dist.barrier()
    return time.perf_counter() - start_s


def work(rank: int, size: int, each: int, rounds: int, folder: Path) -> None:
    """Train on one host; write (wire, round, seconds, bytes) of each step to `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]  # public at run time
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    replicas = {wire: make_replica(wire, each * size) for wire in FORMATS}
    lines = []
    for number in range(WARM_UP + rounds):
        for turn in range(len(replicas)):
            wire, replica = list(replicas.items())[(number + turn) % len(replicas)]
            with counted_traffic() as traffic:
                seconds = train_step(replica, number)
            lines.append(
                {
                    "wire": wire,
                    "round": number,
                    "seconds": round(seconds, 4),
                    "bytes": traffic.bytes,
                }
            )
    (folder / f"{rank}.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines[WARM_UP * len(replicas) :])
    )
    dist.barrier()
    dist.destroy_process_group()


def measure(size: int, each: int, rate: str, rounds: int) -> list[dict[str, Any]]:
    """Return a line per step: seconds of rank 0, most bytes of a rank."""
    with Network(size) as network, tempfile.TemporaryDirectory(prefix="lockstep-wire-") as folder:
        for host in network.hosts:
            network.limit_rate(host, rate)
        command = [
            sys.executable,
            "-m",
            "bench.wire.link",
            "--worker",
            folder,
            "--rounds",
            str(rounds),
            "--each",
            str(each),
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        workers = [
            subprocess.Popen(
                [*host.enter, *command, "--rank", str(rank), "--size", str(size)], env=environ
            )
            for rank, host in enumerate(network.hosts)
        ]
        assert [worker.wait() for worker in workers] == [0] * size
        ranks = [
            [json.loads(line) for line in Path(folder, f"{rank}.jsonl").read_text().splitlines()]
            for rank in range(size)
        ]
    most = [max(line["bytes"] for line in lines) for lines in zip(*ranks, strict=True)]
    return [
        line | {"hosts": size, "micro_batches": each * size, "bytes": number}
        for line, number in zip(ranks[0], most, strict=True)
    ]


def codec_cost() -> str:
    """Return the CPU nanoseconds per element of encoding and decoding 4 M elements, the least of ten times."""
    flat, texts = torch.randn(2**22), []
    for wire, form in FORMATS.items():
        if form.is_exact:
            continue
        sections = (Section(wire, MAX_BLOCK if form.largest else 1, len(flat)),)
        calls = (
            partial(encode, flat, sections, 1),
            partial(decode, encode(flat, sections, 1), sections),
        )
        encode_ns, decode_ns = (
            min(timeit.repeat(call, timer=time.process_time, number=1, repeat=10)) / len(flat) * 1e9
            for call in calls
        )
        texts.append(f"{wire}: encode {encode_ns:.2f} ns, decode {decode_ns:.2f} ns per element")
    return "\n".join(texts)


def table(lines: list[dict[str, Any]], rate: str) -> str:
    rows = [
        "| hosts | micro-batches | format | MB sent | step | step / fp32 |",
        "| ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for hosts, leaves in sorted({(line["hosts"], line["micro_batches"]) for line in lines}):
        chosen = [
            line for line in lines if (line["hosts"], line["micro_batches"]) == (hosts, leaves)
        ]
        plain = {line["round"]: line["seconds"] for line in chosen if line["wire"] == "fp32"}
        for wire in FORMATS:
            own = [line for line in chosen if line["wire"] == wire]
            ratios = sorted(line["seconds"] / plain[line["round"]] for line in own)
            spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            sent = f"{own[0]['bytes'] / 1e6:.2f}" if own[0]["bytes"] else "by gloo"
            rows.append(
                f"| {hosts} | {leaves} | {wire} | {sent} | {median(line['seconds'] for line in own):.2f} s | {spread} |"
            )
    return f"Links of {rate} in each direction.\n\n" + "\n".join(rows) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="2,4")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--codec", action="store_true")
    parser.add_argument("--keep", metavar="NAME", default="")
    for name, kind in (("worker", Path), ("rank", int), ("size", int), ("each", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.codec:
        torch.set_num_threads(1)
        print(codec_cost())
        return
    if args.worker:
        work(args.rank, args.size, args.each, args.rounds, args.worker)
        return
    load_before = os.getloadavg()
    lines = []
    for size, each in product(map(int, args.hosts.split(",")), (1, 2)):
        lines += measure(size, each, args.rate, args.rounds)
        print(table(lines[-3 * args.rounds :], args.rate), flush=True)
    if args.keep:
        keep(args.keep, lines, table(lines, args.rate), machine("fp32", load_before))


if __name__ == "__main__":
    main()
