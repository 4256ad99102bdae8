"""Plain DistributedDataParallel: torchrun --nproc-per-node 2 ddp.py"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from houses import Houses, make_model
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main(out: str = "runs/ddp", steps: int = 192) -> None:
    dataset, model = Houses(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dist.init_process_group()
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    model = DistributedDataParallel(model.to(device))
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler)
    step, checkpoint = 0, Path(out) / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < steps:
        sampler.set_epoch(step // len(loader))
        for x, y in loader:
            loss = mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.5f}")
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
