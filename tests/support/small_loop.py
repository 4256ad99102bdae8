"""A user's loop for test_mixed_hosts.py: a linear model, four micro-batches a step.

Run: lockstep launch small_loop.py:train --steps 40
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from lockstep.data.order import UniformOrder
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.record.tracker import Tracker
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup

SCALE = 1.0
PAUSE_S = 0.02


def train(steps: int = 4, out: Path = Path("run")) -> None:
    torch.manual_seed(0)
    model, points = nn.Linear(2, 1), torch.rand(600, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    order = UniformOrder(len(points), batch_size=24, micro_batches=4)
    limits = ElasticLimits(rendezvous_timeout_s=0.1)
    with (
        ElasticRuntime.join(limits=limits) as runtime,
        Checkpointer(
            out / "checkpoints", runtime, model, optimizer, every_steps=10
        ) as checkpointer,
    ):
        step = checkpointer.resume()
        with (
            ReplicaGroup(runtime, model, checkpointer, micro_batches=4) as replicas,
            Tracker(out, leader=runtime.is_leader, from_step=step) as tracker,
        ):
            while step < steps:
                for k in replicas.micro_batches(step):
                    rows = points[order.ids(step, k)]
                    replicas.backward(
                        SCALE * nn.functional.mse_loss(replicas(rows)[:, 0], rows.sum(1)) / 4
                    )
                time.sleep(PAUSE_S)
                optimizer.step()
                step += 1
                tracker.step(step, {"loss": replicas.loss, "norm": 0.0})
                checkpointer.save_if_due(step)


if __name__ == "__main__":
    train()
