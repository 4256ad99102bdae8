"""A user's own loop for test_mixed_hosts.py: a linear model, four micro-batches a step.

lockstep launch small_loop.py:train --steps 40     or, with a launch environment:     python small_loop.py
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from lockstep.data.order import UniformOrder
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.world import World
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
    with World.join(limits=limits) as world, Checkpointer(out / "checkpoints", world, model, optimizer, every_steps=10) as keeper:
        step = keeper.resume()
        with (
            ReplicaGroup(world, model, keeper, micro_batches=4) as team,
            Tracker(out, leader=world.is_leader_now, from_step=step) as tracker,
        ):
            while step < steps:
                for k in team.micro_batches(step):
                    rows = points[order.ids(step, k)]
                    team.backward(SCALE * nn.functional.mse_loss(team(rows)[:, 0], rows.sum(1)) / 4)
                time.sleep(PAUSE_S)
                optimizer.step()
                step += 1
                tracker.step(step, {"loss": team.loss, "norm": 0.0})
                keeper.save_if_due(step)


if __name__ == "__main__":
    train()
