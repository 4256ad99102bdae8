"""The process group of one generation: form it, abort it, send and receive in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public at run time

from lockstep.elastic.generation_log import Generation
from lockstep.runtime.process_group import FORM_TIMEOUT_S, gather_json, init_default_group
from lockstep.runtime.sockets import open_sockets, shutdown_sockets
from lockstep.runtime.torch_private import set_group_timeout
from lockstep.runtime.work import WorkWaiter

CLOSE_TIMEOUT_S = 5.0  # for a group to close after its sockets were shut down
POLL_S = 0.02


class GenerationGroup:
    """torch's default process group, which each generation forms again."""

    def __init__(self, device: torch.device, timeout_s: float = 600.0, sockets: set[tuple[int, str]] | None = None) -> None:
        self.device, self.timeout_s = device, timeout_s
        self._sockets = sockets or set()  # gloo's, as (file descriptor, name in /proc/self/fd): a failure shuts them down
        self._sockets_before: set[tuple[int, str]] = set()
        self._forming_subgroups = False

    def form(self, generation: Generation, rank: int, generation_error: Callable[[], str]) -> None:
        """Collective. Form the process group of a generation. RuntimeError if that fails."""
        self._sockets_before = open_sockets()
        if why := generation_error():
            raise RuntimeError(why)
        size = len(generation.members)
        store = _connect_store(generation.store, size, generation_error)
        prefixed = PrefixStore(f"generation-{generation.number}-{generation.token}", store)
        init_default_group(prefixed, rank, size, self.device, FORM_TIMEOUT_S)  # fails soon if two members cannot connect
        set_group_timeout(timedelta(seconds=self.timeout_s), dist.group.WORLD)
        self._sockets = open_sockets() - self._sockets_before

    @contextmanager
    def track_subgroups(self) -> Iterator[None]:
        """Context manager around the forming of subgroups, to abort them like the group."""
        self._sockets_before, self._forming_subgroups = open_sockets(), True
        try:
            yield
        finally:
            self._sockets = self._sockets | (open_sockets() - self._sockets_before)  # a new set: the membership thread reads it
            self._forming_subgroups = False

    def shutdown(self, links: set[int]) -> None:
        """Abort all waits in the group and its subgroups, except on `links` of the membership.

        Called by the membership thread.
        """
        sockets = open_sockets()
        forming = sockets - self._sockets_before if not self._sockets or self._forming_subgroups else set()
        shutdown_sockets(entry for entry in sockets & self._sockets | forming if entry[0] not in links)

    def destroy(self) -> None:
        """Close the process group, with its threads, sockets and port."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort(self) -> None:
        """Close the process group after a failure; pending collectives fail at once.

        Closing a gloo group waits for them up to its timeout, unless its sockets are shut down.
        NCCL may still wait: after CLOSE_TIMEOUT_S it is left to the exit of the process.
        """
        shutdown_sockets(open_sockets() & self._sockets)
        self._sockets = set()
        self._sockets_before = open_sockets()
        closing = threading.Thread(target=self.destroy, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    def gather_json(self, size: int, value: Any) -> list[Any]:
        """Collective. Return the JSON values of all `size` ranks."""
        return gather_json(size, value)

    def all_gather(self, size: int, sent: torch.Tensor) -> torch.Tensor:
        """Collective. Return the float64 rows of all ranks, (size, n), given (n,) of this rank."""
        received = torch.empty(size * len(sent), dtype=sent.dtype)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its older name
        gather(received, sent)
        return received.view(size, -1)

    def wait(self, works: Iterable[dist.Work | None], generation_error: Callable[[], str]) -> None:
        """Wait until all works are done. PeersLostError when the generation ends first."""
        WorkWaiter(generation_error).wait(works)

    def isend(self, tensor: torch.Tensor, rank: int) -> dist.Work | None:
        return dist.isend(tensor, dst=rank)

    def irecv(self, tensor: torch.Tensor, rank: int) -> dist.Work | None:
        return dist.irecv(tensor, src=rank)


def _connect_store(address: str, size: int, generation_error: Callable[[], str]) -> TCPStore:
    """Connect to a store. RuntimeError if it does not answer or the generation is over.

    On a thread: torch's client cannot be interrupted while it retries.
    """
    host, _, port = address.rpartition(":")
    connected: Future[TCPStore] = Future()

    def connect() -> None:
        try:
            connected.set_result(TCPStore(host, int(port), size, is_master=False, timeout=timedelta(seconds=FORM_TIMEOUT_S)))
        except RuntimeError as error:
            connected.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    while True:
        try:
            return connected.result(POLL_S)
        except TimeoutError:
            if why := generation_error():
                raise RuntimeError(why) from None
