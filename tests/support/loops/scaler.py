"""A loss scale that grows every second step."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import MICRO_BATCHES, ORDER, loss_of, make_model, make_points

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


def train(steps: int = 6, out: Path = Path("run")) -> None:
    with ElasticRuntime.join() as runtime:
        model, (inputs, targets) = make_model(), make_points()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        with Checkpointer(
            out / "checkpoints", runtime, model, optimizer, state={"scaler": scaler}, every_steps=2
        ) as checkpointer:
            step = checkpointer.resume()
            with ReplicaGroup(
                runtime, model, checkpointer, micro_batches=MICRO_BATCHES
            ) as replicas:
                while step < steps:
                    for k in replicas.micro_batches(step):
                        rows = ORDER.ids(step, k)
                        loss = loss_of(replicas(inputs[rows]), targets[rows])
                        replicas.backward(loss, scaler=scaler)
                    scaler.step(optimizer)
                    scaler.update()
                    step += 1
                    checkpointer.save_if_due(step)
                checkpointer.save(step)
