"""A user's loop for test_hang_verdicts.py, with its own collective and faults on order.

A test orders a fault with the file RUN/trouble-SLOT, or RUN/collective-SLOT for the loop's own
collective; the worker removes it first. That collective runs at every tenth step only: a worker
whose group breaks inside it exits, while the other faults test recovery in place.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lockstep.data.order import UniformOrder
from lockstep.elastic import world
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.world import World
from lockstep.record.tracker import Tracker
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup

world.FORM_S = 4.0  # a formed group has a longer timeout than one that forms

HANG_S, EVALUATE_S, SAVE_EVERY = 3.0, 9.0, 25
PAUSE_S = 0.02  # a step of this model takes 2 ms


def train(steps: int = 1000, out: Path = Path("run")) -> None:
    torch.manual_seed(0)
    model, points = nn.Sequential(nn.Linear(2, 16), nn.GELU(), nn.Linear(16, 1)), torch.rand(600, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order, limits = (
        UniformOrder(len(points), batch_size=24, micro_batches=6),
        ElasticLimits(hang_timeout_s=HANG_S, evaluate_timeout_s=EVALUATE_S),
    )
    with World.join(limits=limits) as here, Checkpointer(out / "checkpoints", here, model, optimizer, every_steps=SAVE_EVERY) as keeper:
        step = keeper.resume()
        with ReplicaGroup(here, model, keeper, micro_batches=6) as team, Tracker(out, leader=here.is_leader_now, from_step=step) as tracker:
            while step < steps:
                for k in team.micro_batches(step):
                    own, first = step % 10 == 9, k == team.replica.own_leaves[0]
                    fault = take_order(out / f"{'collective' if own else 'trouble'}-{here.slot_or_rank}") if first else ""
                    if own and first and fault != "skip":
                        dist.all_reduce(torch.ones(2 if fault == "shape" else 3))
                    if fault.startswith("evaluate"):
                        with here.during("evaluating"):
                            time.sleep(float(fault.removeprefix("evaluate")))
                    elif not own and fault:
                        run_fault(fault, points)
                    rows = points[order.ids(step, k)]
                    team.backward(nn.functional.mse_loss(team(rows)[:, 0], rows.sum(1)) / 6)
                time.sleep(PAUSE_S)
                optimizer.step()
                step += 1
                tracker.step(step, {"loss": team.loss, "norm": 0.0})
                keeper.save_if_due(step)


def take_order(path: Path) -> str:
    """Remove and return an order; "" for none."""
    try:
        text = path.read_text()
        path.unlink()
        return text
    except FileNotFoundError:
        return ""


def run_fault(fault: str, points: torch.Tensor) -> None:
    """Run an ordered fault."""
    if fault == "sleep":
        time.sleep(3600)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "exit":
        os._exit(0)
    elif fault.startswith("slow"):
        time.sleep(float(fault.removeprefix("slow")))
    elif fault.startswith("compile"):
        compile_for(float(fault.removeprefix("compile")))
    elif fault in ("loader killed", "loader stopped"):
        batches = iter(DataLoader(points, batch_size=1, num_workers=1, prefetch_factor=1))  # type: ignore[arg-type]
        next(batches)
        os.kill(batches._workers[0].pid, signal.SIGKILL if fault == "loader killed" else signal.SIGSTOP)  # type: ignore[attr-defined]
        for _ in batches:
            pass


def compile_for(seconds: float) -> None:
    """Call torch.compile with a slow backend."""

    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        time.sleep(seconds)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
