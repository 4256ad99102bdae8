"""A user's own loop for test_hang_verdicts.py: with a collective of its own, and troubles on order.

The order for a worker is the file RUN/trouble-SLOT, or RUN/collective-SLOT for its part in the loop's own collective; it is taken away
before it is obeyed. The collective comes at every tenth step only: whoever is cut off in it ends, as no such collective is healed, and the
other troubles are about those who are healed in place.
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
from lockstep.elastic.protocol import Limits
from lockstep.elastic.world import World
from lockstep.record.tracker import Tracker
from lockstep.training.checkpointer import Keeper
from lockstep.training.replica_group import Team

world.FORM_S = 4.0  # a group that has formed may wait for longer than it had to form

HANG_S, EVALUATE_S, SAVE_EVERY = 3.0, 9.0, 25
PAUSE_S = 0.02  # a step of this model takes 2 ms


def train(steps: int = 1000, out: Path = Path("run")) -> None:
    torch.manual_seed(0)
    model, points = nn.Sequential(nn.Linear(2, 16), nn.GELU(), nn.Linear(16, 1)), torch.rand(600, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order, limits = UniformOrder(len(points), batch=24, micro_batches=6), Limits(hang_s=HANG_S, evaluate_s=EVALUATE_S)
    with World.join(limits=limits) as here, Keeper(out / "checkpoints", here, model, optimizer, every_steps=SAVE_EVERY) as keeper:
        step = keeper.resume()
        with Team(here, model, keeper, micro_batches=6) as team, Tracker(out, leader=here.leads, from_step=step) as tracker:
            while step < steps:
                for k in team.micro_batches(step):
                    own, first = step % 10 == 9, k == team.replica.mine[0]
                    trouble = take(out / f"{'collective' if own else 'trouble'}-{here.number}") if first else ""
                    if own and first and trouble != "skip":
                        dist.all_reduce(torch.ones(2 if trouble == "shape" else 3))
                    if trouble.startswith("evaluate"):
                        with here.during("evaluating"):
                            time.sleep(float(trouble.removeprefix("evaluate")))
                    elif not own and trouble:
                        suffer(trouble, points)
                    rows = points[order.ids(step, k)]
                    team.backward(nn.functional.mse_loss(team(rows)[:, 0], rows.sum(1)) / 6)
                time.sleep(PAUSE_S)
                optimizer.step()
                step += 1
                tracker.step(step, {"loss": team.loss, "norm": 0.0})
                keeper.save_if_due(step)


def take(path: Path) -> str:
    """The order, which is there no more."""
    try:
        text = path.read_text()
        path.unlink()
        return text
    except FileNotFoundError:
        return ""


def suffer(trouble: str, points: torch.Tensor) -> None:
    """What was ordered, where it is nothing that the loop itself does."""
    if trouble == "sleep":
        time.sleep(3600)
    elif trouble == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif trouble == "exit":
        os._exit(0)
    elif trouble.startswith("slow"):
        time.sleep(float(trouble.removeprefix("slow")))
    elif trouble.startswith("compile"):
        compile_for(float(trouble.removeprefix("compile")))
    elif trouble in ("loader killed", "loader stopped"):
        batches = iter(DataLoader(points, batch_size=1, num_workers=1, prefetch_factor=1))  # type: ignore[arg-type]
        next(batches)
        os.kill(batches._workers[0].pid, signal.SIGKILL if trouble == "loader killed" else signal.SIGSTOP)  # type: ignore[attr-defined]
        for _ in batches:
            pass


def compile_for(seconds: float) -> None:
    """Use torch.compile, with a compiler that takes so long."""

    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        time.sleep(seconds)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
