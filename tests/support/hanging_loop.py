"""A user's loop for test_hang_verdicts.py, with a user collective and injected faults.

A test writes a fault to the file RUN/trouble-SLOT, or RUN/collective-SLOT for the collective; the
worker removes the file first. The collective runs at every tenth step only: a worker whose group
breaks inside it exits, while the other faults test recovery in place.
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
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.record.tracker import Tracker
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup

HANG_S, EVALUATE_S, SAVE_EVERY = 3.0, 9.0, 25
PAUSE_S = 0.02  # a step of this model takes 2 ms


def train(steps: int = 1000, out: Path = Path("run"), pause_s: float = PAUSE_S) -> None:
    torch.manual_seed(0)
    model, points = nn.Sequential(nn.Linear(2, 16), nn.GELU(), nn.Linear(16, 1)), torch.rand(600, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = UniformOrder(len(points), batch_size=24, micro_batches=6)
    limits = ElasticLimits(hang_timeout_s=HANG_S, evaluate_timeout_s=EVALUATE_S)
    with (
        ElasticRuntime.join(limits=limits) as current,
        Checkpointer(
            out / "checkpoints", current, model, optimizer, every_steps=SAVE_EVERY
        ) as checkpointer,
    ):
        step = checkpointer.resume()
        with (
            ReplicaGroup(current, model, checkpointer, micro_batches=6) as replicas,
            Tracker(out, leader=current.is_leader, from_step=step) as tracker,
        ):
            while step < steps:
                for k in replicas.micro_batches(step):
                    has_collective, is_first = step % 10 == 9, k == replicas.replica.own_leaves[0]
                    kind = "collective" if has_collective else "trouble"
                    fault = (
                        take_fault(out / f"{kind}-{current.membership.slot}") if is_first else ""
                    )
                    if has_collective and is_first and fault != "skip":
                        dist.all_reduce(torch.ones(2 if fault == "shape" else 3))
                    if fault.startswith("evaluate"):
                        with current.during("evaluating"):
                            time.sleep(float(fault.removeprefix("evaluate")))
                    elif not has_collective and fault:
                        run_fault(fault, points)
                    rows = points[order.ids(step, k)]
                    replicas.backward(nn.functional.mse_loss(replicas(rows)[:, 0], rows.sum(1)) / 6)
                time.sleep(pause_s)
                optimizer.step()
                step += 1
                tracker.step(step, {"loss": replicas.loss, "norm": 0.0})
                checkpointer.save_if_due(step)


def take_fault(path: Path) -> str:
    """Remove the file at `path` and return the fault in it; "" for none."""
    try:
        text = path.read_text()
        path.unlink()
        return text
    except FileNotFoundError:
        return ""


def run_fault(fault: str, points: torch.Tensor) -> None:
    """Run a fault."""
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
        os.kill(
            batches._workers[0].pid, signal.SIGKILL if fault == "loader killed" else signal.SIGSTOP
        )  # type: ignore[attr-defined]
        for _ in batches:
            pass


def compile_for(seconds: float) -> None:
    """Call torch.compile with a slow backend."""

    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        time.sleep(seconds)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
