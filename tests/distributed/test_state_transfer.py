"""The state for a joiner, from several that have it, one of which has it otherwise. Real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.checkpoint.state_dict import digest
from lockstep.elastic.consensus import differing
from lockstep.elastic.world import World
from lockstep.errors import PeersLostError
from lockstep.parallel.replica import digest_of
from lockstep.runtime.process_group import gather_json
from lockstep.testing.ranks import run_ranks
from lockstep.training.state_transfer import StatesDiffer, hand_over

STEPS = [7, 7, 6, 7, -1]  # rank 2 has not heard that step 7 is committed; rank 4 joins


def state(rank: int, other: str) -> dict[str, torch.Tensor]:
    """What a rank holds. Rank 1 has a weight or a buffer of its own, as `other` says."""
    tensors = {f"model.{name}": torch.full((3,), float(STEPS[rank])) for name in ("a", "seen", "b", "c", "d", "e")}
    for name, tensor in tensors.items():
        if rank == 1 and (name == "model.seen" if other == "buffer" else other == "weight"):
            tensor += 1
    if rank == 1 and other == "length":  # a text, such as a scheduler's state
        tensors["model.a"] = torch.full((4,), float(STEPS[rank]))
    return tensors


def tries(world: World, other: str) -> list[Any]:
    """What comes of handing over until it succeeds, three times at most."""
    world.standing, found = {"at": "step", "step": STEPS[world.rank]}, list[Any]()
    mine = state(world.rank, other)
    weights = [tensor for name, tensor in mine.items() if name != "model.seen"]
    while len(found) < 3:
        world.standings = gather_json(world.size, world.standing)
        try:
            if world.rank == 4:
                taken = hand_over(world)
                assert taken is not None
                found.append(digest(taken))
            else:
                assert hand_over(world, lambda: mine, 1, lambda: digest_of(weights)) is None
                found.append(digest(mine))
            break
        except StatesDiffer as error:
            found.append(("differ", differing(error.digests, 1), [one is None for one in error.digests]))
        except PeersLostError as error:
            found.append(error.what)
    return found


@pytest.mark.parametrize("other", ["nothing", "weight", "buffer", "length"])
def test_a_joiner_gets_the_state_of_one_worker_or_it_is_said_who_differs(other: str) -> None:
    found = run_ranks(tries, 5, other)
    right = digest(state(0, "nothing"))
    if other == "nothing":
        assert found[4] == [right]
    elif other in ("weight", "length"):
        assert found == [[("differ", (1,), [False, False, True, False, True])] * 3] * 5
    else:  # then the next try has one source
        assert found[4] == found[0] == ["what came to rank 4 is not the state of one worker", right]
