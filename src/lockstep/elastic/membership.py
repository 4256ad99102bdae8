"""A worker's membership at run time: sockets, log and clock around the pure protocol.

Decisions are made in protocol/. Connections and a DiskThread do the input and output.

The main thread calls, in this order:

    request_join(fingerprint)   a new worker asks to join
    next_generation(after)      blocks until this worker is in a newer generation
    report_left(report)         it has left that process group; then next_generation again
"""

import ipaddress
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.elastic.connections import Connections
from lockstep.elastic.disk_thread import DiskThread
from lockstep.elastic.generation_group import GroupAborter, exit_for_restart
from lockstep.elastic.generation_log import (
    NO_GENERATION,
    Generation,
    GenerationLog,
    Member,
    RunResult,
    new_token,
    open_generation_log,
)
from lockstep.elastic.hang import Watchdog, read_status, stack_of
from lockstep.elastic.link import PeerLink
from lockstep.elastic.protocol.decisions import ElasticLimits, LeaveReport
from lockstep.elastic.protocol.state import (
    AbortGroup,
    Connect,
    Effect,
    Exit,
    FormGroup,
    GetReady,
    LogMessage,
    Propose,
    ReadLog,
    Send,
)
from lockstep.elastic.protocol.transitions import Protocol
from lockstep.elastic.run_folder import folder_error, read_worker_token
from lockstep.errors import FencedError, LockstepError, PeersLostError, UsageError
from lockstep.log import log
from lockstep.record.events import append_event
from lockstep.runtime.signals import STOP_EXIT_CODES
from lockstep.runtime.worker_env import WorkerEnv, is_loopback_reachable, loopback_network

TICK_S = 0.1
DRAIN_TIMEOUT_S = 10.0  # how long a member of a drained host waits for the next generation
# Interval between checks for a signal while the main thread waits for a generation.
SIGNAL_POLL_S = 1.0
PUBLISH_S = 10.0  # how long to try to record the end of the run
LIVENESS_S = 10.0  # the file is written each second
AGREED_CODES = (0, 75, 130)  # exit codes of a run that all ranks agreed to end
SAME = (
    "start it with the same command, "
    "code and package versions as the other workers, on the same kind of processor"
)


Event = Callable[..., list[Effect]]  # a method of the protocol, called with the time at last


class RunEnded(LockstepError):
    """Another worker recorded the end of the run: it is complete, stopped, or failed."""

    def __init__(self, end: RunResult) -> None:
        super().__init__(f"the run ended with exit code {end.code}", "", "")
        self.end, self.exit_code = end, end.code


class OthersStarted(Exception):
    """The first generation trains without this worker, which joins it once it has a model."""


class Turn(threading.Condition):
    """What the main thread waits for: its next generation, or the reason why there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.formed = NO_GENERATION
        self.others_started = False
        self.exit_error: Exception | None = None

    def form(self, generation: Generation) -> None:
        with self:
            self.formed = generation
            self.notify_all()

    def let_others_start(self) -> None:
        with self:
            self.others_started = True
            self.notify_all()

    def forget_others(self) -> None:
        self.others_started = False

    def exit(self, error: Exception) -> None:
        """Raise `error` in the main thread when it asks for the next generation."""
        with self:
            self.exit_error = error
            self.notify_all()


class StaticMembership:
    """The membership in a static process group: its workers stay, and no others join."""

    flags: Mapping[str, str] = {}
    has_own_folder = False
    drains = False
    joiner_count = 0
    stop_signal = ""

    def __init__(self, rank: int) -> None:
        self.slot = rank

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Nothing is published, and no event is recorded."""

    set_fingerprint = stop_admitting = record_event = mark_untrusted = close = _ignore

    def _no_error(self, number: int = 0) -> str:
        return ""

    generation_error = folder_error = _no_error

    def divergence_records(self) -> list[tuple[str, dict[str, Any]]]:
        return []


