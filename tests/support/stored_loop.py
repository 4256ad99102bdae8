"""A loop whose Session names an object store. Run: lockstep run stored_loop.py --steps 6"""

from __future__ import annotations

import time

import torch
from torch import nn

import lockstep


def main(steps: int = 6, pause_s: float = 0.0) -> None:
    torch.manual_seed(0)
    model, points = nn.Linear(2, 1), torch.rand(240, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with lockstep.Session("s3://runs/team/loop", micro_batches=2, save_every=3) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(points, batch_size=24)
        for step in session.steps(steps):
            for rows in loader(step):
                session.backward(nn.functional.mse_loss(model(rows[:, :2])[:, 0], rows[:, 2]))
            optimizer.step()
            time.sleep(pause_s)


if __name__ == "__main__":
    lockstep.launch(main)
