"""Send the training state to the workers that join, from all others in parallel, without a disk.

Source i modulo the number of sources sends tensor i to one joiner of each host, whose memory the
other joiners of that host map. The memory has no name: the kernel frees it with the last process
that uses it. A joiner compares the sha256 of the whole
state with that of a source, so it is bitwise equal or refused. When they differ, the sources
compare their states, since a bit may have flipped in one of them. When the sources agree, the next
attempt uses one source and no shared memory: the state was damaged in transit, or the sources have
different buffers (Session(buffers={"NAME": "local"})).
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import IO, Any, NoReturn

from torch import Tensor
from torch.distributed import Work

from lockstep.checkpoint.safetensors_io import TensorSpec
from lockstep.checkpoint.state_dict import digest, tensor_from_bytes
from lockstep.elastic.consensus import find_divergent_ranks
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import transfer_roles
from lockstep.errors import PeersLostError
from lockstep.files import open_regular
from lockstep.runtime.tensor_bytes import DTYPES, as_bytes
from lockstep.training.attributes import Attributes

log = logging.getLogger("lockstep")
ALIGNMENT = 64  # bytes, as torch aligns tensors


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
    attributes: Attributes | None = None,
) -> dict[str, Tensor] | None:
    """Collective. Send the state to the ranks that need it; return it there, and None on the
    others.

    get_state     returns the state, on a rank that has it
    replica_size  workers per replica: each receives the state from workers with the same position
                  in their replica
    get_digest    returns 64 bits over the state, on a rank that has it
    attributes    part of the state where all sources agree on them
    Errors: RuntimeError when a peer is lost meanwhile; StateMismatchError; PeersLostError when the
    received state is not the sent one.
    """
    world, group = runtime.world, runtime.group
    _, all_sources, all_joiners = transfer_roles(runtime.member_progress)
    if not all_sources or not all_joiners:
        return None
    first_source = {
        rank: next(source for source in all_sources if (source - rank) % replica_size == 0)
        for rank in [*all_sources, *all_joiners]
    }
    sources = [rank for rank in all_sources if (rank - world.rank) % replica_size == 0]
    if one_source := any(member.one_source for member in runtime.member_progress):
        sources = sources[:1]
    is_source = world.rank in sources
    described = group.gather_json(
        world.size, attributes.describe() if attributes and world.rank in all_sources else None
    )
    if attributes:
        attributes.agree(described)
    own_digest = get_digest if world.rank in all_sources else None
    refuse = partial(refuse_transfer, runtime, sources, replica_size, own_digest)
    state = dict(get_state()) if is_source and get_state else {}
    specs = [[name, DTYPES[tensor.dtype], list(tensor.shape)] for name, tensor in state.items()]
    offer = {
        "host": world.host,
        "hash": hashlib.sha256(json.dumps(specs).encode()).hexdigest() if is_source else "",
        "tensors": specs if world.rank == sources[0] else [],
    }
    offers = group.gather_json(world.size, offer)
    if other := [
        rank
        for rank in all_sources
        if offers[rank]["hash"] not in ("", offers[first_source[rank]]["hash"])
    ]:
        ranks = ", ".join(map(str, other))
        refuse(f"rank {ranks} holds tensors of other names or shapes than the others")
    sent = [
        TensorSpec(name, dtype, tuple(shape))
        for name, dtype, shape in offers[sources[0]]["tensors"]
    ]
    joiners = [rank for rank in all_joiners if (rank - world.rank) % replica_size == 0]
    # After a mismatch each joiner receives by itself, as if on another host: no memory is shared.
    hosts = {rank: rank if one_source else offers[rank]["host"] for rank in joiners}
    state, digests = send_and_receive(runtime, state, sent, sources, hosts)
    if wrong := [rank for rank in all_joiners if digests[rank] != digests[first_source[rank]]]:
        ranks = ", ".join(map(str, wrong))
        refuse(f"rank {ranks} received something other than the state of one worker")
    return state if world.rank in joiners else None


def refuse_transfer(
    runtime: ElasticRuntime,
    sources: Sequence[int],
    replica_size: int,
    own_digest: Callable[[], int] | None,
    what: str,
) -> NoReturn:
    """Collective. StateMismatchError when the sources differ; else PeersLostError, and the next
    attempt uses one source."""
    state_digests = runtime.group.gather_json(
        runtime.world.size, own_digest() if own_digest else None
    )
    if find_divergent_ranks(state_digests, replica_size):
        raise StateMismatchError(state_digests)
    runtime.set_progress(replace(runtime.progress, one_source=True))
    raise PeersLostError(what, f"sent by ranks {sources}")


def send_and_receive(
    runtime: ElasticRuntime,
    state: dict[str, Tensor],
    sent: Sequence[TensorSpec],
    sources: Sequence[int],
    hosts: dict[int, Any],
) -> tuple[dict[str, Tensor], list[str]]:
    """Collective. Return the state (on a source its own, on a joiner the received one), and of each
    joiner and the first source its digest. hosts: of each joiner"""
    world, group = runtime.world, runtime.group
    # The first joiner of each host.
    receivers = {host: rank for rank, host in reversed(hosts.items())}
    with open(os.memfd_create("lockstep-state"), "r+b") as file:
        if world.rank in receivers.values():
            state = map_tensors(file, sent, mmap.ACCESS_WRITE)
        works = start_transfer(runtime, state, sent, sources, list(receivers.values()))
        runtime.board.enter_collective()  # the whole transfer counts as one
        group.wait(works)
        addresses = group.gather_json(world.size, f"/proc/{os.getpid()}/fd/{file.fileno()}")
        if world.rank in hosts and world.rank not in receivers.values():
            state = map_received(addresses[receivers[hosts[world.rank]]], sent)
        # The memory stays open until all have mapped it.
        is_compared = world.rank in hosts or world.rank == sources[0]
        return state, group.gather_json(world.size, digest(state) if is_compared else None)


def start_transfer(
    runtime: ElasticRuntime,
    state: Mapping[str, Tensor],
    specs: Sequence[TensorSpec],
    sources: Sequence[int],
    receivers: Sequence[int],
) -> list[Work | None]:
    """Start to send `state` from `sources` to `receivers`, into their `state`."""
    rank = runtime.world.rank
    group = runtime.group
    works = list[Work | None]()
    for i, spec in enumerate(specs):
        source = sources[i % len(sources)]
        if rank in receivers:
            works.append(group.irecv(as_bytes(state[spec.name]), source))
        elif source == rank:
            works += [
                group.isend(as_bytes(state[spec.name].cpu()), receiver) for receiver in receivers
            ]
    return works


def map_tensors(file: IO[bytes], specs: Sequence[TensorSpec], access: int) -> dict[str, Tensor]:
    """Return tensors that share memory with a file."""
    *starts, size = accumulate(
        (-(-spec.bytes // ALIGNMENT) * ALIGNMENT for spec in specs), initial=0
    )
    if access == mmap.ACCESS_WRITE:
        file.truncate(max(1, size))
    memory = memoryview(mmap.mmap(file.fileno(), max(1, size), access=access))
    return {
        spec.name: tensor_from_bytes(spec, memory[start : start + spec.bytes])
        for start, spec in zip(starts, specs, strict=True)
    }


def map_received(path: str, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Return what another joiner of this host received; {} if its memory cannot be opened, as from
    another container. Then digests differ, and each joiner receives the state itself."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return map_tensors(file, specs, mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        log.info("the state that another worker of this host received cannot be opened (%s)", error)
        return {}