class Membership:
    """This worker's membership in the run: what the main thread asks, and its thread answers.

    slot            of this worker on its host
    flags           arguments of the user's own function, as given to the agent
    drains          SIGUSR1 asks this host to leave, and not the run to stop
    has_own_folder  each host has a copy of the run folder: they share no disk
    on_abort        aborts every collective of the group, but not the sockets with these
                    descriptors; called by the membership thread
    generation_log  of the run; by default the one of the run folder
    """

    def __init__(
        self,
        env: WorkerEnv,
        limits: ElasticLimits,
        on_abort: Callable[[set[int]], object],
        generation_log: GenerationLog | None = None,
    ) -> None:
        self.worker_env = env
        self.slot = env.slot
        self.flags = {f"--{name}": text for name, text in env.flags.items()}
        self.drains = env.drain
        self.folder = Path(env.folder)
        self.generation_log = generation_log or open_generation_log(
            self.folder, since=env.known_generation
        )
        self.has_own_folder = not self.generation_log.folder.is_shared_disk
        self.turn = Turn()
        # A replica on two hosts would save its parts to two disks.
        limits = replace(limits, one_host=self.has_own_folder)
        self.thread = MembershipThread(env, limits, on_abort, self.generation_log, self.turn)
        self.protocol = self.thread.protocol
        self.me = self.protocol.me
        self.thread.start()

    def folder_error(self) -> str:
        """Return why the run folder is unusable; "" if usable."""
        return folder_error(self.worker_env)

    def record_event(self, event: str, **facts: Any) -> None:
        """Append to events.jsonl."""
        append_event(self.folder, event, **facts)

    def mark_untrusted(self, number: int, why: str, facts: dict[str, Any]) -> None:
        """Mark a generation's state as untrusted: every member restarts from a checkpoint."""
        try:
            self.generation_log.mark_untrusted(number, why, facts)
        except OSError as error:
            log.error("cannot mark the state of generation %d as untrusted: %s", number, error)

    def divergence_records(self) -> list[tuple[str, dict[str, Any]]]:
        """See GenerationLog."""
        return self.generation_log.divergence_records()

    def remove_divergence_records(self, names: Sequence[str]) -> None:
        try:
            self.generation_log.folder.remove(*names)
        except OSError as error:
            log.warning("the next start reads the record of a divergence again: %s", error)

    def request_join(self, fingerprint: Mapping[str, str], *, is_joining: bool) -> None:
        self.thread.report(
            lambda now_s: self.protocol.request_join(now_s, fingerprint, is_joining=is_joining)
        )

    def set_fingerprint(self, fingerprint: Mapping[str, str]) -> None:
        """Set what must be equal on all members; joiners that differ are refused."""
        self.thread.report(self.protocol.set_fingerprint, dict(fingerprint))

    def next_generation(self, after: int, stop_signal: Callable[[], str] = str) -> Generation:
        """Wait for the first generation above `after` that this worker is in.

        stop_signal  returns the stop signal that this worker received; "": none
        FencedError, RunEnded, UsageError: none will form. OthersStarted: it has to ask again.
        """
        since_s, turn = time.monotonic(), self.turn
        with turn:
            while not (turn.exit_error or turn.others_started or turn.formed.number > after):
                if (name := stop_signal()) and self._stops_run(name, time.monotonic() - since_s):
                    self.request_stop(name)
                turn.wait(SIGNAL_POLL_S)  # with a limit, so that signal handlers run
            if turn.others_started:
                turn.forget_others()
                raise OthersStarted
            if turn.exit_error:
                raise turn.exit_error
            return turn.formed

    def _stops_run(self, name: str, waited_s: float) -> bool:
        """Whether a signal stops the run. One that drains this host does so while the run waits for
        workers: there is no vote in which this worker could leave."""
        is_drain = name == "SIGUSR1" and self.drains
        return not is_drain or (self.protocol.phase == "left" and waited_s > DRAIN_TIMEOUT_S)

    @property
    def joiner_count(self) -> int:
        """Joiners that could be admitted now; read by the main thread when it votes."""
        return self.thread.joiner_count

    @property
    def stop_signal(self) -> str:
        """The signal with which the run shall stop, as far as known."""
        return self.protocol.stop_signal

    def request_stop(self, name: str) -> None:
        """Save and stop the run, as on the signal `name`; also while it waits for workers."""
        if not self.stop_signal:
            self.thread.report(self.protocol.request_stop, name)

    def start_leaving(self) -> None:
        """Report that the main thread starts to leave the group; `report_left` follows."""
        self.thread.note_leaving(time.monotonic())

    def report_left(self, report: LeaveReport) -> None:
        """Report that the main thread has left generation `report.number`."""
        self.thread.note_leaving(0.0)
        self.thread.report(self.protocol.on_group_left, report)

    def evict(self, id: str, why: str) -> None:
        self.thread.report(self.protocol.evict, id, why)

    def stop_admitting(self) -> None:
        """Admit no joiners and wait for no workers from now on: the run is about to end."""
        self.thread.report(self.protocol.stop_admitting)

    def generation_error(self, number: int) -> str:
        """Return why generation `number` is over; "" while it lives."""
        if self.turn.exit_error:
            return str(self.turn.exit_error)
        if self.protocol.number > number:
            return "a newer generation exists"
        return self.protocol.generation_error

    def publish_result(self, end: RunResult) -> None:
        """Record the end of the run in the log. Give up after PUBLISH_S."""
        self.thread.disk.record_end(end).wait(PUBLISH_S)

    def wait_for_result(self, number: int) -> None:
        """Wait for the end of the run. PeersLostError when generation `number` breaks before."""
        with self.turn:
            while not self.turn.exit_error:
                if (why := self.generation_error(number)) and not self.protocol.generation.end:
                    raise PeersLostError(why)
                self.turn.wait(0.05)
            if not isinstance(self.turn.exit_error, RunEnded):
                raise self.turn.exit_error

    def close(self) -> None:
        self.thread.close()


