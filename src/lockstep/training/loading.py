"""Choose the checkpoint to resume from and load it, on all workers together.

Each byte is read and hashed by one rank, which sends it to one rank of each other host where a rank
needs it; that rank sends it to the others on its host. A rank holds its share of the files and a
few tensors.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from lockstep.checkpoint.policy import choose_resume_step, missing_checkpoint
from lockstep.checkpoint.safetensors_io import TensorSpec
from lockstep.checkpoint.shards import StoredSlice, StoredTensors, assemble, parameter_of, slice_of
from lockstep.checkpoint.state_dict import tensor_from_bytes
from lockstep.checkpoint.store import Checkpoint, CheckpointStore
from lockstep.elastic.collectives import (
    all_gather_json,
    gather_results,
    run_in_run_folder,
    run_on_rank0,
)
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import PeersLostError, RunFolderUnavailableError
from lockstep.object_store.storage import STORE_FILE
from lockstep.parallel.digest import digest_of
from lockstep.parallel.parallelize import LocalModel
from lockstep.runtime.tensor_bytes import TORCH_DTYPES
from lockstep.tensor_slice import TensorSlice

log = logging.getLogger("lockstep")
TENSORS_AT_ONCE = 8
STREAMED = "model.", "optim."  # names of the tensors that are received one after another


def load_checkpoint(
    runtime: ElasticRuntime, store: CheckpointStore, how: str, local_model: LocalModel | None
) -> Checkpoint | None:
    """Collective. Return this worker's part of a checkpoint; None for a new run.

    Each rank reads and verifies a share of the files, and keeps it in memory. They send it to each
    other while the state is loaded: `tensors` is a SharedTensors. Where the hosts share no disk,
    the ranks on the host of rank 0 read it.
    how  see Checkpointer.resume
    """
    readers = ranks_that_read(runtime)
    share = ShareReader(store, runtime.world.rank, readers)
    loading = runtime.preparing("reading the checkpoint")  # as long as the disk requires
    steps, reason = run_on_rank0(runtime, loading(partial(select, runtime, store, how)))
    store.require_folder()
    damaged: dict[int, list[str]] = {}
    step = None
    for candidate in steps:
        found = gather_results(runtime, loading(partial(share.read, candidate)))
        problems = {problem for of_rank in found for problem in of_rank}
        if not problems:
            step = candidate
            break
        damaged[candidate] = sorted(problems)

    def settle() -> None:
        """For rank 0: set aside what is not resumed."""
        store.set_damaged_aside(damaged, step)
        log.info(reason if step == next(iter(steps), None) else f"resuming from step {step}")

    run_on_rank0(runtime, settle)
    if how == "never" or how.isdecimal():
        run_in_run_folder(runtime, lambda: store.set_aside_after(step or 0))
    if step is None:
        return None
    store.set_damaged_aside({}, step)
    facts = share.facts
    if len(readers) < runtime.world.size:
        facts = run_on_rank0(runtime, lambda: share.facts)
    slices, replica_size = None, 1
    if local_model:
        slices, replica_size = local_model.slices, local_model.layout.workers_per_replica
    return Checkpoint(step, SharedTensors(runtime, share.tensors, slices, replica_size), facts)


def select(runtime: ElasticRuntime, store: CheckpointStore, how: str) -> tuple[list[int], str]:
    """For rank 0: return the steps to try, the newest first, and the reason."""
    if why := runtime.membership.folder_error():
        raise RunFolderUnavailableError(
            f"the run folder cannot be used: {why}", str(store.folder), "mount it again"
        )
    run = store.folder.parent
    if (run / STORE_FILE).exists():
        # Only a run in an object store loads the code for it.
        from lockstep.remote.working_copy import refresh_copy

        refresh_copy(run, keep=["run.json"])  # which this start has written
    store.preflight()
    steps = store.steps()
    chosen, reason = choose_resume_step(how, steps)
    if chosen is None or how.isdecimal():
        return [] if chosen is None else [chosen], reason
    return steps[::-1], reason


class ShareReader:
    """Reads and verifies this rank's share of a checkpoint, and keeps it. readers: ranks that
    read"""

    def __init__(self, store: CheckpointStore, rank: int, readers: list[int]) -> None:
        self.store = store
        self.rank = rank
        self.readers = readers
        self.tensors = StoredTensors({})
        self.facts: dict[str, Any] = {}

    def read(self, step: int) -> list[str]:
        """Return the problems of the share."""
        if self.rank not in self.readers:
            return []
        self.tensors = StoredTensors({})  # free the memory of a damaged one
        share = self.readers.index(self.rank), len(self.readers)
        stored, facts, problems = self.store.read_share(step, share)
        if stored is not None:
            self.tensors, self.facts = stored, facts
        elif not problems:
            raise missing_checkpoint(step, self.store.steps(), str(self.store.folder))
        return problems


def ranks_that_read(runtime: ElasticRuntime) -> list[int]:
    """Return the ranks whose run folder has the checkpoints that rank 0 sees."""
    hosts = [id.partition("/")[0] for id in runtime.world.members]
    return (
        [rank for rank, host in enumerate(hosts) if host == hosts[0]]
        if runtime.membership.has_own_folder
        else [*range(runtime.world.size)]
    )


class Piece(NamedTuple):
    """A tensor, or a slice of one, in a file that `owner` has read. spec: of the slice.

    positions  in a replica of the workers that need it
    """

    number: int  # counted by its owner
    owner: int
    spec: TensorSpec
    slice: TensorSlice
    digest: int
    positions: tuple[int, ...]

    @staticmethod
    def of(number: int, owner: int, described: Sequence[Any]) -> Piece:
        name, dtype, shape, part, digest, positions = described
        spec = TensorSpec(name, dtype, tuple(shape))
        return Piece(number, owner, spec, TensorSlice.from_json(part), digest, tuple(positions))


class SharedTensors(Mapping[str, Tensor]):
    """Name -> tensor: a meta tensor, with shape and dtype only, for parameters and their optimizer
    state. `items` returns all values, on all ranks at the same time, once.

    A rank has the tensors whose parameters are in `slices`, and of each its slice.

    share         the tensors in the files that this rank has read and verified
    slices        parameter name -> the slice that this rank needs; None: everything
    replica_size  workers per replica: those at the same position in theirs need the same slices
    """

    def __init__(
        self,
        runtime: ElasticRuntime,
        share: StoredTensors,
        slices: Mapping[str, TensorSlice] | None = None,
        replica_size: int = 1,
    ) -> None:
        """Collective. Exchange what each rank needs and has read, and the values of the small
        state."""
        self._runtime = runtime
        self._replica_size = replica_size
        needed_here = {name: part.to_json() for name, part in (slices or {}).items()}
        answers = all_gather_json(
            runtime,
            {
                "host": runtime.world.host,
                "slices": needed_here if runtime.world.rank < replica_size else {},
            },
        )
        hosts: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            hosts.setdefault(answer["host"], []).append(rank)
        self._hosts = list(hosts.values())
        positions: list[Mapping[str, TensorSlice] | None] = [None]
        if slices is not None:
            positions = [
                {name: TensorSlice.from_json(part) for name, part in answer["slices"].items()}
                for answer in answers[:replica_size]
            ]
        self._own: dict[int, tuple[StoredSlice, TensorSlice]] = {}
        own = []
        for stored in [stored for tensor in share.values() for stored in tensor.slices]:
            for part, needed_at in needed_parts(stored, positions).items():
                cut = stored.part(part)
                own.append([*cut.spec, part.to_json(), digest_of([as_tensor(cut)]), needed_at])
                self._own[len(self._own)] = stored, part
        self._pieces: dict[str, list[Piece]] = {}
        # One of each owner in turn, so that all of them send.
        for number, row in enumerate(itertools.zip_longest(*all_gather_json(runtime, own))):
            for owner, described in enumerate(row):
                if described:
                    piece = Piece.of(number, owner, described)
                    self._pieces.setdefault(piece.spec.name, []).append(piece)
        self._needed = {
            name: needed
            for name in self._pieces
            if (needed := needed_slice(name, self._spec(name).shape, slices))
        }
        self._streamed = [name for name in self._pieces if name.startswith(STREAMED)]
        small = [name for name in self._pieces if name not in self._streamed]
        self._small = dict(self._receive(small))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._small:
            return self._small[name]
        return torch.empty(
            self._needed[name].local_shape,
            dtype=TORCH_DTYPES[self._spec(name).dtype],
            device="meta",
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._needed)

    def __len__(self) -> int:
        return len(self._needed)

    def _spec(self, name: str) -> TensorSpec:
        """Return the spec of the whole tensor."""
        first = self._pieces[name][0]
        return first.spec._replace(shape=first.slice.shape)

    def items(self) -> ItemsView[str, Tensor]:
        """Collective. Yield every tensor with its value."""
        received = self._receive(self._streamed)
        return itertools.chain(self._small.items(), received)  # type: ignore[return-value]

    def _receive(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Collective. Yield the named tensors, a few of which are in flight at a time."""
        rank = self._runtime.world.rank
        for start in range(0, len(names), TENSORS_AT_ONCE):
            window = names[start : start + TENSORS_AT_ONCE]
            pieces = [
                piece
                for name in window
                for piece in self._pieces[name]
                if rank == piece.owner or self._is_needed(piece, rank)
            ]
            stored = {piece: self._buffer(piece) for piece in pieces}
            with self._runtime.board.during("preparing"):
                for within_hosts in (False, True):
                    works = [
                        work
                        for piece in pieces
                        for work in self._exchange(piece, stored[piece], within_hosts=within_hosts)
                    ]
                    self._runtime.group.wait(works)
            for piece in pieces:
                if piece.owner != rank and digest_of([as_tensor(stored[piece])]) != piece.digest:
                    raise PeersLostError(
                        f"{piece.spec.name} arrived with other bytes than rank {piece.owner} sent",
                        "reading a checkpoint together",
                        "start again; if it recurs, check memory and network",
                    )
            for name in window:
                if name in self._needed:
                    slices = [
                        stored.pop(piece)
                        for piece in self._pieces[name]
                        if self._is_needed(piece, rank)
                    ]
                    value = assemble(self._spec(name), slices, self._needed[name])
                    yield name, tensor_from_bytes(*value)

    def _is_needed(self, piece: Piece, rank: int) -> bool:
        return rank % self._replica_size in piece.positions

    def _buffer(self, piece: Piece) -> StoredSlice:
        """Return the bytes of a piece that this rank has read, or memory for those of another."""
        if piece.owner == self._runtime.world.rank:
            # No longer held here: a file is freed after its last tensor.
            stored, part = self._own.pop(piece.number)
            return stored.part(part)
        return StoredSlice(piece.spec, memoryview(bytearray(piece.spec.bytes)), piece.slice, "")

    def _exchange(
        self, piece: Piece, stored: StoredSlice, *, within_hosts: bool
    ) -> Iterator[Work | None]:
        """Start to send a piece from its owner to one rank of each other host where it is needed,
        or from that rank, or the owner, to the others of its host."""
        rank, group = self._runtime.world.rank, self._runtime.group
        data = as_tensor(stored)
        for ranks in self._hosts if len(data) else ():
            receivers = [rank for rank in ranks if self._is_needed(piece, rank)]
            if not receivers:
                continue
            first = receivers[piece.number % len(receivers)]
            if piece.owner in ranks:
                first = piece.owner
            source, targets = (first, receivers) if within_hosts else (piece.owner, [first])
            for target in targets:
                if target == source:
                    continue
                if rank == source:
                    yield group.isend(data, target)
                elif rank == target:
                    yield group.irecv(data, source)


