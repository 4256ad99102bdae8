"""Several Sessions in a script: a second one in the same folder (`second`), one for each fold
(`folds`), or a folder for each rank, which is refused."""

from __future__ import annotations

import os

import torch
from torch import nn

import lockstep


def train(out: str = "runs/sessions", case: str = "second") -> None:
    if case == "rank":
        out = f"{out}-{os.environ['RANK']}"
    for fold in range(1 if case == "rank" else 2):
        torch.manual_seed(fold)
        model = nn.Linear(2, 1)
        with lockstep.Session(
            f"{out}/{fold}" if case == "folds" else out, micro_batches=2
        ) as session:
            prepared, optimizer = session.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1)
            )
            for step in session.steps(2):
                for _ in session.micro_batches(step):
                    session.backward(prepared(torch.ones(3, 2)).mean())
                optimizer.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=1)
