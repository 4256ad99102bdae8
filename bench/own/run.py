"""Race a Session with a user's own model against bare PyTorch and Accelerate.

    python -m bench.own.run                      all cells, about six minutes on two cores
    python -m bench.own.run resnet-replicas-1    one cell
    python -m bench.own.run --keep NAME          keep bench/own/DATE-NAME/

A cell is a model (a ResNet with BatchNorm, a GPT), a layout (two replicas or two shards) and the micro-batches per process. Two processes
of one thread train a step of each contestant in turn, in an order that rotates, with a barrier before and after each step. A ratio is
taken within a round; its median counts. The Session votes in each step, compares all weights, and applies BatchNorm's statistics in the
order of the micro-batches. Opponents: DistributedDataParallel and Accelerate for replicas, FSDP2 with one unit per block for shards.
Memory is the peak of a worker that trains one contestant alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise, product
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lockstep
from bench.results import keep, machine
from bench.step.contestants import WORKERS, run
from bench.step.contests import ALLOCATOR

CELLS = [
    f"{model}-{layout}-{each}"
    for model, layout, each in product(("resnet", "gpt"), ("replicas", "shards"), (1, 4))
]
OPPONENTS = {"replicas": ("bare DDP", "Accelerate"), "shards": ("FSDP2",)}
CLASSES, VOCABULARY, LENGTH, DIM = 10, 512, 128, 256
MEMORY_STEPS, WARM_UP = 12, 3
Loop = Iterator[Tensor]  # trains a step for each `next`; yields its last loss
Batch = tuple[Tensor, Tensor]


class ResidualBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(2))
        self.skip = nn.Conv2d(inner, outer, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(images)))
        return F.relu(self.skip(images) + self.norms[1](self.second(inner)))


def make_resnet() -> nn.Module:
    """Return a ResNet for images of 32 x 32: 2.8 M parameters."""
    widths = (64, 64, 128, 128, 256, 256)
    blocks = [
        ResidualBlock(inner, outer, 1 + (inner != outer)) for inner, outer in pairwise(widths)
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), *blocks, *head
    )


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, 64)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """3.4 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)  # type: ignore[no-any-return]


class Cell:
    """What every contestant of a cell trains: micro-batch `k` of 2 * each."""

    def __init__(self, name: str) -> None:
        self.model, self.layout, each = name.split("-")
        self.each = int(each)
        self.batches = [self._batch(k) for k in range(WORKERS * self.each)]
        rank = int(os.environ["RANK"])
        self.own = range(rank * self.each, (rank + 1) * self.each)

    def _batch(self, k: int) -> Batch:
        random = torch.Generator().manual_seed(k)
        if self.model == "resnet":
            return torch.randn(16, 3, 32, 32, generator=random), torch.randint(
                CLASSES, (16,), generator=random
            )
        text = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=random)
        return text[:, :-1], text[:, 1:].flatten()

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = make_resnet() if self.model == "resnet" else GPT()
        if self.model == "resnet":
            return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def loss(self, model: nn.Module, k: int) -> Tensor:
        inputs, labels = self.batches[k]
        return F.cross_entropy(model(inputs), labels)

    def loop(self, name: str, folder: Path) -> Loop:
        return {
            "bare DDP": self.bare_ddp,
            "Accelerate": self.accelerate,
            "FSDP2": self.fsdp2,
            "Session": lambda: self.session(folder),
        }[name]()

    def bare_ddp(self) -> Loop:
        model, optimizer = self.make()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        while True:
            for k in self.own:
                with nullcontext() if k == self.own[-1] else ddp.no_sync():
                    (loss := self.loss(ddp, k) / self.each).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach() * self.each

    def accelerate(self) -> Loop:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=self.each)
        model, optimizer = accelerator.prepare(*self.make())
        while True:
            for k in self.own:
                with accelerator.accumulate(model):
                    accelerator.backward(loss := self.loss(model, k))
                    optimizer.step()
                    optimizer.zero_grad()
            yield loss.detach()

    def fsdp2(self) -> Loop:
        from torch.distributed.fsdp import fully_shard

        model: Any = self.make()[0]
        for module in [*model.modules()]:
            if isinstance(module, ResidualBlock | AttentionBlock):
                fully_shard(module)
        fully_shard(model)
        sgd = self.model == "resnet"
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            if sgd
            else torch.optim.AdamW(model.parameters(), lr=1e-4)
        )
        while True:
            for k in self.own:
                model.set_requires_gradient_sync(k == self.own[-1])
                (loss := self.loss(model, k) / self.each).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach() * self.each

    def session(self, folder: Path) -> Loop:
        shard = WORKERS if self.layout == "shards" else 1
        with lockstep.Session(
            folder / "session", micro_batches=WORKERS * self.each, shard=shard
        ) as session:
            model, optimizer = session.prepare(*self.make())
            for step in session.steps(1_000_000):
                for k in session.micro_batches(step):
                    session.backward(loss := self.loss(model, k))
                optimizer.step()
                yield loss.detach()


