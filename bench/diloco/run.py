"""Measure time and bytes to the same loss over slow links: DiLoCo and the wire formats against DistributedDataParallel.

    python -m bench.diloco.run                                         all, two hosts, three links: hours
    python -m bench.diloco.run --rates 100mbit --contestants ddp diloco-50 --steps 100
    python -m bench.diloco.run --seeds 1 2 3 --keep NAME               keep bench/diloco/DATE-NAME/
    python -m bench.diloco.run --torchft PYTHON                        an interpreter that has torchft and what Lockstep needs

    python -m bench.diloco.run --contestants fp32 diloco-10 --workers 2 --layout.shard 2    a replica of two shards on each host

Two hosts are network namespaces with one worker each, or --workers; `tc tbf` limits their links in each direction. Needs root.

ddp, ddp-bf16     bench/diloco/plain_ddp.py under torchrun; with torch's bf16 hook
torchft-H         bench/diloco/with_torchft.py: torchft's DiLoCo, with the outer learning rate and momentum of --outer
fp32, bf16, int8  `lockstep launch` with --parallel.wire; every step is exchanged
diloco-H          `lockstep launch` with --diloco.learners M --diloco.every H, M from --learners; diloco-H-int8 adds the wire format
NAME-x2           NAME with twice the steps, and twice the decay of the learning rate

A contestant trains all steps of the recipe. Its loss is that of the validation pairs, computed afterwards from the weights of
every --every steps: nothing in the measured time serves the comparison. The target is 1.005 times the last loss of
`ddp`. Bytes: sent by host a, by its interface's counter, TCP and membership included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.hosts import Host, Network, enter

from bench.results import TOP, keep, machine
from lockstep.checkpoint.store import CheckpointStore
from lockstep.config.resolve import parse_flags, resolve
from lockstep.corpus.encoded_pairs import PreparedPairs, open_prepared, prepare
from lockstep.generation.beam_search import batches_by_length
from lockstep.models.translator import build_translator
from lockstep.network.wire_format import FORMATS
from lockstep.record.metrics import read_metrics
from lockstep.tasks.translation import make_order

CONTESTANTS = ("ddp", "ddp-bf16", "fp32", "bf16", "int8", "diloco-50", "diloco-50-int8")
RATES = ("50mbit", "100mbit", "1gbit")
WITHIN = 1.005  # of the last loss of `ddp`


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rates", nargs="+", default=RATES)
    options.add_argument("--contestants", nargs="+", default=CONTESTANTS)
    options.add_argument("--seeds", nargs="+", type=int, default=[1])
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--every", type=int, default=50, help="steps between saved weights")
    options.add_argument(
        "--workers", type=int, default=1, help="of a host, for contestants of Lockstep"
    )
    options.add_argument("--learners", type=int, default=2)
    options.add_argument(
        "--outer",
        nargs=2,
        default=(),
        metavar=("RATE", "MOMENTUM"),
        help="of the outer step; default: the recipe's",
    )
    options.add_argument("--torchft", metavar="PYTHON", default=sys.executable)
    options.add_argument("--keep", metavar="NAME")
    args, words = options.parse_known_args()
    load, rows = os.getloadavg(), []
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder, Network(2) as network:
        for seed in args.seeds:
            base = ["--seed", str(seed), "--compute.precision", "fp32", *words]
            run = resolve(None, parse_flags(base)).run
            data = Path(folder) / f"data-{seed}"
            prepare(run.data, run.tokenizer, data)
            for rate in args.rates:
                for host in network.hosts:
                    network.limit_rate(host, rate)
                for name in args.contestants:
                    place = Path(folder) / f"{name}-{rate}-{seed}"
                    shutil.copytree(data, place / "run/data")
                    sent = sent_bytes(network.hosts[0])
                    plain_name, _, factor = name.partition("-x")
                    steps = args.steps * int(factor or 1)
                    run_contestant(
                        plain_name, place, network.hosts, ["--steps", str(steps), *base], args
                    )
                    sent = sent_bytes(network.hosts[0]) - sent
                    row = {
                        "contestant": name,
                        "rate": rate,
                        "seed": seed,
                        "steps": steps,
                        "bytes": sent,
                    }
                    row |= read_result(place, base, max(args.every, interval_of(name)))
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    table = describe(rows)
    print(table)
    if args.keep:
        print(keep(args.keep, rows, table, machine("fp32", load)))


def run_contestant(
    name: str, place: Path, hosts: Sequence[Host], base: Sequence[str], args: argparse.Namespace
) -> None:
    """Train on all hosts and wait. RuntimeError with the output if a host fails."""
    kind, *rest = name.split("-")
    processes = []
    for number, host in enumerate(hosts):
        if kind == "ddp":
            nodes = [
                "--nnodes",
                str(len(hosts)),
                "--node-rank",
                str(number),
                "--nproc-per-node",
                "1",
            ]
            where = ["--master-addr", hosts[0].address, "--master-port", "29512"]
            script = [
                "-m",
                "bench.diloco.plain_ddp",
                str(place / "run/data"),
                str(place),
                str(args.every),
                *(rest or ["none"]),
                *base,
            ]
            command = [sys.executable, "-m", "torch.distributed.run", *nodes, *where, *script]
        elif kind == "torchft":
            where = [rest[0], str(number), ",".join(each.address for each in hosts)]
            script = [
                "-m",
                "bench.diloco.with_torchft",
                str(place / "run/data"),
                str(place),
                str(args.every),
                *where,
            ]
            command = [args.torchft, *script, *base, *flags_of(f"diloco-{rest[0]}", args)]
        else:
            tables = [
                f'[[host]]\nname = "{each.name}"\naddress = "{each.address}"\nworkers = {args.workers}\n'
                for each in hosts
            ]
            (place / "hosts.toml").write_text("\n".join(tables))
            values = [
                "--checkpoint.every_steps",
                str(max(args.every, interval_of(name))),
                "--checkpoint.keep",
                "0",
                "--evaluate.at_end",
                "0",
                *flags_of(name, args),
            ]
            command = [
                sys.executable,
                "-m",
                "lockstep",
                "launch",
                "--hosts",
                str(place / "hosts.toml"),
                "--host",
                host.name,
            ]
            command += [
                "--min",
                str(len(hosts) * args.workers),
                "--out",
                str(place / "run"),
                *base,
                *values,
            ]
        environ = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONPATH": f"{TOP}:{TOP / 'src'}",
        }
        with open(place / f"{host.name}.out", "wb") as output:
            processes.append(
                subprocess.Popen(
                    [*host.enter, *command], env=environ, stdout=output, stderr=output, cwd=TOP
                )
            )
    if any([process.wait() for process in processes]):
        raise RuntimeError(
            "\n".join(path.read_text(errors="replace")[-2000:] for path in place.glob("*.out"))
        )


def interval_of(name: str) -> int:
    """Return H of a DiLoCo contestant, which has common weights in every H-th step only; 1 for others."""
    return int(name.split("-")[1]) if name.startswith("diloco-") else 1


def flags_of(name: str, args: argparse.Namespace) -> list[str]:
    """Return the flags of a contestant of Lockstep. `--parallel.wire fp32` is the default."""
    kind, *rest = name.split("-")
    flags = (
        ["--diloco.learners", str(args.learners), "--diloco.every", rest.pop(0)]
        if kind == "diloco"
        else []
    )
    if flags and args.outer:
        flags += [
            "--diloco.outer_learning_rate",
            args.outer[0],
            "--diloco.outer_momentum",
            args.outer[1],
        ]
    wire = rest[0] if kind == "diloco" and rest else kind
    return flags + (["--parallel.wire", wire] if wire in FORMATS else [])


def read_result(place: Path, base: Sequence[str], every: int) -> dict[str, Any]:
    """Return seconds and validation loss after every `every` steps, and the share of time in computation."""
    plain = place / "steps.jsonl"
    lines = (
        [json.loads(line) for line in plain.read_text().splitlines()]
        if plain.exists()
        else read_metrics(place / "run/metrics.jsonl")
    )
    seconds = dict(
        zip(
            (line["step"] for line in lines),
            accumulate(line["seconds"] for line in lines),
            strict=True,
        )
    )
    waited = (
        sum(line["communication_seconds"] for line in lines)
        if "communication_seconds" in lines[0]
        else None
    )
    steps = range(every, lines[-1]["step"] + 1, every)
    losses = [
        (seconds[step], loss)
        for step, loss in zip(steps, validation_losses(place, base, steps), strict=True)
    ]
    return {
        "curve": losses,
        "computing": None if waited is None else 1 - waited / seconds[lines[-1]["step"]],
    }


def validation_losses(place: Path, base: Sequence[str], steps: Sequence[int]) -> Iterator[float]:
    run, corpus = resolve(None, parse_flags(list(base))).run, open_prepared(place / "run/data")
    length = make_order(run, corpus).shapes[-1].length
    model = build_translator(
        run.model,
        vocab_size=corpus.tokenizer.vocab_size,
        device=torch.device("cpu"),
        seed=0,
        length=length,
    ).eval()
    for step in steps:
        model.load_state_dict(weights_at(place, step))
        yield validation_loss(model, corpus)


def weights_at(place: Path, step: int) -> Mapping[str, torch.Tensor]:
    if (path := place / f"{step}.safetensors").exists():
        return load_file(path)
    tensors = CheckpointStore(place / "run/checkpoints").load(step).tensors
    return {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name.startswith("model.")
    }


@torch.inference_mode()
def validation_loss(model: torch.nn.Module, corpus: PreparedPairs) -> float:
    """Return nats per target token, without label smoothing."""
    pairs, nats = corpus.validation, 0.0
    for rows in batches_by_length(pairs.lengths.max(axis=1).tolist(), 4096):
        lengths = pairs.lengths[rows].max(axis=0)
        nats += float(
            model(
                *map(
                    torch.from_numpy,
                    pairs.gather(
                        torch.tensor(rows).numpy(), len(rows), int(lengths[0]), int(lengths[1])
                    ),
                )
            )
        )
    return nats / int(pairs.lengths[:, 1].sum())


def seconds_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return when the loss reached `target`, between two measured points; None: never."""
    for (before_s, before), (after_s, after) in pairwise(curve):
        if before > target >= after:
            return before_s + (after_s - before_s) * (before - target) / (before - after)
    return curve[0][0] if curve[0][1] <= target else None


def describe(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| link | seed | contestant | last loss | seconds | to the target | bytes per step | computing |",
        "|" + " --- |" * 8,
    ]
    for row in rows:
        ddp = next(
            (
                other
                for other in rows
                if (other["contestant"], other["rate"], other["seed"])
                == ("ddp", row["rate"], row["seed"])
            ),
            None,
        )
        reached = seconds_to(row["curve"], WITHIN * ddp["curve"][-1][1]) if ddp else None
        computing = "" if row["computing"] is None else f"{row['computing']:.0%}"
        cells = [
            row["rate"],
            row["seed"],
            row["contestant"],
            f"{row['curve'][-1][1]:.4f}",
            f"{row['curve'][-1][0]:.0f}",
        ]
        cells += [
            "not reached" if reached is None else f"{reached:.0f} s",
            f"{row['bytes'] / row['steps']:,.0f}",
            computing,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def sent_bytes(host: Host) -> int:
    shown = subprocess.run(
        [*enter(host.holder), "ip", "-s", "-j", "link", "show", "eth0"],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


if __name__ == "__main__":
    main()
