"""An ordinary torchrun script, for test_plain_script.py. It does not import Lockstep.

It saves every 5 steps. With --fail kill or error, rank 1 fails once in step 12.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--fail", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size, saved = dist.get_rank(), dist.get_world_size(), Path("saved.pt")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        step = state["step"]
    by_tests = {"LOCKSTEP_TMP", "LOCKSTEP_CACHE"}
    ours = [name for name in os.environ if name.startswith("LOCKSTEP_") and name not in by_tests]
    count, local = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["LOCAL_RANK"]
    report(f"rank {rank} of {size} local {local} restart {count} step {step} ours {ours}")
    while step < args.steps:
        rows = torch.rand(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(0 if Path("hurry").exists() else args.pause)
        if rank == 0 and step % 5 == 0:
            torch.save({"model": model.module.state_dict(), "step": step}, "saved.tmp")
            os.replace("saved.tmp", saved)
        if rank == 1 and step == 12 and args.fail and not Path("failed").exists():
            Path("failed").touch()
            if args.fail == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad record")
    report(f"rank {rank} finished with {model.module.weight.sum().item():.9f}")
    dist.destroy_process_group()


def report(line: str) -> None:
    """Append a line to the file "report"."""
    with open("report", "a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
