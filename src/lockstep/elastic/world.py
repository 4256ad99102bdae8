"""The rank of this process among all workers, and how it becomes one of them.

The launch variables fix its rank. Under an agent, each generation sets a new one.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.elastic.fault_injection import DRILL_VARIABLE, FaultInjectingBoard
from lockstep.elastic.generation_group import GenerationGroup
from lockstep.elastic.generation_log import Generation, open_generation_log
from lockstep.errors import UsageError
from lockstep.log import log
from lockstep.runtime.device import select_device
from lockstep.runtime.environment import RankInfo, read_rank_info
from lockstep.runtime.rendezvous import StoreConnection, init_static_group, rendezvous
from lockstep.runtime.sockets import choose_interface, open_sockets
from lockstep.runtime.status_board import StatusBoard
from lockstep.runtime.worker_env import WorkerEnv, is_loopback_reachable

# Of this process: its launcher gives it one address for all of its groups.
LAUNCH_STORE = StoreConnection()


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
        rank, local = (
            ids.index(id),
            sorted(member.slot for member in generation.members if member.host == self.host),
        )
        local_rank = local.index(generation.members[rank].slot)
        return World(
            rank, len(ids), local_rank, len(local), self.host, self.device, generation.number, ids
        )


def join_static_group(threads: int, timeout_s: float) -> tuple[World, GenerationGroup]:
    """Collective. Form the process group that the launch variables describe; alone without them."""
    info, source = read_rank_info(os.environ)
    device, reason = select_device(info)
    info = info or RankInfo(0, 1, 0, 1, "", 0, "no launcher")
    store = rendezvous(info, timeout_s, source, LAUNCH_STORE)
    if info.size > 1:
        interface, route = choose_interface(os.environ, info)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        reason = f"{reason}; gloo on {os.environ['GLOO_SOCKET_IFNAME']}: {route}"
    if info.rank == 0:
        log.info("%s; %s, %d thread%s: %s", source, device, threads, "s"[: threads - 1], reason)
        for warning in info.warnings:
            log.warning("%s", warning)
    before = open_sockets()
    init_static_group(info, store, device, timeout_s)
    world = World(
        info.rank, info.size, info.local_rank, info.local_size, socket.gethostname(), device
    )
    return world, GenerationGroup(device, timeout_s, open_sockets() - before)


def make_board(worker_env: WorkerEnv) -> StatusBoard:
    """Return the status board of a worker; in a drill it carries out requested faults."""
    path = Path(worker_env.state) / f"{worker_env.slot}.board"
    inject = os.environ.get(DRILL_VARIABLE) == "1"
    return FaultInjectingBoard(path, path.with_suffix(".fault")) if inject else StatusBoard(path)


def is_run_active(folder: Path, worker_env: WorkerEnv) -> bool:
    """Return whether a generation is training. UsageError if another host trains this run of one
    host."""
    newest = open_generation_log(folder, since=worker_env.known_generation).newest()
    if newest is None or newest.end:
        return False
    alive = [
        member
        for member in newest.members
        if is_loopback_reachable(member.loopback) and is_listening(member.address)
    ]
    foreign = [member for member in alive if member.host != worker_env.host]
    if worker_env.agent_pid and foreign and worker_env.slots == worker_env.expected_workers:
        hosts = sorted({member.host for member in foreign})
        raise UsageError(
            f"another training is already running in {folder}",
            f"generation {newest.number} on {', '.join(hosts)}",
            "wait for it, stop it with lockstep launch --stop, or choose another --out",
        )
    return bool(alive)


def is_listening(address: str) -> bool:
    """Return whether a process listens at "ADDRESS:PORT"."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
        return True
    except OSError:
        return False
