"""A plain DDP script for torchrun --max-restarts: a checkpoint every ten steps, and a restart resumes from the newest.

torchrun --standalone --nproc-per-node 3 --max-restarts 10 with_torchrun.py RUN.json DATA ANSWER
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.failover.loop import Trained
from bench.step.task import read_task

EVERY = 10


def main() -> None:
    """Train until killed."""
    dist.init_process_group("gloo")
    task = read_task()
    trained = Trained(task)
    path, group, step = (
        task.answer / "checkpoint.pt",
        int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        0,
    )
    if path.exists():
        saved = torch.load(path)
        trained.model.load_state_dict(saved["model"])
        trained.optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = DistributedDataParallel(trained.model)
    while True:
        trained.backward(ddp, step)
        trained.clip()
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        step += 1
        trained.note(step, group)
        if step % EVERY == 0 and task.rank == 0:
            state = {
                "model": trained.model.state_dict(),
                "optimizer": trained.optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)


if __name__ == "__main__":
    main()
