"""Join a run, leave it, and form the process group of each generation.

Under an agent the workers form numbered generations: a worker leaves the group and forms the next
one without a restart, so rank and size change during a run. Elsewhere (torchrun, srun) they come
from environment variables, and the group is static. A single process has a group, too.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from lockstep.elastic.fault_injection import DRILL_VARIABLE, FaultInjectingBoard
from lockstep.elastic.generation_group import GenerationGroup, UpdateExchanges
from lockstep.elastic.generation_log import Generation, RunResult, open_generation_log
from lockstep.elastic.membership import (
    Membership,
    OthersStarted,
    RunEnded,
    StaticMembership,
)
from lockstep.elastic.protocol.decisions import FIXED, ElasticLimits, LeaveReport
from lockstep.elastic.rendezvous import join_static_group
from lockstep.elastic.world import Progress, WorkerState, World
from lockstep.errors import FencedError, PeersLostError, UsageError
from lockstep.log import log
from lockstep.runtime import numerics, sources
from lockstep.runtime.device import select_device
from lockstep.runtime.environment import RankInfo
from lockstep.runtime.exit_report import error_summary, is_out_of_memory, is_peer_loss
from lockstep.runtime.numerics import seed_unseeded_generators
from lockstep.runtime.session_start import ask_for_start
from lockstep.runtime.signals import Stopped
from lockstep.runtime.sockets import interface_with_address
from lockstep.runtime.status_board import StatusBoard
from lockstep.runtime.worker_env import WorkerEnv, is_loopback_reachable, read_worker_env

T = TypeVar("T")
MAX_FAILED_GENERATIONS = 50  # in a row


@dataclass
class PeerLoss:
    """The reason why a peer is lost; "" if none is."""

    why: str = ""


class ElasticRuntime(WorkerState, AbstractContextManager["ElasticRuntime"]):
    """This process as a worker of the run: `with ElasticRuntime.join() as runtime:`.

    membership    this worker's side of the membership protocol
    group         the process group
    updates       exchanges of updates that an abort of the group waits for
    is_fixed      the workers of `evaluate` or `generate`, which train nothing
    replica_size  workers of a replica, which leave together
    """

    def __init__(
        self,
        world: World,
        group: GenerationGroup | None = None,
        *,
        board: StatusBoard | None = None,
        membership: Membership | None = None,
        is_fixed: bool = False,
        replica_size: int = 1,
    ) -> None:
        super().__init__(world, board or StatusBoard(None))
        self.membership = membership or StaticMembership(world.rank)
        self.group = group or GenerationGroup(world.device)
        self.updates = UpdateExchanges(self.group)
        self.is_fixed = is_fixed
        self.replica_size = replica_size
        self._stop_signal: Callable[[], str] = str

    @classmethod
    def join(
        cls, threads: int = 1, timeout_s: float = 600.0, limits: ElasticLimits | None = None
    ) -> ElasticRuntime:
        """Collective. Join the workers of the run: `with ElasticRuntime.join() as runtime:`.

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
        ask_for_start()
        world, group = join_static_group(threads, timeout_s)
        runtime = cls(world, group)
        if limits is not FIXED:
            runtime.track_compilation()
        return runtime

    @classmethod
    def join_under_agent(
        cls, env: WorkerEnv, timeout_s: float, limits: ElasticLimits
    ) -> ElasticRuntime:
        """Collective. Join under an agent. A joiner calls `join_running` once it has a model."""
        is_fixed = limits is FIXED
        os.environ["GLOO_SOCKET_IFNAME"] = interface_with_address(env.address)
        device, reason = select_device(
            RankInfo(env.slot, env.slots, env.slot, env.slots, "", 0, "lockstep")
        )
        limits = replace(
            limits,
            expected_workers=env.expected_workers,
            min_workers=max(env.min_workers, limits.replica_size),
            max_workers=env.max_workers,
        )
        group = GenerationGroup(device, timeout_s)
        membership = Membership(env, limits, group.shutdown)
        runtime = cls(
            World(-1, 0, env.slot, env.slots, env.host, device),
            group,
            board=make_board(env),
            membership=membership,
            is_fixed=is_fixed,
            replica_size=limits.replica_size,
        )
        if not is_fixed:
            runtime.track_compilation()
        if env.slot == 0:
            log.info(
                "%s, %d of %d workers on %s: %s",
                device,
                env.slots,
                env.expected_workers,
                env.host,
                reason,
            )
        try:
            runtime.is_joining = is_run_active(env)
            if not runtime.is_joining:
                runtime.join_first_generation()
        except BaseException:
            membership.close()
            raise
        return runtime

    def join_first_generation(self) -> None:
        """Collective. Join the first generation, or become `is_joining` if it formed already."""
        self.member.request_join({}, is_joining=False)
        try:
            self.form_next()
        except OthersStarted:
            self.is_joining = True

    def join_running(self, facts: Mapping[str, str]) -> None:
        """Collective. Join workers that are training and have the same fingerprint."""
        self.member.request_join(self.fingerprint(facts), is_joining=True)
        self.form_next()

    @property
    def is_static(self) -> bool:
        """Whether no agent runs the workers, and they form one process group for good."""
        return isinstance(self.membership, StaticMembership)

    @property
    def member(self) -> Membership:
        """The membership under an agent."""
        assert not isinstance(self.membership, StaticMembership)
        return self.membership

    def set_stop_signal(self, stop_signal: Callable[[], str]) -> None:
        """Set the function that returns the stop signal this worker received; "": none."""
        self._stop_signal = stop_signal

    def set_fingerprint(self, facts: Mapping[str, str]) -> None:
        """Set what must be equal on all workers; a joiner with another fingerprint is refused."""
        self.membership.set_fingerprint(self.fingerprint(facts))

    def fingerprint(self, facts: Mapping[str, str]) -> dict[str, str]:
        """Return what must be equal on all workers: numerics, code, flags and `facts`."""
        return {
            **numerics.fingerprint(self.world.device),
            **sources.fingerprint(),
            **self.membership.flags,
            **facts,
        }

    def generation_error(self) -> str:
        """Return why this generation is over; "" while it is intact, or for a static group."""
        return self.membership.generation_error(self.world.generation)

    def hold_abort(self, seconds: float) -> None:
        """Where updates are exchanged: let an abort wait for them, `seconds` at most.
        PeersLostError after an abort."""
        if not self.updates.hold(seconds):
            raise PeersLostError(self.generation_error(), self.world.members[self.world.rank])

    def is_peer_loss(self, error: BaseException) -> bool:
        """Return whether `error` requires the next generation. Out-of-memory would recur there."""
        if self.is_static or isinstance(error, FencedError):
            return False
        if not isinstance(error, RuntimeError) or is_out_of_memory(error):
            return isinstance(error, PeersLostError)
        return is_peer_loss(error) or bool(self.generation_error())

    @contextmanager
    def catch_peer_loss(self) -> Iterator[PeerLoss]:
        """Context manager that catches the loss of a peer and keeps its reason."""
        loss = PeerLoss()
        try:
            yield loss
        except Exception as error:
            if not self.is_peer_loss(error):
                raise
            loss.why = error_summary(error) or type(error).__name__
            error.__traceback__ = None  # it references the group

    def retry_across_generations(
        self, function: Callable[[], T], why: str = "", *, leaving: bool = False
    ) -> T:
        """Collective. Return `function()`; if a member is lost, retry in the next generation.

        why      leave the current generation first, for this reason
        leaving  take no part in the next generation: FencedError
        """
        while True:
            if why:
                self.leave_group(why, leaving=leaving)
                self.form_next()
            with self.catch_peer_loss() as loss:
                return function()
            why = loss.why

    def form_next(self) -> None:
        """Collective. Form this worker's next generation, and gather its members' progress.

        A generation that breaks while it forms is skipped. FencedError if the state of this
        worker's last generation was marked as untrusted.
        """
        member = self.member
        last = self.world.generation
        for _ in range(MAX_FAILED_GENERATIONS):
            record = member.next_generation(self.world.generation, self._stop_signal)
            if why := member.generation_log.untrusted_reason(last):
                raise FencedError(
                    why, "found by members of that generation", "this worker restarts"
                )
            try:
                self._form(record)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                why = error_summary(error)
                error.__traceback__ = None  # it references the group
            else:
                return self.take_progress()
            self.leave_group(why)
        raise PeersLostError(
            f"{MAX_FAILED_GENERATIONS} generations in a row failed to form: {why}",
            f"{self.world.host}, {member.me.address}",
        )

    def _form(self, record: Generation) -> None:
        """Collective. Form the process group and exchange progress. RuntimeError if that fails."""
        # Later a survivor logs one line, and so does a joiner.
        level = logging.DEBUG if self.world.generation or self.is_joining else logging.INFO
        self.world = self.world.in_generation(record, self.member.me.id)
        self.board.enter("joining", generation=record.number)
        self.group.form(record, self.world.rank, self.generation_error)
        log.log(
            level,
            "generation %d: rank %d of %d (%s)",
            record.number,
            self.world.rank,
            self.world.size,
            record.reason,
        )
        self.exchange_progress()

    def exchange_progress(self) -> None:
        """Collective. Receive the progress of each member."""
        spent = self.ledger.to_json(time.monotonic(), time.time())
        sent = replace(
            self.progress,
            first_generation=self.first_generation,
            ledger=spent,
            loop_state=self.loop_state,
        )
        received = self.group.gather_json(self.world.size, asdict(sent))
        self.member_progress = [Progress.from_json(values) for values in received]

    def leave_group(self, why: str, *, leaving: bool = False) -> None:
        """Leave this generation's process group, intact or broken, and report the progress."""
        log.debug("leaving generation %d: %s", self.world.generation, why)
        self.member.start_leaving()
        self.group.abort(intact=not self.generation_error())
        self.member.report_left(
            LeaveReport(self.world.generation, self.progress.step, leaving, why)
        )

    def evict(self, rank: int, why: str) -> None:
        """Exclude a member from the next generation on."""
        self.member.evict(self.world.members[rank], why)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave. A torch error caused by a lost peer becomes a PeersLostError."""
        try:
            if error is None or isinstance(error, Stopped):
                if not self.is_static:
                    if not self.is_fixed:
                        self.report_goodput(self.member.folder)
                    self._end_run(RunResult(self.exit_code if error is None else int(str(error))))
                return self.group.destroy()
            # No memory for a thread: the exit of the process closes the group.
            with suppress(RuntimeError):
                self.group.abort()
        finally:
            self.membership.close()
        if not isinstance(error, PeersLostError) and is_peer_loss(error):
            raise PeersLostError(
                f"rank {self.world.rank} lost its peers: {error_summary(error)}",
                f"{self.world.host}, pid {os.getpid()}",
                "another worker failed first, see its log; "
                "the same command resumes from the newest checkpoint",
            ) from error

    def _end_run(self, result: RunResult) -> None:
        """Collective. Barrier; then rank 0 records the end of the run, and all ranks exit."""

        def record_end() -> None:
            self.group.gather_json(self.world.size, "done")
            if self.world.leader:
                self.member.publish_result(result)
            else:
                self.member.wait_for_result(self.world.generation)

        self.member.stop_admitting()
        with suppress(RunEnded):
            self.retry_across_generations(record_end)


def record_event(runtime: ElasticRuntime, event: str, **facts: Any) -> None:
    """Append an event of this generation to events.jsonl; none in a static process group."""
    runtime.membership.record_event(event, generation=runtime.world.generation, **facts)


def make_board(env: WorkerEnv) -> StatusBoard:
    """Return the status board of a worker; in a drill it carries out requested faults."""
    path = Path(env.state) / f"{env.slot}.board"
    inject = os.environ.get(DRILL_VARIABLE) == "1"
    return FaultInjectingBoard(path, path.with_suffix(".fault")) if inject else StatusBoard(path)


def is_run_active(env: WorkerEnv) -> bool:
    """Return whether a generation is training. UsageError if another host trains this run of one
    host."""
    newest = open_generation_log(Path(env.folder), since=env.known_generation).newest()
    if newest.end:
        return False
    alive = [
        member
        for member in newest.members
        if is_loopback_reachable(member.loopback) and is_listening(member.address)
    ]
    foreign = sorted({member.host for member in alive} - {env.host})
    if env.agent_pid and foreign and env.slots == env.expected_workers:
        raise UsageError(
            f"another training is already running in {env.folder}",
            f"generation {newest.number} on {', '.join(foreign)}",
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
