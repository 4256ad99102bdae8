"""Several ranks in one process, each a thread, with fakes for the network and the membership.

FakeCluster forms generations, delivers messages and loses workers on request. GenerationGroup,
Membership and Replica are fakes; ElasticRuntime, ReplicaGroup and Checkpointer are real.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import starmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lockstep.elastic.generation_log import Generation, GenerationLog, Member, RunResult
from lockstep.elastic.membership import Membership, RunEnded
from lockstep.elastic.protocol.decisions import LeaveReport
from lockstep.elastic.runtime import ElasticRuntime
from lockstep.elastic.world import World
from lockstep.errors import FencedError, PeersLostError
from lockstep.layout import Layout
from lockstep.network.subtrees import equal_shares, leaves_of_rank
from lockstep.parallel.digest import Digest, start_digest
from lockstep.parallel.groups import ProcessGroups
from lockstep.parallel.replica import PassResult, StepResults
from lockstep.runtime.process_group import reduce_rounds

log = logging.getLogger("lockstep")
CPU = torch.device("cpu")
LIMIT_S = 20.0  # a test that waits longer is stuck
LOST = "Connection closed by peer"


class WorkerKilled(BaseException):
    """Ends the thread of a worker that a test kills."""


class FakeCluster:
    """The workers "h/0/x", "h/1/x", ... of one run, in generations of the living workers.

    garbage  the end of a generation ends works as an aborted kernel of NCCL ends: as if they had
             succeeded, with any numbers; and messages still arrive
    """

    def __init__(self, folder: Path, size: int, *, garbage: bool = False) -> None:
        self.folder, self.ended = folder, None
        self.garbage = garbage
        (folder / "generations").mkdir(parents=True, exist_ok=True)
        self.log = GenerationLog(folder / "generations")
        self.turn = threading.Condition()
        self.gone: dict[str, str] = {}  # id -> why it is not a member any longer
        self.left: dict[str, str] = {}  # members that left the newest generation, and why
        self.joiners: list[str] = []
        self.messages: dict[Any, Any] = {}
        self.reduced: Counter[tuple[int, int]] = (
            Counter()
        )  # ranks with the result, by generation and number of the collective
        self.newest: Generation | None = None
        self.starting = [f"h/{slot}/x" for slot in range(size)]

    def member(self, id: str) -> Member:
        slot = int(id.split("/")[1])
        return Member(id, "h", slot, 100 + slot, f"10.0.0.1:{1000 + slot}")

    def runtime(self, slot: int) -> ElasticRuntime:
        """Return the runtime of a worker, in no generation yet."""
        id = f"h/{slot}/x"
        return ElasticRuntime(
            World(-1, 0, slot, 4, "h", CPU),
            FakeGroup(self, id),
            membership=cast(Any, FakeMembership(self, id)),
        )

    def remove(self, id: str, why: str) -> None:
        with self.turn:
            self.gone[id] = why
            self.turn.notify_all()

    def wait(self, ready: Callable[[], Any]) -> Any:
        """Return the first true value of `ready`, with the lock held."""
        if not self.turn.wait_for(ready, LIMIT_S):
            raise AssertionError("the fake cluster is stuck")
        return ready()

    def error(self, number: int) -> str:
        """Return why generation `number` is over; "" while it lives."""
        newest = self.newest
        if newest is None or newest.number > number:
            return "a newer generation exists" if newest else ""
        return next(
            (f"{m.id} is gone" for m in newest.members if m.id in self.gone or m.id in self.left),
            "",
        )

    def form_if_ready(self) -> None:
        """Form the next generation once all remaining members have left the last one."""
        members = [m.id for m in self.newest.members] if self.newest else self.starting
        remaining = [id for id in members if id not in self.gone]
        ready = (
            all(id in self.left for id in remaining)
            if self.newest
            else set(remaining) <= set(self.joiners)
        )
        if not ready or (self.newest and self.newest.members and not self.left and not self.gone):
            return
        waiting = [id for id in self.joiners if id not in remaining and id not in self.gone]
        joiners = waiting if self.newest else []
        number = self.newest.number + 1 if self.newest else 1
        self.newest = Generation(
            number,
            f"token {number}",
            tuple(self.member(id) for id in [*remaining, *joiners]),
            "",
            0,
            next(iter(self.left.values()), "start"),
        )
        self.left, self.joiners = {}, [id for id in waiting if id not in joiners]
        self.turn.notify_all()


class FakeMembership(Membership):
    """The main thread's side of Membership."""

    stop_signal = ""

    def __init__(self, cluster: FakeCluster, id: str) -> None:
        self.cluster, self.me, self.folder = cluster, cluster.member(id), cluster.folder
        self.generation_log = cluster.log
        self.worker_env = SimpleNamespace(
            slot=self.me.slot, run_folder_id="", folder=str(cluster.folder)
        )
        self.slot = self.me.slot
        self.flags = {}
        self.drains = self.has_own_folder = False

    @property
    def joiner_count(self) -> int:
        return len(self.cluster.joiners)

    def request_join(self, fingerprint: dict[str, str], *, is_joining: bool) -> None:
        with self.cluster.turn:
            self.cluster.joiners.append(self.me.id)
            if not is_joining:
                self.cluster.form_if_ready()
            self.cluster.turn.notify_all()

    def next_generation(self, after: int, stop_signal: object = None) -> Generation:
        cluster = self.cluster

        def formed() -> Generation | None:
            if self.me.id in cluster.gone:
                raise FencedError(cluster.gone[self.me.id])
            if after or cluster.newest is None:
                cluster.form_if_ready()
            newest = cluster.newest
            return (
                newest
                if newest and newest.number > after and newest.rank_of(self.me.id) is not None
                else None
            )

        with cluster.turn:
            return cluster.wait(formed)

    def start_leaving(self) -> None: ...

    def report_left(self, report: LeaveReport) -> None:
        with self.cluster.turn:
            self.cluster.left[self.me.id] = report.why
            if report.leaving:
                self.cluster.gone[self.me.id] = report.why
            self.cluster.turn.notify_all()

    def generation_error(self, number: int) -> str:
        return self.cluster.error(number)

    def evict(self, id: str, why: str) -> None:
        self.cluster.remove(id, why)

    def publish_result(self, result: RunResult) -> None:
        with self.cluster.turn:
            self.cluster.ended = result
            self.cluster.turn.notify_all()

    def wait_for_result(self, number: int) -> None:
        with self.cluster.turn:
            self.cluster.wait(lambda: self.cluster.ended or self.cluster.error(number))
        if not self.cluster.ended:
            raise PeersLostError(self.cluster.error(number))

    def set_fingerprint(self, fingerprint: dict[str, str]) -> None: ...

    def stop_admitting(self) -> None: ...

    def close(self) -> None: ...


