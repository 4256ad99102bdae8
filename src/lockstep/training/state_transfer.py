"""Send the training state to the workers that join, from all others in parallel, without a disk.

Source i modulo the number of sources sends tensor i. A joiner compares the sha256 of the whole
state with that of a source, so it is bitwise equal or refused. When they differ, the sources
compare their states, since a bit may have flipped in one of them. When the sources agree, the next
attempt uses one source: the state was damaged in transit, or the sources have different local
buffers (ReplicaGroup, local_buffers).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from lockstep.checkpoint.state_dict import digest
from lockstep.elastic.consensus import find_divergent_ranks
from lockstep.elastic.progress import transfer_roles
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import PeersLostError
from lockstep.runtime.tensor_bytes import DTYPES, TORCH_DTYPES, as_bytes


class StateMismatchError(PeersLostError):
    """The sources of a transfer differ. `digests`: per rank, None without the state."""

    def __init__(self, digests: Sequence[int | None]) -> None:
        super().__init__("the sources of a state transfer hold different states")
        self.digests = digests


def transfer_state(
    runtime: ElasticRuntime,
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
    world, group = runtime.world, runtime.group
    _, sources, joiners = transfer_roles(runtime.member_progress)
    if not sources or not joiners:
        return None
    all_sources, all_joiners = sources, joiners
    position = {rank: rank % replica_size for rank in range(world.size)}  # of a worker in its replica
    first_source = {rank: next(source for source in sources if position[source] == position[rank]) for rank in [*sources, *joiners]}
    sources, joiners = ([rank for rank in ranks if position[rank] == position[world.rank]] for ranks in (sources, joiners))
    if any(member.one_source for member in runtime.member_progress):
        sources = sources[:1]
    is_source, is_joiner = world.rank in sources, world.rank in joiners
    state = dict(get_state()) if is_source and get_state else {}
    specs = [[name, DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in state.items()]
    specs_hash = hashlib.sha256(json.dumps(specs).encode()).hexdigest() if is_source else ""
    offers = group.gather_json(world.size, {"hash": specs_hash, "tensors": specs if world.rank == sources[0] else []})

    def refuse(what: str) -> NoReturn:
        state_digests = group.gather_json(world.size, get_digest() if get_digest and world.rank in all_sources else None)
        if find_divergent_ranks(state_digests, replica_size):
            raise StateMismatchError(state_digests)
        runtime.set_progress(replace(runtime.progress, one_source=True))
        raise PeersLostError(what, f"sent by ranks {sources}")

    if other := [rank for rank in all_sources if offers[rank]["hash"] not in ("", offers[first_source[rank]]["hash"])]:
        refuse(f"rank {', '.join(map(str, other))} holds tensors of other names or shapes than the others")
    works = []
    for i, (name, dtype, shape) in enumerate(offers[sources[0]]["tensors"]):
        source = sources[i % len(sources)]
        if is_joiner:
            state[name] = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
            works.append(group.irecv(as_bytes(state[name]), source))
        elif source == world.rank:
            works += [group.isend(as_bytes(state[name].cpu()), joiner) for joiner in joiners]
    runtime.board.enter_collective()  # the whole transfer counts as one
    group.wait(works)
    digests = group.gather_json(world.size, digest(state) if is_joiner or world.rank == sources[0] else None)
    if wrong := [rank for rank in all_joiners if digests[rank] != digests[first_source[rank]]]:
        refuse(f"rank {', '.join(map(str, wrong))} received something other than the state of one worker")
    return state if is_joiner else None
