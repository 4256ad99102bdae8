"""A user's own loop with one habit that differs between workers, for test_own_loop_habits.py."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lockstep.checkpoint.keeper import Keeper
from lockstep.team import Team
from lockstep.world import World


def train(habit: str, steps: int = 6, out: Path = Path("run")) -> None:
    data = torch.rand(64, 3)  # unseeded
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with World.join() as world, Keeper(out / "checkpoints", world, model, optimizer) as keeper:
        step = keeper.resume()
        own = torch.Generator().manual_seed(world.rank)
        with Team(world, model, keeper, micro_batches=4) as team:
            while step < steps:
                for k in team.micro_batches(step):
                    first = 16 * k + step % 10
                    loss = team(data[first : first + 4]).square().mean()
                    if habit == "rank 1 calls loss.backward" and world.rank == 1 and step == 2:
                        loss.backward()
                    else:
                        team.backward(loss)
                alone = habit == "noise on the last rank" and world.rank == 3
                if habit == "noise from a generator of each rank" or alone:
                    with torch.no_grad():
                        model[1].weight += 0.01 * torch.randn(1, 4, generator=own)
                optimizer.step()
                step += 1
        keeper.save(step)
