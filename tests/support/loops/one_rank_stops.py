"""A loop of which rank 0 alone asks for the end, after the micro-batches of step 2."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import lockstep


def train(out: Path, steps: int = 9) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    with lockstep.Session(out, micro_batches=2) as session:
        prepared, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in session.steps(steps):
            for k in session.micro_batches(step):
                session.backward(prepared(torch.full((3, 2), float(k))).square().mean())
            optimizer.step()
            if step == 2 and session.world.rank == 0:
                session.stop()
