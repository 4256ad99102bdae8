"""Data and noise on it from generators that nobody has seeded."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from tiny import MICRO_BATCHES, ORDER, loss_of, make_model

from lockstep.elastic.world import World
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


def train(steps: int = 6, out: Path = Path("run")) -> None:
    with World.join() as world:
        model, inputs = make_model(), torch.from_numpy(np.random.rand(48, 4)).float()
        targets = inputs.sum(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with Checkpointer(out / "checkpoints", world, model, optimizer, every_steps=2) as keeper:
            step = keeper.resume()
            with ReplicaGroup(world, model, keeper, micro_batches=MICRO_BATCHES) as team:
                while step < steps:
                    for k in team.micro_batches(step):
                        rows = ORDER.ids(step, k)
                        noisy = inputs[rows] + 0.1 * random.random() + 0.1 * torch.randn(len(rows), 4)
                        loss = loss_of(team(noisy), targets[rows])
                        team.backward(loss)
                    optimizer.step()
                    step += 1
                    keeper.save_if_due(step)
                keeper.save(step)
