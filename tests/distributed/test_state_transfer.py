"""State transfer to a joiner from several sources, one of which differs. Real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.checkpoint.state_dict import digest
from lockstep.elastic.consensus import find_divergent_ranks
from lockstep.elastic.world import World
from lockstep.errors import PeersLostError
from lockstep.parallel.replica import digest_of
from lockstep.runtime.process_group import gather_json
from lockstep.testing.ranks import run_ranks
from lockstep.training.state_transfer import StateMismatchError, transfer_state

STEPS = [7, 7, 6, 7, -1]  # rank 2 has not heard that step 7 is committed; rank 4 joins


def state(rank: int, other: str) -> dict[str, torch.Tensor]:
    """Return the state of a rank. `other` names what differs on rank 1: a weight, a buffer, a length, or nothing."""
    tensors = {f"model.{name}": torch.full((3,), float(STEPS[rank])) for name in ("a", "seen", "b", "c", "d", "e")}
    for name, tensor in tensors.items():
        if rank == 1 and (name == "model.seen" if other == "buffer" else other == "weight"):
            tensor += 1
    if rank == 1 and other == "length":  # a text, such as a scheduler's state
        tensors["model.a"] = torch.full((4,), float(STEPS[rank]))
    return tensors


def tries(world: World, other: str) -> list[Any]:
    """Return the outcome of each transfer attempt until one succeeds, three at most."""
    world.standing, found = {"at": "step", "step": STEPS[world.rank]}, list[Any]()
    mine = state(world.rank, other)
    weights = [tensor for name, tensor in mine.items() if name != "model.seen"]
    while len(found) < 3:
        world.standings = gather_json(world.size, world.standing)
        try:
            if world.rank == 4:
                taken = transfer_state(world)
                assert taken is not None
                found.append(digest(taken))
            else:
                assert transfer_state(world, lambda: mine, 1, lambda: digest_of(weights)) is None
                found.append(digest(mine))
            break
        except StateMismatchError as error:
            found.append(("differ", find_divergent_ranks(error.digests, 1), [one is None for one in error.digests]))
        except PeersLostError as error:
            found.append(error.what)
    return found


@pytest.mark.parametrize("other", ["nothing", "weight", "buffer", "length"])
def test_joiner_receives_the_state_of_one_worker_or_divergent_ranks_are_named(other: str) -> None:
    found = run_ranks(tries, 5, other)
    right = digest(state(0, "nothing"))
    if other == "nothing":
        assert found[4] == [right]
    elif other in ("weight", "length"):
        assert found == [[("differ", (1,), [False, False, True, False, True])] * 3] * 5
    else:  # then the next try has one source
        assert found[4] == found[0] == ["rank 4 received something other than the state of one worker", right]
