"""What a Team and its Keeper refuse when they are constructed, and at a step. One process, real groups and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from lockstep.checkpoint.keeper import Keeper
from lockstep.errors import UsageError
from lockstep.team import Team
from lockstep.world import World


@pytest.fixture
def world() -> Iterator[World]:
    with World.join() as world:
        yield world


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def one_step(team: Team, step: int, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    for k in team.micro_batches(step):
        team.backward(team(torch.full((2, 3), float(step + k))).square().sum() * scale)
    optimizer.step()


# The state of an own loop.


def test_trained_parameters_in_no_optimizer_are_refused_by_name_and_frozen_ones_are_not(world: World, tmp_path: Path) -> None:
    model = layers()
    keeper = Keeper(tmp_path, world, model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"2 trained parameters are in no optimizer that the Keeper knows: 1\.weight, 1\.bias"):
        Team(world, model, keeper, micro_batches=1)
    model[1].requires_grad_(False)
    with Team(world, model, keeper, micro_batches=1):
        pass


def test_a_second_team_or_keeper_is_refused_until_the_first_is_closed(world: World, tmp_path: Path) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Keeper(tmp_path / "first", world, model, optimizer) as keeper, Team(world, model, keeper, micro_batches=1):
        with pytest.raises(UsageError, match="a second Team on one World"):
            Team(world, model, keeper, micro_batches=1)
        with pytest.raises(UsageError, match="a second Keeper on one World"):
            Keeper(tmp_path / "second", world, model, optimizer)
    with Keeper(tmp_path / "second", world, model, optimizer) as keeper, Team(world, model, keeper, micro_batches=1):
        pass


def test_a_keeper_of_another_module_is_refused(world: World, tmp_path: Path) -> None:
    model = layers()
    keeper = Keeper(tmp_path, world, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="the Team trains Sequential, the Keeper saves another Sequential"):
        Team(world, layers(), keeper, micro_batches=1)


class Warmup:
    """A user's own class around a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.inner = [scheduler]

    def state_dict(self) -> Any:
        return self.inner[0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner[0].load_state_dict(state)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 1),
    "ReduceLROnPlateau": schedulers.ReduceLROnPlateau,
    "SequentialLR": lambda o: schedulers.SequentialLR(o, [schedulers.ConstantLR(o), schedulers.ConstantLR(o)], [2]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_the_keeper_does_not_know_is_refused(world: World, tmp_path: Path, name: str) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    with Keeper(tmp_path, world, model, optimizer) as keeper, pytest.raises(UsageError, match="sets the learning rate of SGD"):
        Team(world, model, keeper, micro_batches=1)
    for known in (scheduler, Warmup(scheduler)):
        with Keeper(tmp_path, world, model, optimizer, state={"any": known}) as keeper, Team(world, model, keeper, micro_batches=1):
            pass
