"""A DataLoader that is iterated inside of the loop: what comes next depends on what this worker took before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny import MICRO_BATCHES, loss_of, make_model, make_points
from torch.utils.data import DataLoader, TensorDataset

from lockstep.elastic.world import World
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of the loader, epoch after epoch."""
    while True:
        yield from loader


def train(steps: int = 6, out: Path = Path("run")) -> None:
    with World.join() as world:
        model, (inputs, targets) = make_model(), make_points()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = endless(DataLoader(TensorDataset(inputs, targets), batch_size=2, shuffle=True))
        with Checkpointer(out / "checkpoints", world, model, optimizer, every_steps=2) as keeper:
            step = keeper.resume()
            with ReplicaGroup(world, model, keeper, micro_batches=MICRO_BATCHES) as team:
                while step < steps:
                    for _ in team.micro_batches(step):
                        rows, wanted = next(batches)
                        loss = loss_of(team(rows), wanted)
                        team.backward(loss)
                    optimizer.step()
                    step += 1
                    keeper.save_if_due(step)
                keeper.save(step)
