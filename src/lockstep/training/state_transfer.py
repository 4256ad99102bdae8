"""Send the training state from the workers that have it to the workers that join: between peers, in
parallel, without a disk.

Source i modulo the number of sources sends tensor i, so the sources share the work. A joiner
compares the sha256 of the whole state (checkpoint/state_dict.py) with that of a source, so a joiner
is bitwise equal or is refused. When they differ, the sources compare their own states, since a bit
may have flipped in one of them. When the sources agree, the next attempt uses one source: the state
was damaged in transit, or the sources differ in buffers that each worker has for itself
(ReplicaGroup, local_buffers).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.state_dict import digest
from lockstep.elastic.consensus import find_divergent_ranks
from lockstep.elastic.world import World
from lockstep.errors import PeersLostError
from lockstep.runtime.process_group import gather_json
from lockstep.runtime.tensor_bytes import DTYPES, TORCH_DTYPES, as_bytes
from lockstep.runtime.work import WorkWaiter


class StateMismatchError(PeersLostError):
    """The sources of a transfer differ. `digests`: per rank, None without the state."""

    def __init__(self, digests: Sequence[int | None]) -> None:
        super().__init__("the sources of a state transfer hold different states")
        self.digests = digests


def transfer_roles(standings: Sequence[Mapping[str, Any]]) -> tuple[int, list[int], list[int]]:
    """Return (the step of the run, the ranks that have its state, the ranks that need it)."""
    steps = [int(standing["step"]) for standing in standings]
    newest = max(steps)
    return newest, [rank for rank, step in enumerate(steps) if step == newest >= 0], [rank for rank, step in enumerate(steps) if step < 0]


def transfer_state(
    world: World,
    get_state: Callable[[], Mapping[str, Tensor]] | None = None,
    replica_size: int = 1,
    get_digest: Callable[[], int] | None = None,
) -> dict[str, Tensor] | None:
    """Collective. Send the state to the ranks that need it; return it there, and None on the
    others.

    get_state     returns the state, on a rank that has it
    replica_size  workers per replica: each receives the state from workers with the same position
                  in their replica
    get_digest    returns 64 bits over the state, on a rank that has it
    Errors: RuntimeError when a peer is lost meanwhile; StateMismatchError; PeersLostError when the
    received state is not the sent one.
    """
    _, sources, joiners = transfer_roles(world.standings)
    if not sources or not joiners:
        return None
    all_sources, all_joiners = sources, joiners
    position = {rank: rank % replica_size for rank in range(world.size)}  # of a worker in its replica
    first_source = {rank: next(source for source in sources if position[source] == position[rank]) for rank in [*sources, *joiners]}
    sources, joiners = ([rank for rank in ranks if position[rank] == position[world.rank]] for ranks in (sources, joiners))
    if any(standing.get("one_source") for standing in world.standings):
        sources = sources[:1]
    is_source, is_joiner = world.rank in sources, world.rank in joiners
    state = dict(get_state()) if is_source and get_state else {}
    specs = [[name, DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in state.items()]
    specs_hash = hashlib.sha256(json.dumps(specs).encode()).hexdigest() if is_source else ""
    offers = gather_json(world.size, {"hash": specs_hash, "tensors": specs if world.rank == sources[0] else []})

    def refuse(what: str) -> NoReturn:
        state_digests = gather_json(world.size, get_digest() if get_digest and world.rank in all_sources else None)
        if find_divergent_ranks(state_digests, replica_size):
            raise StateMismatchError(state_digests)
        world.standing = world.standing | {"one_source": True}
        raise PeersLostError(what, f"sent by ranks {sources}")

    if other := [rank for rank in all_sources if offers[rank]["hash"] not in ("", offers[first_source[rank]]["hash"])]:
        refuse(f"rank {', '.join(map(str, other))} holds tensors of other names or shapes than the others")
    works = []
    for i, (name, dtype, shape) in enumerate(offers[sources[0]]["tensors"]):
        source = sources[i % len(sources)]
        if is_joiner:
            state[name] = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
            works.append(dist.irecv(as_bytes(state[name]), src=source))
        elif source == world.rank:
            works += [dist.isend(as_bytes(state[name].cpu()), dst=joiner) for joiner in joiners]
    world.board.enter_collective()  # the whole transfer counts as one
    WorkWaiter(world.generation_error).wait(works)
    digests = gather_json(world.size, digest(state) if is_joiner or world.rank == sources[0] else None)
    if wrong := [rank for rank in all_joiners if digests[rank] != digests[first_source[rank]]]:
        refuse(f"rank {', '.join(map(str, wrong))} received something other than the state of one worker")
    return state if is_joiner else None
