"""Steps of `seconds`, for the patience of a drill."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from tiny import MICRO_BATCHES, ORDER, loss_of, make_model, make_points

from lockstep.elastic.world import World
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


def train(steps: int = 6, seconds: float = 1.0, out: Path = Path("run")) -> None:
    with World.join() as world:
        model, (inputs, targets) = make_model(), make_points()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with Checkpointer(out / "checkpoints", world, model, optimizer, every_steps=2) as keeper:
            step = keeper.resume()
            with ReplicaGroup(world, model, keeper, micro_batches=MICRO_BATCHES) as team:
                while step < steps:
                    for k in team.micro_batches(step):
                        time.sleep(seconds / MICRO_BATCHES)
                        rows = ORDER.ids(step, k)
                        loss = loss_of(team(inputs[rows]), targets[rows])
                        team.backward(loss)
                    optimizer.step()
                    step += 1
                    keeper.save_if_due(step)
                keeper.save(step)
