"""A model with a graph break: its forward pass branches on the value of a tensor.

    lockstep run --profile steps=20..21 examples/learn/graph_break.py                 names the line
    lockstep run --profile steps=20..21 examples/learn/graph_break.py --whole true    has no break

Both compute the same function.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import lockstep

LIMIT = 8.0


# --8<-- [start:block]
class Block(nn.Module):
    def __init__(self, width: int, whole: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.linear(x))
        norm = y.norm(dim=1).mean()
        if self.whole:
            y = y * torch.clamp(LIMIT / norm, max=1.0)  # the same value, without a branch
        elif norm > LIMIT:
            y = y * (LIMIT / norm)
        return x + y


# --8<-- [end:block]


class Net(nn.Module):
    def __init__(self, width: int, depth: int, whole: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, whole) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        prediction: Tensor = self.head(x)
        return prediction


def main(
    out: str = "runs/graph_break", steps: int = 30, whole: bool = False, compile: bool = True
) -> None:
    torch.manual_seed(0)
    width = 64
    x = torch.randn(4096, width)
    dataset = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
    model = Net(width, 4, whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with lockstep.Session(out, micro_batches=2) as session:
        model, optimizer = session.prepare(model, optimizer, compile=compile)
        loader = session.loader(dataset, batch_size=64)
        for step in session.steps(steps):
            for inputs, targets in loader(step):
                session.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            session.log(step, loss=session.loss)


if __name__ == "__main__":
    lockstep.launch(main, workers=1)
