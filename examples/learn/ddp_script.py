"""A training script with DistributedDataParallel. docs/learn/script.md explains the numbers.

torchrun --standalone --nproc-per-node 2 examples/learn/ddp_script.py
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, MICRO_BATCHES, EPOCHS = 64, 4, 10


def main() -> None:
    torch.manual_seed(0)
    sizes = torch.rand(2048, 2) * 6
    prices = sizes @ torch.tensor([[0.773], [0.321]]) + 0.067
    dataset = TensorDataset(sizes, prices)

    dist.init_process_group()  # 1 join the other processes
    local_rank = int(os.environ["LOCAL_RANK"])  # 2 one device for each process
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(2, 1).to(device)
    model = DistributedDataParallel(model)  # 3 equal weights, equal gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = DistributedSampler(dataset)  # 4 this rank's samples
    size = BATCH // MICRO_BATCHES // dist.get_world_size()  # 5 of a micro-batch
    loader = DataLoader(dataset, size, sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # 6 another order in each epoch
        for number, (x, y) in enumerate(loader, 1):
            is_last = number % MICRO_BATCHES == 0
            with nullcontext() if is_last else model.no_sync():  # 7 send once
                loss = mse_loss(model(x.to(device)), y.to(device))
                (loss / MICRO_BATCHES).backward()  # 8 mean over the step
            if is_last:
                optimizer.step()  # 9 the same update on every rank
                optimizer.zero_grad()  # 10 start without gradients
        if dist.get_rank() == 0:  # 11 one process writes
            os.makedirs("runs", exist_ok=True)
            torch.save(model.module.state_dict(), "runs/ddp_script.pt")

    w1, w2, b = torch.cat([values.flatten() for values in model.parameters()])
    if dist.get_rank() == 0:
        print(f"w1 {w1:.3f}  w2 {w2:.3f}  b {b:.3f}")
    dist.destroy_process_group()  # 12 leave the group


if __name__ == "__main__":
    main()
