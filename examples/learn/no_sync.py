"""Four micro-batches per process in DistributedDataParallel, with and without no_sync: what is sent.

    torchrun --standalone --nproc-per-node 2 examples/learn/no_sync.py

A communication hook counts the all-reduces and their bytes.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4


@dataclass
class Traffic:
    calls: int = 0
    size: int = 0  # bytes


def counting_hook(traffic: Traffic, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    traffic.calls += 1
    traffic.size += bucket.buffer().nbytes
    return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def train_step(accumulate: bool) -> tuple[Traffic, torch.Tensor]:
    """Return what this process sent in one step, and its gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)).double()
    replica, traffic = DistributedDataParallel(model), Traffic()
    replica.register_comm_hook(traffic, counting_hook)
    samples = torch.randn(MICRO_BATCHES, dist.get_world_size(), 8, 64, dtype=torch.float64)[
        :, dist.get_rank()
    ]
    for number, batch in enumerate(samples):
        is_last = number == MICRO_BATCHES - 1
        with replica.no_sync() if accumulate and not is_last else nullcontext():
            (replica(batch).square().mean() / MICRO_BATCHES).backward()
    return traffic, torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def main() -> None:
    dist.init_process_group("gloo")
    (often, first), (once, second) = train_step(accumulate=False), train_step(accumulate=True)
    if dist.get_rank() == 0:
        print(f"without no_sync: {often.calls} all-reduces, {often.size:,} bytes")
        print(f"with no_sync:    {once.calls} all-reduce,  {once.size:,} bytes")
        print(
            f"equal gradients: {torch.allclose(first, second, rtol=1e-12)}, the same bits: {torch.equal(first, second)}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
