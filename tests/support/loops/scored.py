"""A classifier that is scored by F1, keeps its best weights, and stops early."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import lockstep


class Spots(Dataset[tuple[Tensor, Tensor]]):
    """Points in two classes that overlap."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(i)
        point = torch.randn(4, generator=generator)
        noise = torch.randn((), generator=generator)
        return point, (point.sum() + 2 * noise > 0).long()


def f1_score(labels: Tensor, predicted: Tensor) -> float:
    hits = int((labels & predicted).sum())
    return 2 * hits / max(1, int(labels.sum() + predicted.sum()))


def train(out: str = "runs/scored", steps: int = 60, patience: int = 3) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    best = lockstep.Best(mode="max")
    stopping = lockstep.EarlyStopping(patience=patience, mode="max")
    with lockstep.Session(out, micro_batches=6, save_every=5, keep=1) as session:
        model, optimizer = session.prepare(model, optimizer)
        session.state(best=best, stopping=stopping)
        loader = session.loader(Spots(), batch_size=12)
        for step in session.steps(steps):
            for points, labels in loader(step):
                session.backward(cross_entropy(model(points), labels))
            optimizer.step()
            if (step + 1) % 2:
                continue
            labels, predicted = session.gather(
                lambda batch: (batch[1], model(batch[0]).argmax(1)), Spots(), batch_size=7
            )
            f1 = f1_score(labels, predicted)
            best.update(step, f1)
            stopping.update(f1)
            session.log(step, f1=f1)


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
