"""The rank of this process among all workers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.elastic.generation_log import Generation


@dataclass(frozen=True)
class World:
    """The position of this worker among the workers of one generation.

    rank, size              among all workers of the run; -1 and 0 before the first generation
    local_rank, local_size  among the workers of this host
    host                    name of this host
    device                  where this worker computes
    generation              number of the membership list; 0 for a static process group
    members                 worker ids, by rank; () for a static process group
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    device: torch.device
    generation: int = 0
    members: tuple[str, ...] = ()

    @property
    def leader(self) -> bool:
        """Whether this is rank 0, which alone writes files that exist once per run."""
        return self.rank == 0

    @property
    def local_leader(self) -> bool:
        """Whether this is the first worker of its host."""
        return self.local_rank == 0

    def in_generation(self, generation: Generation, id: str) -> World:
        """Return the world of member `id` in a generation."""
        ids = tuple(member.id for member in generation.members)
        rank, local = ids.index(id), sorted(member.slot for member in generation.members if member.host == self.host)
        local_rank = local.index(generation.members[rank].slot)
        return World(rank, len(ids), local_rank, len(local), self.host, self.device, generation.number, ids)
