"""lockstep.Session with micro-batches of unequal size, each with its count."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny import MICRO_BATCHES, make_model, make_points
from torch import nn

import lockstep


def train(steps: int = 6, out: Path = Path("run")) -> None:
    model, (inputs, targets) = make_model(), make_points()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with lockstep.Session(out, micro_batches=MICRO_BATCHES, save_every=2) as session:
        model, optimizer = session.prepare(model, optimizer)
        for step in session.steps(steps):
            for k in session.micro_batches(step):
                rows = slice(5 * k, 5 * k + 1 + (step + k) % 5)
                loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows], reduction="sum")
                session.backward(loss, count=len(inputs[rows]))
            optimizer.step()
