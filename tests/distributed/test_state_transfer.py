"""State transfer to a joiner from sources of which one differs. Real processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.ranks import run_ranks

from lockstep.checkpoint.state_dict import digest
from lockstep.elastic.consensus import find_divergent_ranks
from lockstep.elastic.progress import Progress
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import PeersLostError
from lockstep.parallel.digest import digest_of
from lockstep.training.state_transfer import StateMismatchError, transfer_state

STEPS = [7, 7, 6, 7, -1]  # rank 2 missed the vote on step 6; rank 4 joins


def state(rank: int, other: str) -> dict[str, torch.Tensor]:
    """Return the state of a rank.

    other  what differs on rank 1: "weight", "buffer", "length", or "nothing"
    """
    tensors = {f"model.{name}": torch.full((3,), float(STEPS[rank])) for name in ("a", "seen", "b", "c", "d", "e")}
    for name, tensor in tensors.items():
        if rank == 1 and (name == "model.seen" if other == "buffer" else other == "weight"):
            tensor += 1
    if rank == 1 and other == "length":  # a text, such as a scheduler's state
        tensors["model.a"] = torch.full((4,), float(STEPS[rank]))
    return tensors


def transfer_outcomes(runtime: ElasticRuntime, other: str) -> list[Any]:
    """Return the outcome of each transfer attempt until one succeeds, three at most."""
    rank, size = runtime.world.rank, runtime.world.size
    runtime.set_progress(Progress("step", STEPS[rank]))
    outcomes: list[Any] = []
    own_state = state(rank, other)
    weights = [tensor for name, tensor in own_state.items() if name != "model.seen"]
    while len(outcomes) < 3:
        gathered = runtime.group.gather_json(size, runtime.progress.to_json())
        runtime.member_progress = [Progress.from_json(values) for values in gathered]
        try:
            if rank == 4:
                received = transfer_state(runtime)
                assert received is not None
                outcomes.append(digest(received))
            else:
                assert transfer_state(runtime, lambda: own_state, 1, lambda: digest_of(weights)) is None
                outcomes.append(digest(own_state))
            break
        except StateMismatchError as error:
            outcomes.append(("differ", find_divergent_ranks(error.digests, 1), [digest is None for digest in error.digests]))
        except PeersLostError as error:
            outcomes.append(error.what)
    return outcomes


@pytest.mark.parametrize("other", ["nothing", "weight", "buffer", "length"])
def test_joiner_receives_the_state_of_one_worker_or_divergent_ranks_are_named(other: str) -> None:
    outcomes = run_ranks(transfer_outcomes, 5, other)
    expected = digest(state(0, "nothing"))
    if other == "nothing":
        assert outcomes[4] == [expected]
    elif other in ("weight", "length"):
        assert outcomes == [[("differ", (1,), [False, False, True, False, True])] * 3] * 5
    else:  # then the next attempt has one source
        assert outcomes[4] == outcomes[0] == ["rank 4 received something other than the state of one worker", expected]
