"""A DataLoader that is iterated inside the loop: the next batch depends on the batches before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny import MICRO_BATCHES, loss_of, make_model, make_points
from torch.utils.data import DataLoader, TensorDataset

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the batches of the loader, epoch after epoch."""
    while True:
        yield from loader


def train(steps: int = 6, out: Path = Path("run")) -> None:
    with ElasticRuntime.join() as runtime:
        model, (inputs, targets) = make_model(), make_points()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = endless(DataLoader(TensorDataset(inputs, targets), batch_size=2, shuffle=True))
        with Checkpointer(
            out / "checkpoints", runtime, model, optimizer, every_steps=2
        ) as checkpointer:
            step = checkpointer.resume()
            with ReplicaGroup(
                runtime, model, checkpointer, micro_batches=MICRO_BATCHES
            ) as replicas:
                while step < steps:
                    for _ in replicas.micro_batches(step):
                        rows, wanted = next(batches)
                        loss = loss_of(replicas(rows), wanted)
                        replicas.backward(loss)
                    optimizer.step()
                    step += 1
                    checkpointer.save_if_due(step)
                checkpointer.save(step)
