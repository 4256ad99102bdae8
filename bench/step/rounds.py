"""Train a step of a Session and of one opponent in turn, in the same two processes.

    torchrun --nproc-per-node 2 rounds.py CELL.json FOLDER

CELL.json: opponent, width, precision, micro_batches (per process), seconds. A round is one step of
both, in an order that alternates, with a barrier before and after each step; a ratio is taken within
a round. Both have the same model, values, micro-batches, clipping and fused AdamW; their last losses
must agree within 2%. FOLDER/rounds.json: the seconds of both in each round, the losses, and the bytes
that each process has sent in a step, by the kernel's count.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import Session
from lockstep.config.schema import ModelOptions
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.models.translator import build_translator
from lockstep.training.replica_group import ReplicaGroup

CPU, VOCABULARY, ROWS, LENGTH, CLIP = torch.device("cpu"), 8000, 8, 16, 1.0
BUCKET_BYTES = 25_000_000
WARM_UP = 2  # rounds; DDP changes its buckets after the first step
Step = Callable[[int], Tensor]  # trains a step; returns the loss of its last micro-batch
Batch = tuple[Tensor, Tensor, Tensor]


class Cell:
    """A model and its micro-batches, as every contestant of the cell trains them."""

    def __init__(
        self, width: int, precision: str, micro_batches: int, seconds: float, layers: int = 3
    ) -> None:
        self.each, self.seconds, self.bf16 = micro_batches, seconds, precision == "bf16"
        self.options = ModelOptions(
            dim=width,
            n_heads=width // 32,
            encoder_layers=layers,
            decoder_layers=layers,
            ffn_dim=4 * width,
            dropout=0.0,
            attention="plain",
        )
        self.leaves = self.each * dist.get_world_size()
        self.own = range(dist.get_rank() * self.each, (dist.get_rank() + 1) * self.each)
        self.batches = [self._batch(k) for k in range(self.leaves)]

    def _batch(self, k: int) -> Batch:
        tokens = torch.randint(
            4, VOCABULARY, (2, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(k)
        )
        return tokens[0, :, 1:], tokens[1, :, :-1].contiguous(), tokens[1, :, 1:].contiguous()

    def model(self) -> nn.Module:
        return build_translator(self.options, vocab_size=VOCABULARY, device=CPU, seed=1).train()

    def loss(self, model: Callable[..., Tensor], k: int) -> Tensor:
        """Return the mean loss of a token of micro-batch `k`."""
        source, target, labels = self.batches[k]
        return model(source, target, labels, smoothing=0.1) / (ROWS * LENGTH)

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bf16)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()


def bare_ddp(cell: Cell) -> Step:
    ddp = DistributedDataParallel(
        cell.model(), bucket_cap_mb=BUCKET_BYTES / 2**20, gradient_as_bucket_view=True
    )
    optimizer = optimizer_of(ddp)

    def step(number: int) -> Tensor:
        for k in cell.own:
            with nullcontext() if k == cell.own[-1] else ddp.no_sync():
                with cell.autocast():
                    loss = cell.loss(ddp, k)
                (loss / cell.each).backward()
        update(ddp, optimizer)
        return loss.detach()

    return step


def bare_fsdp2(cell: Cell, per_layer: bool) -> Step:
    """FSDP2 with one unit per layer, or one of the whole model; one gather and reduction per step."""
    from torch.distributed.fsdp import fully_shard

    model: Any = cell.model()
    for layer in [*model.encoder, *model.decoder] if per_layer else []:
        fully_shard(layer, reshard_after_forward=cell.each == 1)
    fully_shard(model)
    optimizer = optimizer_of(model)

    def step(number: int) -> Tensor:
        for k in cell.own:
            model.set_requires_gradient_sync(k == cell.own[-1])
            model.set_reshard_after_backward(k == cell.own[-1])
            with cell.autocast():
                loss = cell.loss(model, k)
            (loss / cell.each).backward()
        update(model, optimizer)
        return loss.detach()

    return step


def with_accelerate(cell: Cell) -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if cell.bf16 else "no",
        gradient_accumulation_steps=cell.each,
    )
    plain = cell.model()
    model, optimizer = accelerator.prepare(plain, optimizer_of(plain))

    def step(number: int) -> Tensor:
        for k in cell.own:
            with accelerator.accumulate(model):
                loss = cell.loss(model, k)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        return loss.detach()

    return step


def with_fabric(cell: Cell) -> Step:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo")
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        precision="bf16-mixed" if cell.bf16 else "32-true",
    )
    fabric.launch()
    plain = cell.model()
    model, optimizer = fabric.setup(plain, optimizer_of(plain))

    def step(number: int) -> Tensor:
        for k in cell.own:
            with fabric.no_backward_sync(model, enabled=k != cell.own[-1]):
                loss = cell.loss(model, k)
                fabric.backward(loss / cell.each)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def in_replica_group(cell: Cell) -> Step:
    """The replica group, with its vote and the comparison of all weights in every step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    runtime = ElasticRuntime(World(rank, size, rank, size, "bench", CPU))
    model = cell.model()
    replicas = ReplicaGroup(runtime, model, micro_batches=cell.leaves, bucket_bytes=BUCKET_BYTES)
    optimizer = optimizer_of(model)

    def step(number: int) -> Tensor:
        for k in replicas.micro_batches(number):
            with cell.autocast():
                loss = cell.loss(replicas, k)
            replicas.backward(loss / cell.leaves)
        update(model, optimizer)
        return loss.detach()

    return step


