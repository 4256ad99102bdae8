"""The rank of this process among all workers, and the process group that they share.

Under an agent the workers form numbered generations: a worker can leave the group and form the next
one without a restart, so rank and size change during a run. Elsewhere (torchrun, srun, two machines
by hand) rank and size come from environment variables (runtime/environment.py), and the workers
meet at a store on rank 0 (runtime/rendezvous.py). A single process has a group, too, so that
callers need no second path.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed has them too, untyped

from lockstep.elastic.fault_injection import DRILL_VARIABLE, FaultInjectingBoard
from lockstep.elastic.generation_log import Generation, GenerationLog, RunResult
from lockstep.elastic.membership import Membership, OthersStarted, RunEnded
from lockstep.elastic.protocol.decisions import ElasticLimits, LeaveReport
from lockstep.errors import FencedError, PeersLostError, UsageError
from lockstep.record.events import append_event
from lockstep.record.goodput import Ledger
from lockstep.runtime import numerics, sources
from lockstep.runtime.device import select_device
from lockstep.runtime.environment import RankInfo, read_rank_info
from lockstep.runtime.exit_report import error_summary, is_out_of_memory, is_peer_loss
from lockstep.runtime.interfaces import choose_interface, interface_with_address
from lockstep.runtime.numerics import seed_unseeded_generators
from lockstep.runtime.process_group import FORM_TIMEOUT_S, gather_json, init_default_group
from lockstep.runtime.rendezvous import init_static_group, rendezvous
from lockstep.runtime.signals import Stopped
from lockstep.runtime.sockets import open_sockets, shutdown_sockets
from lockstep.runtime.status_board import StatusBoard
from lockstep.runtime.worker_env import ONE_SCREEN, WorkerEnv, is_loopback_reachable, read_worker_env

log = logging.getLogger("lockstep")
T = TypeVar("T")
CLOSE_TIMEOUT_S = 5.0  # for a group to close after its sockets were shut down
POLL_S = 0.02
MAX_FAILED_GENERATIONS = 50  # in a row


@dataclass
class World:
    """This process among all workers. Under an agent, rank and size change with the generation.

    rank, size              among all workers of the run
    local_rank, local_size  among the workers of this host
    host                    name of this host
    device                  where this worker computes
    sockets                 gloo's, as (file descriptor, name in /proc/self/fd), so that a failure
                            can shut them down
    membership              this worker's side of the membership protocol; None: a static group
    generation              number of the generation that this worker is in
    is_joining              others are training, and this worker has not received the training state
                            yet; it has no process group
    first_generation        all workers started together, so all take part in preparing the run
    members                 worker ids, by rank
    standing, standings     this worker's progress, sent to all when a generation forms; and that of
                            each rank, as of then
    exit_code               of the run, if this worker leaves without an error
    board, ledger           this worker's current activity; how the run's time was spent
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    device: torch.device
    sockets: tuple[tuple[int, str], ...] = field(default=(), repr=False, compare=False)
    membership: Membership | None = field(default=None, repr=False, compare=False)
    generation: int = 0
    is_joining: bool = False
    first_generation: bool = True
    timeout_s: float = 600.0
    members: tuple[str, ...] = ()
    standing: dict[str, Any] = field(default_factory=lambda: {"at": "join", "step": -1})
    standings: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int = 0
    board: StatusBoard = field(default_factory=lambda: StatusBoard(None), repr=False, compare=False)
    ledger: Ledger = field(default_factory=lambda: Ledger(time.monotonic()), repr=False, compare=False)
    _sockets_before: set[tuple[int, str]] = field(default_factory=set, repr=False, compare=False)
    _forming: bool = field(default=False, repr=False, compare=False)
    _owners: dict[str, weakref.ref[object]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def leader(self) -> bool:
        """Whether this is rank 0, which alone writes files that exist once per run."""
        return self.rank == 0

    def is_leader_now(self) -> bool:
        """Return `leader`; for callers that must follow a change of generation."""
        return self.leader

    @property
    def local_leader(self) -> bool:
        """Whether this is the first worker of its host."""
        return self.local_rank == 0

    def shows_progress(self) -> bool:
        """Return whether this is the first worker of its host, or of all on one terminal."""
        if os.environ.get(ONE_SCREEN) != "1" or not self.members:
            return self.local_leader
        first_of_hosts = [rank for rank, id in enumerate(self.members) if id.split("/")[1] == "0"]
        return first_of_hosts[:1] == [self.rank]

    @property
    def slot_or_rank(self) -> int:
        """The number of this process in logs: its slot under an agent, else its rank."""
        return self.membership.worker_env.slot if self.membership else self.rank

    @classmethod
    def join(cls, threads: int = 1, timeout_s: float = 600.0, limits: ElasticLimits | None = None) -> World:
        """Collective. Join the workers of the run: `with World.join() as world:`.

        threads    of torch in this process; their number changes bits, so it belongs to the run
        timeout_s  after which a missing or silent peer counts as lost, now and in every collective
        limits     under an agent: how soon a silent peer or a hang is acted on

        Seeds the generators of torch, NumPy and Python with 0, unless the user has seeded them.
        Errors: UsageError (contradictory environment, busy port), PeersLostError (missing workers).
        """
        torch.set_num_threads(threads)
        seed_unseeded_generators()
        if worker_env := read_worker_env(os.environ):
            return cls.join_under_agent(worker_env, timeout_s, limits or ElasticLimits())
        info, source = read_rank_info(os.environ)
        device, reason = select_device(info)
        info = info or RankInfo(0, 1, 0, 1, "", 0, "nobody")
        store = rendezvous(info, timeout_s, source)
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
        sockets = tuple(sorted(open_sockets() - before))
        return cls(info.rank, info.size, info.local_rank, info.local_size, socket.gethostname(), device, sockets)

    def register(self, owner: object) -> None:
        """Register a ReplicaGroup or Checkpointer. UsageError if another one is open."""
        kind = type(owner).__name__
        if (registered := self._owners.get(kind)) and registered() is not None:
            raise UsageError(
                f"a second {kind} on one World",
                f"{kind}(...) while the first one is open",
                "use one ReplicaGroup and one Checkpointer for an nn.ModuleDict of all trained modules, or close the first one (`with`)",
            )
        self._owners[kind] = weakref.ref(owner)

    def unregister(self, owner: object) -> None:
        """Unregister a ReplicaGroup or Checkpointer that was closed."""
        self._owners.pop(type(owner).__name__, None)

    # -- under an agent -------------------------------------------------------------------------------------------------

    @classmethod
    def join_under_agent(cls, worker_env: WorkerEnv, timeout_s: float, limits: ElasticLimits) -> World:
        """Collective. Return the world of a worker that an agent started.

        It is a member of the first generation. Or it `is_joining`, if a generation is training
        already or the first one formed without this worker: then `join_running` follows when this
        worker has built its model, so that the others need not wait.
        """
        device, reason = select_device(RankInfo(worker_env.slot, worker_env.slots, worker_env.slot, worker_env.slots, "", 0, "lockstep"))
        os.environ["GLOO_SOCKET_IFNAME"] = interface_with_address(worker_env.address)
        world = cls(-1, 0, worker_env.slot, worker_env.slots, worker_env.host, device, timeout_s=timeout_s)
        limits = replace(
            limits, expected_workers=worker_env.expected_workers, min_workers=worker_env.min_workers, max_workers=worker_env.max_workers
        )
        path = Path(worker_env.state) / f"{worker_env.slot}.board"
        inject = os.environ.get(DRILL_VARIABLE) == "1"
        world.board = FaultInjectingBoard(path, path.with_suffix(".fault")) if inject else StatusBoard(path)
        world.board.track_compilation()
        world.membership = Membership(worker_env, limits, world.shutdown_group)
        if worker_env.slot == 0:
            log.info("%s, %d of %d workers on %s: %s", device, worker_env.slots, worker_env.expected_workers, worker_env.host, reason)
        try:
            world.is_joining = is_run_active(Path(worker_env.folder), worker_env)
            if not world.is_joining:
                world.join_first_generation()
        except BaseException:
            world.membership.close()
            raise
        return world

    def join_first_generation(self) -> None:
        """Collective. Join the first generation, before any worker has built its model.

        If it formed without this worker and is training, this worker `is_joining`.
        """
        assert self.membership is not None
        self.membership.request_join({}, is_joining=False)
        try:
            self.form_next()
        except OthersStarted:
            self.is_joining = True

    def join_running(self, facts: Mapping[str, str]) -> None:
        """Collective. Join workers that are training and have the same fingerprint."""
        assert self.membership is not None
        self.membership.request_join(self.fingerprint(facts), is_joining=True)
        self.form_next()

    def set_fingerprint(self, facts: Mapping[str, str]) -> None:
        """Set what must be equal on all workers; a joiner with another fingerprint is refused."""
        if self.membership:
            self.membership.set_fingerprint(self.fingerprint(facts))

    def fingerprint(self, facts: Mapping[str, str]) -> dict[str, str]:
        """Return what must be equal on all workers: numerics, code, flags and `facts`."""
        return {**numerics.fingerprint(self.device), **sources.fingerprint(), **self.flags, **facts}

    @property
    def flags(self) -> dict[str, str]:
        """Arguments of the user's own function, as given to the agent."""
        return {f"--{name}": text for name, text in self.membership.worker_env.flags.items()} if self.membership else {}

    def form_next(self) -> None:
        """Collective. Form this worker's next generation, and gather its members' progress.

        A generation that breaks while it forms is abandoned for the next one. FencedError if the
        state of this worker's last generation was marked as untrusted.
        """
        assert self.membership is not None
        last = self.generation
        for _ in range(MAX_FAILED_GENERATIONS):
            record = self.membership.next_generation(after=self.generation)
            if why := self.membership.generation_log.untrusted_reason(last):
                raise FencedError(why, "found by members of that generation", "this worker restarts")
            self.generation = record.number
            try:
                self._form(record)
                spent = self.ledger.to_json(time.monotonic(), time.time())
                self.standings = gather_json(self.size, self.standing | {"fresh": self.first_generation, "time": spent})
                break
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                why = error_summary(error)
                error.__traceback__ = None  # it references the group
            self.leave_group(why)
        else:
            raise PeersLostError(
                f"{MAX_FAILED_GENERATIONS} generations in a row failed to form: {why}", f"{self.host}, {self.membership.me.address}"
            )
        steps = [int(standing["step"]) for standing in self.standings]
        self.is_joining = self.standing["step"] < 0 <= max(steps)
        if self.is_joining:  # a later leader must count the time of the run, not its own
            spent = self.standings[steps.index(max(steps))]["time"]
            self.ledger = Ledger.from_json(spent, time.monotonic(), self.ledger.category)
        # Equal on all ranks: collectives depend on it.
        self.first_generation = all(standing["fresh"] for standing in self.standings) and max(steps) < 0
        stages = sorted({str(standing["at"]) for standing in self.standings})
        if max(steps) < 0 and len(stages) > 1:
            raise FencedError(f"workers are at different stages of the start: {', '.join(stages)}", self.members[self.rank], "they restart")

    def leave_group(self, why: str, *, leaving: bool = False) -> None:
        """Leave this generation's process group, intact or broken, and report the progress."""
        assert self.membership is not None
        log.debug("leaving generation %d: %s", self.generation, why)
        self.membership.begin_leaving()
        self.abort_group()
        self.membership.report_left(LeaveReport(self.generation, int(self.standing["step"]), leaving, why))

    def is_peer_loss(self, error: BaseException) -> bool:
        """Return whether `error` requires the next generation. Out-of-memory would recur there."""
        if self.membership is None or isinstance(error, FencedError):
            return False
        if not isinstance(error, RuntimeError) or is_out_of_memory(error):
            return isinstance(error, PeersLostError)
        return is_peer_loss(error) or bool(self.generation_error())

    def retry_across_generations(self, function: Callable[[], T]) -> T:
        """Collective. Return `function()`; if a member is lost, retry in the next generation.

        For collective work outside of steps. No worker joins from now on.
        """
        if self.membership:
            self.membership.stop_admitting()
        while True:
            try:
                return function()
            except Exception as error:
                if not self.is_peer_loss(error):
                    raise
                why = error_summary(error)
                error.__traceback__ = None  # it references the group
            self.leave_group(why)
            self.form_next()

    @contextmanager
    def during(self, phase: Literal["saving", "evaluating"]) -> Iterator[None]:
        """Context manager that shows `phase` on the board and in the ledger."""
        before = self.ledger.switch(phase, time.monotonic())
        try:
            with self.board.during(phase):
                yield
        finally:
            self.ledger.switch(before, time.monotonic())

    def evict(self, rank: int, why: str) -> None:
        """Exclude a member from the next generation on."""
        assert self.membership is not None
        self.membership.evict(self.members[rank], why)

    def mark_untrusted(self, why: str, facts: dict[str, Any]) -> None:
        """Mark this generation's state as untrusted.

        Every member restarts from a checkpoint, including members that have not noticed yet.
        """
        if self.membership:
            try:
                self.membership.generation_log.mark_untrusted(self.generation, why, facts)
            except OSError as error:
                log.error("cannot mark the state of generation %d as untrusted: %s", self.generation, error)

    def generation_error(self) -> str:
        """Return why this generation is over; "" while it is intact, and always for a static group."""
        return self.membership.generation_error(self.generation) if self.membership else ""

    def _form(self, record: Generation) -> None:
        """Collective. Form the process group of a generation. RuntimeError if that fails."""
        rank = record.rank_of(self.membership.me.id) if self.membership else None
        assert rank is not None
        self.board.enter("joining", generation=record.number)
        self.rank, self.size = rank, len(record.members)
        self.members = tuple(member.id for member in record.members)
        local_slots = sorted(member.slot for member in record.members if member.host == self.host)
        self.local_rank, self.local_size = local_slots.index(record.members[rank].slot), len(local_slots)
        self._sockets_before = open_sockets()
        if why := self.generation_error():
            raise RuntimeError(why)
        store = self._connect_store(record.store)
        prefixed = PrefixStore(f"generation-{record.number}-{record.token}", store)
        init_default_group(prefixed, self.rank, self.size, self.device, FORM_TIMEOUT_S)  # fails soon if two members cannot connect
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_s), dist.group.WORLD)
        self.sockets = tuple(sorted(open_sockets() - self._sockets_before))
        log.info("generation %d: rank %d of %d (%s)", record.number, self.rank, self.size, record.reason)

    def _connect_store(self, address: str) -> TCPStore:
        """Connect to a store. RuntimeError if it does not answer or the generation is over.

        On a thread: if nothing listens there, torch's client retries for its whole timeout and
        cannot be interrupted.
        """
        host, _, port = address.rpartition(":")
        connected: Future[TCPStore] = Future()

        def connect() -> None:
            try:
                connected.set_result(TCPStore(host, int(port), self.size, is_master=False, timeout=timedelta(seconds=FORM_TIMEOUT_S)))
            except RuntimeError as error:
                connected.set_exception(error)

        threading.Thread(target=connect, daemon=True).start()
        while True:
            try:
                return connected.result(POLL_S)
            except TimeoutError:
                if why := self.generation_error():
                    raise RuntimeError(why) from None

    def shutdown_group(self) -> None:
        """Abort all waits in this generation's groups. Called by the membership thread."""
        links = self.membership.sockets() if self.membership else set()
        now = open_sockets()
        forming = now - self._sockets_before if not self.sockets or self._forming else set()
        shutdown_sockets(one for one in now & set(self.sockets) | forming if one[0] not in links)

    @contextmanager
    def track_subgroups(self) -> Iterator[None]:
        """Context manager around the forming of subgroups, to abort them like the group."""
        self._sockets_before, self._forming = open_sockets(), True
        try:
            yield
        finally:
            self.sockets = tuple(sorted({*self.sockets, *(open_sockets() - self._sockets_before)}))
            self._forming = False

    # -- leaving ----------------------------------------------------------------------------------------------------------

    def destroy_group(self) -> None:
        """Close the process group, with its threads, sockets and port."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort_group(self) -> None:
        """Close the process group after a failure; pending collectives fail at once.

        Closing a gloo group waits for its pending collectives, up to its timeout; shutting down its
        sockets ends them in milliseconds. NCCL may still wait: after a few seconds it is left to
        the exit of the process.
        """
        shutdown_sockets(open_sockets() & set(self.sockets))
        self.sockets = ()
        self._sockets_before = open_sockets()
        closing = threading.Thread(target=self.destroy_group, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave. A torch error caused by a lost peer becomes a PeersLostError."""
        try:
            if error is None or isinstance(error, Stopped):
                if self.membership:
                    self.report_goodput(self.membership.folder)
                    self._end_run(self.membership, RunResult(self.exit_code if error is None else int(str(error))))
                self.destroy_group()
                return
            with suppress(RuntimeError):  # no memory for a thread: the exit of the process closes the group
                self.abort_group()
        finally:
            if self.membership:
                self.membership.close()
        if not isinstance(error, PeersLostError) and is_peer_loss(error):
            raise PeersLostError(
                f"rank {self.rank} lost its peers: {error_summary(error)}",
                f"{self.host}, pid {os.getpid()}",
                "another worker failed first, see its log; the same command resumes from the newest checkpoint",
            ) from error

    def report_goodput(self, folder: Path) -> None:
        """Log how the time of the run in `folder` was spent, and write it to its events."""
        if self.leader:
            append_event(folder, "goodput", **self.ledger.summary(time.monotonic()))
        log.log(logging.INFO if self.shows_progress() else logging.DEBUG, self.ledger.describe(time.monotonic()))

    def _end_run(self, membership: Membership, end: RunResult) -> None:
        """Collective. Barrier; then rank 0 records the end of the run and all ranks exit."""

        def record_end() -> None:
            gather_json(self.size, "done")
            if self.leader:
                membership.publish_result(end)
            else:
                membership.wait_for_result(self.generation)

        with suppress(RunEnded):
            self.retry_across_generations(record_end)


# Under an agent.


def is_run_active(folder: Path, worker_env: WorkerEnv) -> bool:
    """Return whether a generation is training.

    UsageError if this single-host start is not its host.
    """
    newest = GenerationLog(folder / "generations", since=worker_env.known_generation).newest()
    if newest is None or newest.end:
        return False
    alive = [member for member in newest.members if is_loopback_reachable(member.loopback) and is_listening(member.address)]
    foreign = [member for member in alive if member.host != worker_env.host]
    if worker_env.agent_pid and foreign:
        raise UsageError(
            f"another training is already running in {folder}",
            f"generation {newest.number} on {', '.join(sorted({member.host for member in foreign}))}",
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
