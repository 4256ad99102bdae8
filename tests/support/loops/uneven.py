"""A loop in which the second replica takes three times as long for a micro-batch, from step SLOW on.

With `kill` the worker in slot 1 kills itself once, in that step.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from session import Points
from torch import nn

import lockstep

SLOW = 6


def train(
    out: str = "runs/uneven",
    steps: int = 30,
    num_workers: int = 0,
    pause_s: float = 0.02,
    kill: int = -1,
) -> None:
    model = nn.Sequential(
        nn.Linear(2, 64),
        nn.BatchNorm1d(64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, 1),
        nn.Flatten(0),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with lockstep.Session(out, micro_batches=8, save_every=10) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(Points(), batch_size=40, num_workers=num_workers)
        for step in session.steps(steps):
            for inputs, targets in loader(step):
                is_second = (
                    session.runtime.membership.slot >= session.replicas.replica.workers_per_replica
                )
                time.sleep(pause_s * (3 if is_second and step >= SLOW else 1))
                session.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            session.log(step, first_share=(session.replicas.runner.balance.shares or (0,))[0])
            once = Path(out) / "killed"
            if step == kill and session.runtime.membership.slot == 1 and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
