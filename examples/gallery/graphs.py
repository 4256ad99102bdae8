"""Graphs of unequal size, batched as in PyTorch Geometric: `plain` and with lockstep.Session (`train`).

The loss is a mean over nodes. Micro-batches have unequal numbers of nodes, so each gives its sum
and its count: `session.backward(loss_sum, count=nodes)`.

Run: python examples/gallery/graphs.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

import lockstep


class Graph(NamedTuple):
    """One graph, or several side by side."""

    nodes: Tensor  # (nodes, 4)
    edges: Tensor  # (2, edges): from, to
    targets: Tensor  # (nodes,)


class Rings(Dataset[Graph]):
    """Rings of 3 to 12 nodes; the target of a node is the sum over its two neighbors."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rings = [torch.randn(3 + i % 10, 4, generator=generator) for i in range(120)]

    def __len__(self) -> int:
        return len(self.rings)

    def __getitem__(self, i: int) -> Graph:
        nodes, numbers = self.rings[i], torch.arange(len(self.rings[i]))
        edges = torch.cat(
            [torch.stack([numbers, numbers.roll(1)]), torch.stack([numbers, numbers.roll(-1)])], 1
        )
        return Graph(nodes, edges, (nodes.roll(1, 0) + nodes.roll(-1, 0)).sum(1))


def merge(graphs: Sequence[Graph]) -> Graph:
    """Put graphs side by side; the edges of each refer to its own nodes."""
    starts = torch.tensor([0, *(len(graph.nodes) for graph in graphs)]).cumsum(0)
    edges = [graph.edges + start for graph, start in zip(graphs, starts, strict=False)]
    return Graph(
        torch.cat([graph.nodes for graph in graphs]),
        torch.cat(edges, 1),
        torch.cat([graph.targets for graph in graphs]),
    )


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.message, self.own, self.head = nn.Linear(4, 32), nn.Linear(4, 32), nn.Linear(32, 1)

    def forward(self, graph: Graph) -> Tensor:
        source, target = graph.edges
        received = torch.zeros(len(graph.nodes), 32, device=graph.nodes.device).index_add(
            0, target, self.message(graph.nodes)[source]
        )
        outputs: Tensor = self.head(torch.relu(received + self.own(graph.nodes)))
        return outputs.flatten()


def plain(steps: int = 60, loader: Iterable[Any] | None = None) -> nn.Module:
    model, step = Network(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = loader or DataLoader(
        Rings(), batch_size=24, shuffle=True, drop_last=True, collate_fn=merge
    )
    while step < steps:
        for graph in loader:
            loss = mse_loss(model(graph), graph.targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return model


def train(
    out: str = "runs/graphs", steps: int = 60, micro_batches: int = 6, save_every: int = 20
) -> None:
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lockstep.Session(out, micro_batches=micro_batches, save_every=save_every) as session:
        model, optimizer = session.prepare(model, optimizer)
        loader = session.loader(Rings(), batch_size=24, collate_fn=merge)
        for step in session.steps(steps):
            for graph in loader(step):
                session.backward(
                    mse_loss(model(graph), graph.targets, reduction="sum"), count=len(graph.nodes)
                )
            optimizer.step()


if __name__ == "__main__":
    lockstep.launch(train, workers=2)
