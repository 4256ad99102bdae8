"""An exponential moving average of the weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import MICRO_BATCHES, ORDER, loss_of, make_model, make_points
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.elastic.runtime import ElasticRuntime
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


def train(steps: int = 6, out: Path = Path("run")) -> None:
    with ElasticRuntime.join() as runtime:
        model, (inputs, targets) = make_model(), make_points()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        with Checkpointer(
            out / "checkpoints", runtime, model, optimizer, state={"ema": ema}, every_steps=2
        ) as checkpointer:
            step = checkpointer.resume()
            with ReplicaGroup(
                runtime, model, checkpointer, micro_batches=MICRO_BATCHES
            ) as replicas:
                while step < steps:
                    for k in replicas.micro_batches(step):
                        rows = ORDER.ids(step, k)
                        loss = loss_of(replicas(inputs[rows]), targets[rows])
                        replicas.backward(loss)
                    optimizer.step()
                    ema.update_parameters(model)
                    step += 1
                    checkpointer.save_if_due(step)
                checkpointer.save(step)
