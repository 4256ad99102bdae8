"""A user's own loop with one habit that differs between workers, for test_own_loop_habits.py."""

from __future__ import annotations

import resource
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from lockstep.elastic.world import World
from lockstep.training.checkpointer import Checkpointer
from lockstep.training.replica_group import ReplicaGroup


def refuse_threads() -> None:
    """Limit the addresses of this process to those that it has and 4 MiB more: the stack of a thread takes 8."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 4 * 2**20,) * 2)
    with suppress(RuntimeError):
        while True:  # stacks of threads that have ended are used again
            threading.Thread(target=threading.Event().wait, daemon=True).start()


def train(habit: str, steps: int = 6, out: Path = Path("run")) -> None:
    data = torch.rand(64, 3)  # unseeded
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with World.join() as world, Checkpointer(out / "checkpoints", world, model, optimizer) as keeper:
        step = keeper.resume()
        own = torch.Generator().manual_seed(world.rank)
        with ReplicaGroup(world, model, keeper, micro_batches=4) as team:
            while step < steps:
                for k in team.micro_batches(step):
                    first = 16 * k + step % 10
                    loss = team(data[first : first + 4]).square().mean()
                    if habit == "rank 1 calls loss.backward" and world.rank == 1 and step == 2:
                        loss.backward()
                    else:
                        team.backward(loss)
                if habit == "no memory is left for a thread" and step == 2:
                    if world.leader:
                        raise ValueError("an error of rank 0")
                    refuse_threads()
                    time.sleep(1.0)  # until this worker knows that rank 0 is gone
                alone = habit == "noise on the last rank" and world.rank == 3
                if habit == "noise from a generator of each rank" or alone:
                    with torch.no_grad():
                        model[1].weight += 0.01 * torch.randn(1, 4, generator=own)
                optimizer.step()
                step += 1
        keeper.save(step)
