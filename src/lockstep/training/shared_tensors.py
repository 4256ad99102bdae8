"""The tensors of a checkpoint whose files the ranks have read in shares.

Each byte is read and hashed by one rank, which sends it to one rank of each other host; that rank
sends it to the others on its host. A rank holds its share of the files and a few tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import ItemsView, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from lockstep.checkpoint.safetensors_io import TensorSpec
from lockstep.checkpoint.shards import StoredSlice, StoredTensor, StoredTensors
from lockstep.checkpoint.state_dict import tensor_from_bytes
from lockstep.elastic.collectives import all_gather_json
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.errors import PeersLostError
from lockstep.parallel.digest import digest_of
from lockstep.runtime.tensor_bytes import TORCH_DTYPES
from lockstep.tensor_slice import TensorSlice

TENSORS_AT_ONCE = 8


class Piece(NamedTuple):
    """A tensor, or a slice of one, in a file that `owner` has read. spec: of the slice."""

    number: int  # counted by its owner
    owner: int
    spec: TensorSpec
    slice: TensorSlice
    digest: int


class SharedTensors(Mapping[str, Tensor]):
    """Name -> tensor: a meta tensor, with shape and dtype only, for parameters and their optimizer
    state. `items` returns all values, on all ranks at the same time, once.

    share  the tensors in the files that this rank has read and verified
    """

    def __init__(self, runtime: ElasticRuntime, share: StoredTensors) -> None:
        """Collective. Exchange what each rank has read, and the values of the small state."""
        self._runtime = runtime
        self._own = dict(enumerate(piece for tensor in share.values() for piece in tensor.slices))
        own = [[*piece.spec, piece.slice.to_json(), digest_of([as_tensor(piece)])] for piece in self._own.values()]
        answers = all_gather_json(runtime, {"host": runtime.world.host, "pieces": own})
        hosts: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            hosts.setdefault(answer["host"], []).append(rank)
        self._hosts = list(hosts.values())
        self._pieces: dict[str, list[Piece]] = {}
        for number, row in enumerate(itertools.zip_longest(*(answer["pieces"] for answer in answers))):
            for owner, piece in enumerate(row):  # one of each owner in turn, so that all of them send
                if piece:
                    name, dtype, shape, slice, digest = piece
                    spec = TensorSpec(name, dtype, tuple(shape))
                    self._pieces.setdefault(name, []).append(Piece(number, owner, spec, TensorSlice.from_json(slice), digest))
        self._streamed = [name for name in self._pieces if name.startswith(("model.", "optim."))]
        self._small = dict(self._receive([name for name in self._pieces if name not in self._streamed]))

    def __getitem__(self, name: str) -> Tensor:
        if name in self._small:
            return self._small[name]
        first = self._pieces[name][0]
        return torch.empty(first.slice.shape, dtype=TORCH_DTYPES[first.spec.dtype], device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def items(self) -> ItemsView[str, Tensor]:
        """Collective. Yield every tensor with its value."""
        return itertools.chain(self._small.items(), self._receive(self._streamed))  # type: ignore[return-value]

    def _receive(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Collective. Yield the named tensors, a few of which are in flight at a time."""
        for start in range(0, len(names), TENSORS_AT_ONCE):
            window = names[start : start + TENSORS_AT_ONCE]
            pieces = [piece for name in window for piece in self._pieces[name]]
            stored = {piece: self._buffer(piece) for piece in pieces}
            with self._runtime.board.during("preparing"):
                for hop in (self._between_hosts, self._within_hosts):
                    works = [work for piece in pieces for work in self._exchange(as_tensor(stored[piece]), hop(piece))]
                    self._runtime.group.wait(works)
            received = [piece for piece in pieces if piece.owner != self._runtime.world.rank]
            if wrong := [piece for piece in received if digest_of([as_tensor(stored[piece])]) != piece.digest]:
                what = f"{wrong[0].spec.name} arrived with other bytes than rank {wrong[0].owner} sent"
                raise PeersLostError(what, "reading a checkpoint together", "start again; if it recurs, check memory and network")
            for name in window:
                tensor = StoredTensor([stored.pop(piece) for piece in self._pieces[name]])
                yield name, tensor_from_bytes(tensor.spec, tensor.data())

    def _buffer(self, piece: Piece) -> StoredSlice:
        """Return the bytes of a piece that this rank has read, or memory for those of another."""
        if piece.owner == self._runtime.world.rank:
            return self._own.pop(piece.number)  # no longer held here: a file is freed after its last tensor
        return StoredSlice(piece.spec, memoryview(bytearray(piece.spec.bytes)), piece.slice, "")

    def _exchange(self, data: Tensor, transfers: Iterator[tuple[int, int]]) -> Iterator[Work | None]:
        rank, group = self._runtime.world.rank, self._runtime.group
        for source, target in transfers if len(data) else ():
            if rank == source:
                yield group.isend(data, target)
            elif rank == target:
                yield group.irecv(data, source)

    def _between_hosts(self, piece: Piece) -> Iterator[tuple[int, int]]:
        """Yield (source, target) from the owner of a piece to one rank of each other host."""
        return ((piece.owner, self._first(piece, ranks)) for ranks in self._hosts if piece.owner not in ranks)

    def _within_hosts(self, piece: Piece) -> Iterator[tuple[int, int]]:
        """Yield (source, target) from that rank, or the owner, to the others of its host."""
        firsts = [(self._first(piece, ranks), ranks) for ranks in self._hosts]
        return ((first, rank) for first, ranks in firsts for rank in ranks if rank != first)

    def _first(self, piece: Piece, ranks: list[int]) -> int:
        return piece.owner if piece.owner in ranks else ranks[piece.number % len(ranks)]


def as_tensor(stored: StoredSlice) -> Tensor:
    """Return the bytes of a slice as a tensor on the same memory."""
    return torch.frombuffer(stored.data, dtype=torch.uint8) if stored.data.nbytes else torch.empty(0, dtype=torch.uint8)
