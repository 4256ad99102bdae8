"""A user's loop with two optimizers, a scheduler and an EMA, for test_train_command.py.

RUN/disturb holds JSON: {"kill": STEP, "stop": STEP}. Worker 1 kills itself at the first step,
worker 0 requests a stop at the second.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep.data.order import UniformOrder
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.record.tracker import Tracker
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


def train(steps: int = 60, out: Path = Path("run")) -> None:
    torch.manual_seed(0)
    model, points = nn.Sequential(nn.Linear(2, 16), nn.GELU(), nn.Linear(16, 1)), torch.rand(600, 2)
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.7, momentum=0.9),
        torch.optim.AdamW(model[2].parameters(), lr=1e-2),
    ]
    scheduler, ema = torch.optim.lr_scheduler.StepLR(optimizers[0], 7, 0.7), AveragedModel(model)
    state, order = (
        {"scheduler": scheduler, "ema": ema},
        UniformOrder(len(points), batch_size=24, micro_batches=6),
    )
    with (
        ElasticRuntime.join() as runtime,
        Checkpointer(
            out / "checkpoints", runtime, model, optimizers, state=state, every_steps=20
        ) as checkpointer,
    ):
        step = checkpointer.resume()
        with (
            ReplicaGroup(runtime, model, checkpointer, micro_batches=6) as replicas,
            Tracker(out, leader=runtime.is_leader, from_step=step) as tracker,
        ):
            while step < steps:
                for k in replicas.micro_batches(step):
                    disturb(out / "disturb", runtime, step)
                    rows = points[order.ids(step, k)]
                    replicas.backward(nn.functional.mse_loss(replicas(rows)[:, 0], rows.sum(1)) / 6)
                for optimizer in optimizers:
                    optimizer.step()
                scheduler.step()
                ema.update_parameters(model)
                step += 1
                tracker.step(
                    step, {"loss": replicas.loss, "rate": optimizers[0].param_groups[0]["lr"]}
                )
                checkpointer.save_if_due(step)


def disturb(path: Path, runtime: ElasticRuntime, step: int) -> None:
    """Carry out what the file requests for this step."""
    orders = json.loads(path.read_text()) if path.exists() else {}
    if (
        step == orders.get("kill")
        and runtime.membership.slot == 1
        and not path.with_name("killed").exists()
    ):
        path.with_name("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if step == orders.get("stop") and runtime.membership.slot == 0:
        path.unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGTERM)
    if orders and runtime.world.size < 3:
        time.sleep(0.1)  # time for the next worker to join
