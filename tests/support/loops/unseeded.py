"""Data and noise from unseeded generators."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from tiny import MICRO_BATCHES, ORDER, loss_of, make_model

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


def train(steps: int = 6, out: Path = Path("run")) -> None:
    with ElasticRuntime.join() as runtime:
        model, inputs = make_model(), torch.from_numpy(np.random.rand(48, 4)).float()
        targets = inputs.sum(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with Checkpointer(
            out / "checkpoints", runtime, model, optimizer, every_steps=2
        ) as checkpointer:
            step = checkpointer.resume()
            with ReplicaGroup(
                runtime, model, checkpointer, micro_batches=MICRO_BATCHES
            ) as replicas:
                while step < steps:
                    for k in replicas.micro_batches(step):
                        rows = ORDER.ids(step, k)
                        noisy = (
                            inputs[rows] + 0.1 * random.random() + 0.1 * torch.randn(len(rows), 4)
                        )
                        loss = loss_of(replicas(noisy), targets[rows])
                        replicas.backward(loss)
                    optimizer.step()
                    step += 1
                    checkpointer.save_if_due(step)
                checkpointer.save(step)