def race(name: str, folder: Path, seconds: float) -> NoReturn:
    """In each of the two processes: record the seconds of each contestant and round."""
    cell = Cell(name)
    names = ["Session", *OPPONENTS[cell.layout]]
    loops = {one: cell.loop(one, folder) for one in names}
    for loop in loops.values():  # the Session first: it forms the process group that all use
        next(loop)
    found: dict[str, list[float]] = {one: [] for one in names}
    losses: dict[str, Tensor] = {}
    deadline_s, number = time.perf_counter() + seconds, 0
    while more_time(deadline_s) or number < WARM_UP + 4:
        for one in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            begin_s = time.perf_counter()
            losses[one] = next(loops[one])
            dist.barrier()
            if number >= WARM_UP:
                found[one].append(time.perf_counter() - begin_s)
        number += 1
    low, high = min(losses.values()), max(losses.values())
    # Rank 0 of two shards ends with another micro-batch than rank 0 of the opponents; the last rank never does.
    if dist.get_rank() == WORKERS - 1 and high - low > 0.02 * high:
        print(f"the contestants do not train alike: {losses}", flush=True)
        os._exit(1)
    leave(found, folder)


def more_time(deadline_s: float) -> bool:
    """Collective. Return whether rank 0's clock is before the deadline."""
    more = torch.tensor([float(time.perf_counter() < deadline_s)])
    dist.broadcast(more, 0)
    return bool(more.item())


def peak_mib(name: str, contestant: str, folder: Path) -> NoReturn:
    """In each of the two processes: train one contestant alone, and record its peak of resident memory."""
    loop = Cell(name).loop(contestant, folder)
    for _ in range(MEMORY_STEPS):
        next(loop)
    leave(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, folder)


def leave(answer: object, folder: Path) -> NoReturn:
    """Collective. Write rank 0's answer, and exit before the loops end."""
    if dist.get_rank() == 0:
        (folder / "answer.json").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)


def work(cell: str, folder: Path, seconds: float, contestant: str) -> NoReturn:
    """One of the two processes, which torchrun starts."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if not contestant:
        race(cell, folder, seconds)
    if contestant != "Session":
        dist.init_process_group("gloo")
    peak_mib(cell, contestant, folder)


def ask(cell: str, place: Path, seconds: float, contestant: str = "") -> Any:
    place.mkdir()
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(WORKERS),
    ]
    run(
        [*torchrun, "-m", "bench.own.run", "--work", cell, str(place), str(seconds), contestant],
        place,
        ALLOCATOR,
        600.0,
    )
    return json.loads((place / "answer.json").read_text())


def rows(answers: list[dict[str, Any]]) -> Iterator[str]:
    yield "| cell | opponent | its step, s | Session / it | quartiles | rounds | its memory, MiB | Session's |"
    yield "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |"
    for answer in answers:
        seconds, memory = answer["seconds"], answer["memory_mib"]
        for name in OPPONENTS[answer["cell"].split("-")[1]]:
            ratios = [
                ours / its for ours, its in zip(seconds["Session"], seconds[name], strict=True)
            ]
            low, _, high = quantiles(ratios, n=4)
            its = f"{median(seconds[name]):.3f} | {median(ratios):.3f} | {low:.3f} to {high:.3f} | {len(ratios)}"
            yield f"| {answer['cell']} | {name} | {its} | {memory[name]:.0f} | {memory['Session']:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cells", nargs="*", metavar="CELL", help=f"{', '.join(CELLS)} (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of the rounds of a cell")
    parser.add_argument(
        "--keep", metavar="NAME", help="write the raw numbers to bench/own/DATE-NAME"
    )
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work[0], Path(args.work[1]), float(args.work[2]), args.work[3])
    if unknown := [name for name in args.cells if name not in CELLS]:
        parser.error(f"there is no cell {unknown[0]!r}; there are {', '.join(CELLS)}")
    load_before, answers = os.getloadavg(), []
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        for name in args.cells or CELLS:
            contestants = ("Session", *OPPONENTS[name.split("-")[1]])
            seconds = ask(name, Path(folder) / name, args.seconds)
            memory = {
                one: ask(name, Path(folder) / f"{name}-{one.replace(' ', '-')}", 0, one)
                for one in contestants
            }
            answers.append(
                {
                    "cell": name,
                    "load": round(os.getloadavg()[0], 2),
                    "seconds": seconds,
                    "memory_mib": memory,
                }
            )
            print("\n".join(rows(answers[-1:])), flush=True)
    table = "\n".join(rows(answers))
    print(f"\n{table}")
    if args.keep:
        print(f"\nkept in {keep(args.keep, answers, table, machine('fp32', load_before))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
