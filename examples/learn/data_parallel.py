"""Data parallel by hand: each process has one house; the processes add their gradients.

    torchrun --standalone --nproc-per-node 2 examples/learn/data_parallel.py

The model and the houses are those of docs/accumulation.md.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

INPUTS = torch.tensor(
    [[6.0, 2.0, 1.0], [5.0, 2.0, 1.0]], dtype=torch.float64
)  # x1, x2, and 1 for b
PRICES = torch.tensor([15.0, 12.0], dtype=torch.float64)
START = torch.tensor([0.773, 0.321, 0.067], dtype=torch.float64)  # w1, w2, b
LEARNING_RATE = 0.001


def show(what: str, values: torch.Tensor) -> None:
    """Collective: print the values of all ranks, from rank 0."""
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, values.tolist())
    if dist.get_rank() == 0:
        for rank, row in enumerate(gathered):
            print(f"{what:18} rank {rank}:", *(f"{value:11.6f}" for value in row))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    weights = START.clone() if rank == 0 else torch.zeros(3, dtype=torch.float64)
    dist.broadcast(weights, src=0)  # 1. all ranks start with the weights of rank 0
    weights.requires_grad_()

    loss = (INPUTS[rank] @ weights - PRICES[rank]) ** 2
    loss.backward()  # 2. each rank has another house, so another gradient
    assert weights.grad is not None
    show("own gradient", weights.grad)

    dist.all_reduce(weights.grad)  # 3. now every rank has the sum of both gradients
    show("after all-reduce", weights.grad)

    with torch.no_grad():
        weights -= (
            LEARNING_RATE * weights.grad
        )  # 4. the same update on every rank: the weights stay equal
    show("weights", weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