class MembershipThread(threading.Thread):
    """The thread that passes every event to the protocol and carries out its effects."""

    def __init__(
        self,
        env: WorkerEnv,
        limits: ElasticLimits,
        on_abort: Callable[[set[int]], object],
        generation_log: GenerationLog,
        turn: Turn,
    ) -> None:
        super().__init__(name="lockstep-member", daemon=True)
        self.env = env
        self.turn = turn
        self.board = Path(env.state) / f"{env.slot}.board"
        token = read_worker_token(env)
        listener = socket.create_server((env.address, 0), backlog=256)
        listener.setblocking(False)
        me = make_member(env, *listener.getsockname()[:2])
        self.protocol = Protocol(
            me, limits, tokens=new_token, now_s=time.monotonic(), after=env.after_generation
        )
        self.joiner_count = 0
        self.leaving_s = 0.0  # when the main thread started to leave its group; 0: it has not
        self.main_thread = threading.get_ident()
        self.aborter = GroupAborter(
            lambda: on_abort(self.connections.descriptors()), self.main_thread
        )
        self.watchdog = Watchdog(limits, env.host, self._ask_stack)
        self.connections = Connections(listener, token, self.protocol, self._tell, self._on_message)
        # Events of other threads: None makes this one stop.
        self._events: queue.SimpleQueue[tuple[Event, tuple[Any, ...]] | None] = queue.SimpleQueue()
        # Id -> when this worker first failed to reach it.
        self._unreachable_since_s: dict[str, float] = {}
        self.disk = DiskThread(
            Path(env.folder), generation_log, self.protocol, self.report, self._refuse_second
        )

    def report(self, event: Event, *values: Any) -> None:
        """Pass an event to the protocol, from any thread."""
        self._events.put((event, values))
        self.connections.wake()

    def close(self) -> None:
        self._events.put(None)
        self.connections.wake()
        self.join(5.0)
        self.disk.close(2.0)

    def run(self) -> None:
        try:
            while self._turn_once():
                pass
        except Exception as error:
            # A bug here must end this worker, not leave it without heartbeats.
            log.exception("the membership thread failed")
            self.turn.exit(error)
            self.aborter.abort()
        self.connections.close()

    def note_leaving(self, since_s: float) -> None:
        self.leaving_s = since_s

    def _tell(self, event: Event, *values: Any) -> None:
        self._apply(event(*values, time.monotonic()))

    def _turn_once(self) -> bool:
        """Process the events until the next tick. Return False when the thread shall stop."""
        self.connections.serve(TICK_S)
        with suppress(queue.Empty):
            while event := self._events.get_nowait():
                self._tell(event[0], *event[1])
            return False
        now_s = time.monotonic()
        self.connections.retry(now_s)
        self._apply(self.protocol.tick(now_s))
        self._watch(now_s)
        while effects := self.protocol.advance(now_s):  # a failed connection is an event, too
            self._apply(effects)
        is_over = self.protocol.phase == "in" and bool(self.protocol.generation_error)
        self.aborter.check(is_over=is_over, now_s=now_s, leaving_s=self.leaving_s)
        self.joiner_count = self.protocol.joiner_count
        return True

    def _watch(self, now_s: float) -> None:
        """As the coordinator, detect hangs and act on them."""
        protocol = self.protocol
        if not protocol.is_coordinator or protocol.phase != "in" or protocol.generation_error:
            self.watchdog.reset()
            return
        self.watchdog.on_heartbeat(self.protocol.me.id, read_status(self.board), now_s)
        if (verdict := self.watchdog.new_verdict(protocol.generation, now_s)) is None:
            return
        log.error("%s", verdict.paragraph)
        facts = {
            "culprits": list(verdict.culprits),
            "action": verdict.action,
            "why": verdict.paragraph,
        }
        self.disk.submit(lambda: append_event(Path(self.env.folder), "hang", **facts))
        why = verdict.paragraph.partition(";")[0]
        if verdict.action == "abort":
            self.disk.record_end(RunResult(1, verdict.paragraph))
        elif self.protocol.me.id in verdict.culprits and verdict.action == "evict":
            # The main thread cannot react. After the exit the next member is the coordinator.
            exit_for_restart(verdict.paragraph, stack_of(self.main_thread))
        elif verdict.action != "warn":
            for id in verdict.culprits:
                self._apply(protocol.evict(id, why, now_s))
            if not verdict.culprits:
                self._apply(protocol.regroup(why, now_s))

    def _ask_stack(self, id: str) -> None:
        if id == self.protocol.me.id:
            self.watchdog.on_stack(id, stack_of(self.main_thread))
        else:
            self._apply([Send(id, {"kind": "get_stack"})])

    def _apply(self, effects: Sequence[Effect]) -> None:
        me = self.protocol.me.id
        heartbeat: dict[str, Any] = {}  # the same object for all links, so that it is encoded once
        for effect in effects:
            if not isinstance(effect, ReadLog) and not (
                isinstance(effect, Send) and effect.message["kind"] == "heartbeat"
            ):
                log.debug("%s", effect)
            match effect:
                case Send(id, {"kind": "heartbeat"} as message):
                    heartbeat = heartbeat or message | {"doing": read_status(self.board)}
                    self.connections.send(id, heartbeat)
                case Send(id, message):
                    self.connections.send(id, message)
                case Connect(member):
                    self._connect(member)
                case ReadLog(known):
                    self.disk.read_log(known)
                case Propose(generation):
                    self.disk.propose(generation, self.env.address)
                case AbortGroup(why):
                    self._abort_group(why)
                case FormGroup(generation):
                    self.disk.unregister()
                    self._unreachable_since_s = {}
                    self.turn.form(generation)
                case GetReady():
                    self.disk.unregister()
                    self.turn.let_others_start()
                case Exit(why, fenced, end):
                    error = FencedError(why) if fenced else UsageError(why, me, SAME)
                    self.turn.exit(RunEnded(end) if end else error)
                case LogMessage(text):
                    log.warning("%s", text)

    def _abort_group(self, why: str) -> None:
        end = self.protocol.generation.end
        if end and end.code in AGREED_CODES:
            return  # the run is complete, but some ranks may still be in the last collective
        log.debug("generation %d ended: %s", self.protocol.number, why)
        self.aborter.abort()

    def _connect(self, member: Member) -> None:
        """Connect. An unreachable member without a new liveness file for LIVENESS_S counts as
        dead."""
        if is_loopback_reachable(member.loopback):
            self.connections.connect(member)
            return
        now_s = time.monotonic()
        if not self._unreachable_since_s:
            log.info(
                "%s has a loopback address of another host: waiting %g s for its liveness file",
                member.id,
                LIVENESS_S,
            )
        since_s = self._unreachable_since_s.setdefault(member.id, now_s)
        self._tell(self.protocol.on_connect_failed, member.id, now_s - since_s > LIVENESS_S)

    def _on_message(self, link: PeerLink, message: dict[str, Any]) -> None:
        if link.is_control:
            link.send(self._answer(message))
        elif message["kind"] == "get_stack":
            threading.Thread(target=self._send_stack, args=(link.id,), daemon=True).start()
        elif message["kind"] == "stack":
            self.watchdog.on_stack(link.id, str(message["stack"]))
        else:
            self._tell(self.protocol.on_message, link.id, message)
            if message["kind"] == "heartbeat":
                self.watchdog.on_heartbeat(link.id, message.get("doing"), time.monotonic())

    def _send_stack(self, id: str) -> None:
        """Send the main thread's stack; on a separate thread, since it reads source files."""
        message = {"kind": "stack", "stack": stack_of(self.main_thread)}
        self.report(lambda now_s: [Send(id, message)])

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        protocol = self.protocol
        if message["kind"] == "stop":
            name = str(message.get("signal"))
            self._tell(protocol.request_stop, name if STOP_EXIT_CODES.get(name) else "SIGTERM")
            return {"kind": "stopping", "id": protocol.me.id}
        return {
            "kind": "status",
            "id": protocol.me.id,
            "membership": protocol.phase,
            "number": protocol.number,
            "waiting": protocol.joiner_count,
            "doing": read_status(self.board),
        }

    def _refuse_second(self, member: Member, now_s: float) -> list[Effect]:
        """Abort this start: another host trains in this folder."""
        number, folder = self.protocol.number, self.env.folder
        self.turn.exit(
            UsageError(
                f"another training is running on host {member.host}, in {folder}",
                f"generation {number}: the liveness file of {member.id}, "
                f"at {member.address} on that host, changes",
                "wait for it, stop it there (lockstep launch --stop), or give another --out; "
                "to train on both hosts, use --hosts",
            )
        )
        return self.protocol.abort_start()


def make_member(env: WorkerEnv, host: str, port: int) -> Member:
    """Return this worker as a new member, which listens at this address."""
    is_loopback = ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return Member(
        f"{env.host}/{env.slot}/{secrets.token_hex(4)}",
        env.host,
        env.slot,
        os.getpid(),
        f"{host}:{port}",
        loopback_network() if is_loopback else "",
    )