def needed_slice(
    name: str, shape: tuple[int, ...], slices: Mapping[str, TensorSlice] | None
) -> TensorSlice | None:
    """Return the slice of tensor `name` that a worker with `slices` needs; None: nothing of it.

    Every worker needs the state that belongs to no parameter and is not in `slices`.
    """
    if slices is None or (not name.startswith(STREAMED) and name not in slices):
        return TensorSlice.whole(shape)
    return slice_of(name, shape, slices) if parameter_of(name) in slices else None


def needed_parts(
    stored: StoredSlice, positions: Sequence[Mapping[str, TensorSlice] | None]
) -> dict[TensorSlice, list[int]]:
    """Return the parts of a stored slice -> the positions in a replica of the workers that need
    them.

    positions  the slices of parameters that the worker at each position needs
    """
    parts: dict[TensorSlice, list[int]] = {}
    for position, slices in enumerate(positions):
        needed = needed_slice(stored.spec.name, stored.slice.shape, slices)
        part = stored.slice.intersection(needed) if needed else None
        if part and 0 not in part.local_shape:
            parts.setdefault(part, []).append(position)
    return parts or {stored.slice: []}


def as_tensor(stored: StoredSlice) -> Tensor:
    """Return the bytes of a slice as a tensor on the same memory."""
    return (
        torch.frombuffer(stored.data, dtype=torch.uint8)
        if stored.data.nbytes
        else torch.empty(0, dtype=torch.uint8)
    )