class FakeGroup:
    """A process group whose collectives go through the cluster.

    lose_results  number of votes whose result this rank misses, after the others have it
    """

    def __init__(self, cluster: FakeCluster, id: str) -> None:
        self.cluster, self.id = cluster, id
        self.number = self.rank = self.count = 0
        self.lose_results = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    def form(self, generation: Generation, rank: int, generation_error: Callable[[], str]) -> None:
        if why := generation_error():
            raise RuntimeError(why)
        self.number, self.rank, self.count = generation.number, rank, 0
        self.sent, self.received = {}, {}

    @property
    def is_aborted(self) -> bool:
        return bool(self.cluster.error(self.number))

    def exchange_gradients(self, size: int, gradients: list[list[Tensor]]) -> list[list[Tensor]]:
        try:
            rows = [row for rows in self.exchange(size, gradients) for row in rows]
        except RuntimeError:
            if not self.cluster.garbage:
                raise
        if self.cluster.garbage and self.is_aborted:
            return [[torch.full_like(gradient, 1e6) for gradient in row] for row in gradients]
        return rows

    def exchange(self, size: int, value: Any) -> list[Any]:
        cluster, self.count = self.cluster, self.count + 1
        slots = [(self.number, self.count, rank) for rank in range(size)]
        with cluster.turn:
            cluster.messages[slots[self.rank]] = value
            cluster.turn.notify_all()
            cluster.wait(
                lambda: (
                    all(slot in cluster.messages for slot in slots) or cluster.error(self.number)
                )
            )
            if not all(slot in cluster.messages for slot in slots):
                raise RuntimeError(LOST)
            return [cluster.messages[slot] for slot in slots]

    def gather_json(self, size: int, value: Any) -> list[Any]:
        return (
            [value]
            if size == 1
            else [json.loads(text) for text in self.exchange(size, json.dumps(value))]
        )

    def all_reduce(
        self, row: Tensor, rank: int, size: int, combine: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Combine the rows of all ranks, with the rounds of the real group."""
        self.count += 1
        for sent, received in reduce_rounds(row, rank, size, combine):
            self.wait([*starmap(self.isend, sent), *starmap(self.irecv, received)])
        if self.lose_results:
            self.lose_results -= 1
            with self.cluster.turn:
                self.cluster.wait(lambda: self.cluster.reduced[self.number, self.count] == size - 1)
            raise RuntimeError(LOST)
        with self.cluster.turn:
            self.cluster.reduced[self.number, self.count] += 1
            self.cluster.turn.notify_all()

    def isend(self, tensor: Tensor, rank: int) -> FakeWork:
        self.sent[rank] = number = self.sent.get(rank, 0) + 1
        with self.cluster.turn:
            self.cluster.messages[self.number, "to", self.rank, rank, number] = tensor.clone()
            self.cluster.turn.notify_all()
        return FakeWork(lambda: None)

    def irecv(self, tensor: Tensor, rank: int) -> FakeWork:
        self.received[rank] = number = self.received.get(rank, 0) + 1
        key = (self.number, "to", rank, self.rank, number)

        def receive() -> None:
            with self.cluster.turn:
                self.cluster.wait(
                    lambda: (
                        key in self.cluster.messages
                        or (self.cluster.error(key[0]) and not self.cluster.garbage)
                    )
                )
                if key not in self.cluster.messages:
                    raise RuntimeError(LOST)
                tensor.copy_(self.cluster.messages[key])

        return FakeWork(receive)

    def wait(self, works: list[FakeWork]) -> None:
        for work in works:
            work.wait()

    def abort(self, *, intact: bool = False) -> None: ...

    def destroy(self) -> None: ...

    def shutdown(self, links: set[int]) -> None: ...

    def track_subgroups(self) -> AbstractContextManager[None]:
        return nullcontext()


class FakeWork:
    """A send or receive in flight."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish


class FakeReplica:
    """A whole replica; gradients are added in the order of the micro-batches, through the group."""

    current = threading.local()  # .runtime: of the worker that runs in this thread

    def __init__(
        self, model: nn.Module, *, micro_batches: int, seed: int = 0, **options: Any
    ) -> None:
        self.module, self.leaves, self.seed = model, micro_batches, seed
        self.statistics = options["statistics"]
        self.groups = ProcessGroups(Layout())
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.workers_per_replica, self.hashed, self.counts = 1, PassResult(), True
        self.generation_error = options["connection"].generation_error
        self.runtime: ElasticRuntime = self.current.runtime

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def micro_batches(
        self, step: int, meanwhile: Callable[[], None], shares: tuple[int, ...]
    ) -> Iterator[int]:
        world = self.runtime.world
        self.own_leaves = leaves_of_rank(
            world.rank, shares or equal_shares(world.size, self.leaves)
        )
        self._losses: dict[int, float] = {}
        gradients = []
        for k in self.own_leaves:
            if why := self.generation_error():
                raise PeersLostError(why)
            self.module.zero_grad()
            self._leaf = k
            yield k
            gradients.append([p.grad.clone() for p in self.parameters if p.grad is not None])
        meanwhile()
        rows = self.runtime.group.exchange_gradients(world.size, gradients)
        for parameter, *grads in zip(self.parameters, *rows, strict=True):
            parameter.grad = torch.stack(grads).double().sum(0).to(parameter.dtype)

    def backward(self, loss: Tensor, scaler: None = None) -> None:
        loss.backward()
        self._losses[self._leaf] = float(loss.detach())

    def losses(self) -> dict[int, float]:
        return self._losses

    def results(self, squared: None, digests: Sequence[Digest]) -> StepResults:
        return StepResults(self._losses, True, [digest.read() for digest in digests])

    def measured_s(self) -> None: ...

    def digest(self) -> Digest:
        return start_digest(self.parameters)

    def grad_norm_squared(self) -> None: ...

    def release_groups(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def run_workers(
    cluster: FakeCluster, work: Callable[[int], Any], slots: list[int]
) -> dict[int, Any]:
    """Run work(slot) in one thread per slot; return the results, or the exceptions, by slot."""
    results: dict[int, Any] = {}

    def run(slot: int) -> None:
        try:
            results[slot] = work(slot)
        except BaseException as error:
            log.debug("worker %d ended", slot, exc_info=True)
            results[slot] = error
            if not isinstance(error, RunEnded):
                cluster.remove(f"h/{slot}/x", f"worker {slot} ended: {error!r}")

    threads = [threading.Thread(target=run, args=(slot,), daemon=True) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive(), "a worker is stuck"
    return results
