"""Send the training state from the workers that have it to the workers that join: between peers, in parallel, without a disk.

Source i modulo the number of sources sends tensor i, so the sources share the work. A joiner compares the sha256 of the whole state
(checkpoint/state_dict.py) with that of a source, so a joiner is bitwise equal or is refused. When they differ, the sources compare their
own states, since a bit may have flipped in one of them. When the sources agree, the next attempt uses one source: the state was damaged
in transit, or the sources differ in buffers that each worker has for itself (Team, local_buffers).
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
from lockstep.elastic.consensus import differing
from lockstep.elastic.world import World
from lockstep.errors import PeersLostError
from lockstep.runtime.process_group import gather_json
from lockstep.runtime.tensor_bytes import DTYPES, TORCH_DTYPES, as_bytes
from lockstep.runtime.work import Waits


class StatesDiffer(PeersLostError):
    """Those that have the state have not the same. `digests`: of each rank; None on those that have none."""

    def __init__(self, digests: Sequence[int | None]) -> None:
        super().__init__("the workers that hand over the state have not the same")
        self.digests = digests


def roles(standings: Sequence[Mapping[str, Any]]) -> tuple[int, list[int], list[int]]:
    """(the step at which the run stands, the ranks that have its state, the ranks that need it)."""
    steps = [int(one["step"]) for one in standings]
    first = max(steps)
    return first, [rank for rank, step in enumerate(steps) if step == first >= 0], [rank for rank, step in enumerate(steps) if step < 0]


def hand_over(
    world: World, capture: Callable[[], Mapping[str, Tensor]] | None = None, unit: int = 1, digest_here: Callable[[], int] | None = None
) -> dict[str, Tensor] | None:
    """Collective. The state, on the ranks that need it; None on the others.

    capture      gives the state on a rank that has it
    unit         workers of a replica: each takes the state from those that stand at the same place in theirs
    digest_here  64 bits over it, there
    Errors: RuntimeError when a peer is lost meanwhile; StatesDiffer; PeersLostError when what came is not what was sent.
    """
    _, sources, joiners = roles(world.standings)
    if not sources or not joiners:
        return None
    all_sources, all_joiners = sources, joiners
    first_of = {rank: next(one for one in sources if one % unit == rank % unit) for rank in [*sources, *joiners]}
    sources, joiners = ([rank for rank in some if rank % unit == world.rank % unit] for some in (sources, joiners))
    if any(one.get("one_source") for one in world.standings):
        sources = sources[:1]
    sends, takes = world.rank in sources, world.rank in joiners
    mine = dict(capture()) if sends and capture else {}
    listed = [[name, DTYPES[one.dtype], list(one.shape)] for name, one in mine.items()]
    short = hashlib.sha256(json.dumps(listed).encode()).hexdigest() if sends else ""
    told = gather_json(world.size, {"short": short, "tensors": listed if world.rank == sources[0] else []})

    def refuse(what: str) -> NoReturn:
        held = gather_json(world.size, digest_here() if digest_here and world.rank in all_sources else None)
        if differing(held, unit):
            raise StatesDiffer(held)
        world.standing = world.standing | {"one_source": True}
        raise PeersLostError(what, f"sent by ranks {sources}")

    if other := [rank for rank in all_sources if told[rank]["short"] not in ("", told[first_of[rank]]["short"])]:
        refuse(f"rank {', '.join(map(str, other))} holds tensors of other names or shapes than the others")
    works = []
    for i, (name, dtype, shape) in enumerate(told[sources[0]]["tensors"]):
        source = sources[i % len(sources)]
        if takes:
            mine[name] = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
            works.append(dist.irecv(as_bytes(mine[name]), src=source))
        elif source == world.rank:
            works += [dist.isend(as_bytes(mine[name].cpu()), dst=joiner) for joiner in joiners]
    world.board.collective()  # all of it counts as one
    Waits(world.broken).finish(works)
    digests = gather_json(world.size, digest(mine) if takes or world.rank == sources[0] else None)
    if wrong := [rank for rank in all_joiners if digests[rank] != digests[first_of[rank]]]:
        refuse(f"what came to rank {', '.join(map(str, wrong))} is not the state of one worker")
    return mine if takes else None