def in_session(cell: Cell, session: Session) -> Step:
    """A user's loop on a Session, which also checks, measures, writes and shows each step."""
    plain = cell.model()
    model, optimizer = session.prepare(plain, optimizer_of(plain))

    def loop() -> Iterator[Tensor]:
        for step in session.steps(1_000_000):
            for k in session.micro_batches(step):
                with cell.autocast():
                    loss = cell.loss(model, k)
                session.backward(loss)
            update(model, optimizer)
            yield loss.detach()

    steps = loop()
    return lambda number: next(steps)


OPPONENTS: dict[str, Callable[[Cell], Step]] = {
    "bare DDP": bare_ddp,
    "FSDP2, one unit": partial(bare_fsdp2, per_layer=False),
    "FSDP2, per layer": partial(bare_fsdp2, per_layer=True),
    "Accelerate": with_accelerate,
    "Fabric": with_fabric,
    "ReplicaGroup": in_replica_group,
}


def run(cell: Cell, opponent: str, session: Session) -> dict[str, object]:
    """Return the seconds of both in each round, and the bytes that a step of each sends."""
    steps = {"Session": in_session(cell, session), opponent: OPPONENTS[opponent](cell)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    sent: dict[str, list[int]] = {name: [] for name in steps}
    deadline, number = time.perf_counter() + cell.seconds, 0
    while more_time(deadline) or number < WARM_UP + 4:
        names = list(steps)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            before = bytes_on_loopback()
            begin = time.perf_counter()
            loss = steps[name](number)
            dist.barrier()
            losses[name] = float(loss)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - begin)
                sent[name].append((bytes_on_loopback() - before) // dist.get_world_size())
        number += 1
    low, high = min(losses.values()), max(losses.values())
    assert high - low < 0.02 * high, f"the contestants do not train alike: {losses}"
    size = dist.get_world_size()
    gradient_bytes = sum(p.numel() * p.element_size() for p in cell.model().parameters())
    return {
        "seconds": seconds,
        "losses": losses,
        "bytes": {name: median(values) for name, values in sent.items()},
        "formula_bytes": 2 * (size - 1) / size * gradient_bytes,
    }


def bytes_on_loopback() -> int:
    """Return the bytes that the kernel has sent over the loopback device, headers included, from
    all processes of this network namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == "lo":
            return int(counters.split()[8])
    raise OSError("there is no loopback device in /proc/net/dev")


def more_time(deadline: float) -> bool:
    """Collective. Return whether rank 0's clock is before the deadline: all ranks train equally many."""
    more = torch.tensor([float(time.perf_counter() < deadline)])
    dist.broadcast(more, 0)
    return bool(more.item())


def main(cell_file: str, folder: str) -> None:
    values = json.loads(Path(cell_file).read_text())
    opponent = values.pop("opponent")
    leaves = values["micro_batches"] * int(os.environ["WORLD_SIZE"])
    with Session(Path(folder) / "session", micro_batches=leaves, save_every=0) as session:
        found = run(Cell(**values), opponent, session)  # in the process group of the Session
        if session.world.leader:
            (Path(folder) / "rounds.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    main(*sys.argv[1:])
