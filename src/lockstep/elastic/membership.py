"""A worker's membership at run time: sockets, log and clock around the pure protocol.

Decisions are made in protocol/. The membership thread passes every event to it and carries out its
effects. Disk access runs on a second thread: a shared disk may block for minutes, and a member
without heartbeats counts as gone.

The main thread calls, in this order:

    request_join(fingerprint)   a new worker asks to join
    next_generation(after)      blocks until this worker is in a newer generation
    report_left(report)         it has left that process group; then next_generation again
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import queue
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch._C._distributed_c10d import TCPStore  # torch.distributed has it too, untyped

from lockstep.elastic import hang
from lockstep.elastic import waiting_room as waiting
from lockstep.elastic.generation_log import Generation, GenerationLog, Member, RunResult, new_token
from lockstep.elastic.hang import stack_of
from lockstep.elastic.link import AuthenticationError, Link
from lockstep.elastic.log_limiter import LogLimiter
from lockstep.elastic.protocol.decisions import ElasticLimits, LeaveReport
from lockstep.elastic.protocol.effects import AbortGroup, Connect, Effect, Exit, FormGroup, GetReady, LogMessage, Propose, ReadLog, Send
from lockstep.elastic.protocol.state import Protocol
from lockstep.elastic.run_folder import read_worker_token
from lockstep.elastic.watchdog import Watchdog, read_status
from lockstep.errors import FencedError, LockstepError, PeersLostError, UsageError
from lockstep.log import flush_log
from lockstep.record.events import append_event
from lockstep.runtime.exit_report import ExitReport
from lockstep.runtime.signals import STOP_EXIT_CODES
from lockstep.runtime.subprocesses import send_exit_report
from lockstep.runtime.worker_env import WorkerEnv, is_loopback_reachable, loopback_network

log = logging.getLogger("lockstep")
TICK_S = 0.1
SIGNAL_POLL_S = 1.0  # interval between checks for a signal while the main thread waits for a generation
CONNECT_S = 1.0  # time for a new connection to authenticate
RETRY_S = 0.01  # interval between connection attempts to an exiting process
KEEP_S = 0.05  # minimum age of an unauthenticated connection that is closed in favor of a new one
EXITING_S = 1.0  # how long a member that closes new connections counts as exiting
REFUSAL_LOG_S = 10.0  # interval between log lines about one peer refused for one reason
STUCK_S = 3.0  # a collective that survives the shutdown of its sockets for longer is stuck: milliseconds are normal
STUCK_FORMING_S = 12.0  # the same while the group forms; gloo itself gives up earlier (world.FORM_S)
LEAVE_S = 20.0  # a main thread that takes longer to leave a broken group is stuck: milliseconds are normal
LIVENESS_S = 10.0  # an unreachable worker without a new liveness file for longer counts as dead; it is written each second
AGREED_CODES = (0, 75, 130)  # exit codes of a run that all ranks agreed to end
SAME = "start it with the same command, code and package versions as the other workers, on the same kind of processor"


class RunEnded(LockstepError):
    """Another worker recorded the end of the run: it is complete, stopped, or failed."""

    def __init__(self, end: RunResult) -> None:
        super().__init__(f"the run ended with exit code {end.code}", "", "")
        self.end = end
        self.exit_code = end.code


class OthersStarted(Exception):
    """The first generation trains without this worker, which joins it once it has a model."""


class Membership:
    """This worker's membership in the run.

    on_abort           aborts every collective of the group; called by the membership thread
    local_stop_signal  returns the signal to stop the run, or ""; called by the main thread
    joiner_count       joiners that could be admitted now; read by the main thread when it votes
    """

    def __init__(self, env: WorkerEnv, limits: ElasticLimits, on_abort: Callable[[], None]) -> None:
        self.worker_env, self.on_abort = env, on_abort
        self.board = Path(env.state) / f"{env.slot}.board"
        self.folder = Path(env.folder)
        self.token = read_worker_token(env)
        self.generation_log = GenerationLog(self.folder / "generations", since=env.known_generation)
        self._listener = socket.create_server((env.address, 0), backlog=256)
        self._listener.setblocking(False)
        host, port = self._listener.getsockname()[:2]
        loopback = loopback_network() if ipaddress.ip_address(host.partition("%")[0]).is_loopback else ""
        self.me = Member(f"{env.host}/{env.slot}/{secrets.token_hex(4)}", env.host, env.slot, os.getpid(), f"{host}:{port}", loopback)
        self.protocol = Protocol(self.me, limits, tokens=new_token, now_s=time.monotonic(), after=env.after_generation)
        self.joiner_count = 0
        self.local_stop_signal: Callable[[], str] = lambda: ""
        self.main_thread = threading.get_ident()
        self.watchdog = Watchdog(hang_limits(limits), env.host, self._ask_stack)
        self._links: dict[int, Link] = {}
        self._calls: queue.SimpleQueue[Callable[[], Sequence[Effect]] | None] = queue.SimpleQueue()
        self._disk: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._turn = threading.Condition()
        self._formed: Generation | None = None
        self._exit_error: Exception | None = None
        self._others_started = False
        self._store: TCPStore | None = None  # of the generation that this worker proposed last
        self._reading_log = False
        self._registered = False  # in the waiting room; used by the disk thread alone
        self._liveness: dict[str, str] = {}  # id -> newest content of its liveness file
        self._abort_s = 0.0  # when the group was first aborted; 0: it was not
        self._leaving_s = 0.0  # when the main thread began to leave the group; 0: it has not
        self._unreachable_since_s: dict[str, float] = {}  # id -> since when an unreachable member is watched
        self._exiting: list[Member] = []  # connect again in the next turn
        self._exiting_since_s: dict[str, float] = {}
        self._refusals = LogLimiter(REFUSAL_LOG_S)
        self._listener_paused = False  # until the next turn
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name="lockstep-member", daemon=True),
            threading.Thread(target=self._serve_disk, name="lockstep-disk", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- for the main thread --------------------------------------------------------------------------------------------

    def request_join(self, fingerprint: Mapping[str, str], *, is_joining: bool) -> None:
        """Ask to join. is_joining: only workers that train already."""
        self._call(lambda: self.protocol.request_join(time.monotonic(), fingerprint, is_joining=is_joining))

    def set_fingerprint(self, fingerprint: Mapping[str, str]) -> None:
        """Set what must be equal on all members; joiners that differ are refused."""
        self._call(lambda: self.protocol.set_fingerprint(dict(fingerprint), time.monotonic()))

    def next_generation(self, after: int) -> Generation:
        """Wait for the first generation above `after` that this worker is in.

        FencedError, RunEnded, UsageError: there will be none. OthersStarted: it has to ask again.
        """
        with self._turn:
            while self._exit_error is None and not self._others_started and (self._formed is None or self._formed.number <= after):
                if name := self.local_stop_signal():
                    self.request_stop(name)
                self._turn.wait(SIGNAL_POLL_S)  # with a limit, so that signal handlers run
            if self._others_started:
                self._others_started = False
                raise OthersStarted
            if self._exit_error is not None:
                raise self._exit_error
            assert self._formed is not None
            return self._formed

    @property
    def stop_signal(self) -> str:
        """The signal with which the run shall stop, as far as known; "" for none."""
        return self.protocol.stop_signal

    def request_stop(self, name: str) -> None:
        """Save and stop the run, as on the signal `name`; also while it waits for workers."""
        if not self.stop_signal:
            self._call(lambda: self.protocol.request_stop(name, time.monotonic()))

    def report_left(self, report: LeaveReport) -> None:
        """Report that the main thread has left generation `report.number`."""
        self._leaving_s = 0.0
        self._call(lambda: self.protocol.on_group_left(report, time.monotonic()))

    def begin_leaving(self) -> None:
        """Report that the main thread starts to leave the group; `report_left` follows."""
        self._leaving_s = time.monotonic()

    def evict(self, id: str, why: str) -> None:
        """Remove a member from the run."""
        self._call(lambda: self.protocol.evict(id, why, time.monotonic()))

    def stop_admitting(self) -> None:
        """Admit no more joiners and wait for no workers: the run is about to end."""
        self._call(self.protocol.stop_admitting)

    def generation_error(self, number: int) -> str:
        """Return why generation `number` is over; "" while it lives."""
        generation = self.protocol.generation
        if self._exit_error is not None:
            return str(self._exit_error)
        return self.protocol.generation_error if generation is None or generation.number <= number else "a newer generation exists"

    def publish_result(self, end: RunResult) -> None:
        """Record the end of the run in the log, for the other workers. Gives up after 10 s."""
        done = threading.Event()

        def propose() -> None:
            with suppress(OSError):
                ended = write_result(self.generation_log, end)
                self._call(lambda: self.protocol.on_proposed(ended, time.monotonic()))
            done.set()

        self._disk.put(propose)
        done.wait(10.0)

    def wait_for_result(self, number: int) -> None:
        """Wait for the end of the run. PeersLostError when generation `number` breaks before."""
        while True:
            with self._turn:
                if isinstance(self._exit_error, RunEnded):
                    return
                if self._exit_error is not None:
                    raise self._exit_error
                self._turn.wait(0.05)
            if why := self.generation_error(number):
                raise PeersLostError(why)

    def close(self) -> None:
        """Stop the threads and close every link."""
        if self._closed:
            return
        self._closed = True
        self._calls.put(None)
        self._wake()
        self._threads[0].join(5.0)
        self._disk.put(lambda: waiting.unregister(self.folder, self.me, with_liveness=True))
        self._disk.put(None)
        self._threads[1].join(2.0)  # if the disk blocks, the thread exits with the process

    def sockets(self) -> set[int]:
        """Return the descriptors of the links, which do not belong to the process group."""
        return {self._listener.fileno(), *self._links}

    # -- the membership thread ------------------------------------------------------------------------------------------

    def _call(self, function: Callable[[], Sequence[Effect]]) -> None:
        self._calls.put(function)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):
            os.write(self._wake_writer, b".")

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        try:
            while self._turn_once():
                pass
        except Exception as error:  # a bug here must end this worker, not leave it without heartbeats
            log.exception("the membership thread failed")
            self._exit(error)
            self._abort_group()
        for link in list(self._links.values()):
            self._drop(link)
        self._selector.close()
        self._listener.close()
        os.close(self._wake_reader)

    def _turn_once(self) -> bool:
        """Process the events until the next tick. Return False when the thread shall stop."""
        ready = self._selector.select(RETRY_S if self._exiting or self._listener_paused else TICK_S)
        if self._listener_paused:
            self._listener_paused = False
            self._selector.register(self._listener, selectors.EVENT_READ)
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd == self._wake_reader:
                with suppress(BlockingIOError):
                    os.read(self._wake_reader, 65536)
            elif (link := self._links.get(key.fd)) is not None:
                self._serve(link, events)
        with suppress(queue.Empty):
            while True:
                function = self._calls.get_nowait()
                if function is None:
                    return False
                self._apply(function())
        now_s = time.monotonic()
        for link in [link for link in self._links.values() if not link.id and now_s - link.opened_s > CONNECT_S]:
            self._fail(link, refused=False)
        exiting, self._exiting = self._exiting, []
        for member in exiting:
            self._connect(member)
        self._apply(self.protocol.tick(now_s))
        self._leave_broken_group(now_s)
        self.joiner_count = self.protocol.joiner_count
        self._watch(now_s)
        return True

    def _leave_broken_group(self, now_s: float) -> None:
        """Abort the group of a generation that is over; restart if the main thread is stuck."""
        if self._leaving_s and now_s - self._leaving_s > LEAVE_S:
            stack = stack_of(self.main_thread)
            log.error("the main thread has not left the broken group within %g s: restarting this worker\n%s", LEAVE_S, stack)
            exit_for_restart("stuck while leaving a broken group", "")
        if not self.protocol.generation_error or self.protocol.phase != "in":
            self._abort_s = 0.0
            return
        self._abort_group()  # each turn: the main thread may have opened more sockets
        self._abort_s = self._abort_s or now_s
        stuck_s = now_s - self._abort_s
        stack = stack_in_collective() if stuck_s > STUCK_S else ""
        forming = "in init_process_group" in stack or "in new_group" in stack
        if stack and stuck_s > (STUCK_FORMING_S if forming else STUCK_S):
            log.error("a collective has not returned %.0f s after its group was aborted: restarting this worker\n%s", stuck_s, stack)
            exit_for_restart("stuck in a collective of an aborted group", stack)

    def _watch(self, now_s: float) -> None:
        """As the coordinator, detect hangs and act on them."""
        protocol = self.protocol
        if not protocol.is_coordinator or protocol.phase != "in" or protocol.generation_error or protocol.generation is None:
            self.watchdog.reset()
            return
        self.watchdog.on_heartbeat(self.me.id, read_status(self.board), now_s)
        verdict = self.watchdog.new_verdict(protocol.generation, now_s)
        if verdict is None:
            return
        log.error("%s", verdict.paragraph)
        self._disk.put(lambda: record_hang(self.folder, verdict))
        why = verdict.paragraph.partition(";")[0]
        if verdict.action == "abort":
            threading.Thread(target=self.publish_result, args=(RunResult(1, verdict.paragraph),), daemon=True).start()
        elif self.me.id in verdict.culprits and verdict.action == "evict":
            # The main thread cannot react. After the exit the next member is the coordinator.
            exit_for_restart(verdict.paragraph, stack_of(self.main_thread))
        elif verdict.action != "warn":
            for id in verdict.culprits:
                self._apply(protocol.evict(id, why, now_s))
            if not verdict.culprits:
                self._apply(protocol.regroup(why, now_s))

    def _ask_stack(self, id: str) -> None:
        if id == self.me.id:
            self.watchdog.on_stack(id, stack_of(self.main_thread))
        else:
            self._apply([Send(id, {"kind": "where"})])

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, ReadLog) and not (isinstance(effect, Send) and effect.message["kind"] == "beat"):
                log.debug("%s", effect)
            match effect:
                case Send(id, message):
                    if message["kind"] == "beat":
                        message = {"kind": "beat", "doing": read_status(self.board)}
                    for link in [link for link in self._links.values() if link.id == id][:1]:
                        link.send(message)
                        self._flush(link)
                case Connect(member):
                    self._connect(member)
                case ReadLog(known):
                    self._read_log(known)
                case Propose(generation):
                    self._propose(generation)
                case AbortGroup(why):
                    newest = self.protocol.generation
                    if newest and newest.end and newest.end.code in AGREED_CODES:
                        continue  # the run is complete, but some ranks may still be in the last collective
                    ending = self.protocol.limits.max_workers == 0  # `stop_admitting`: members leave when they are done
                    log.log(logging.DEBUG if ending else logging.INFO, "generation %d ended: %s", self.protocol.number, why)
                    self._abort_group()
                case FormGroup(generation):
                    with self._turn:
                        self._formed = generation
                        self._turn.notify_all()
                    self._disk.put(self._unregister)
                case GetReady():
                    self._disk.put(self._unregister)
                    with self._turn:
                        self._others_started = True
                        self._turn.notify_all()
                case Exit(why, fenced, end):
                    self._exit(RunEnded(end) if end else FencedError(why) if fenced else UsageError(why, self.me.id, SAME))
                case LogMessage(text):
                    log.warning("%s", text)

    def _abort_group(self) -> None:
        with suppress(OSError):  # out of descriptors: the next turn tries again
            self.on_abort()

    def _exit(self, error: Exception) -> None:
        """Raise `error` in the main thread when it asks for the next generation."""
        with self._turn:
            self._exit_error = error
            self._turn.notify_all()

    # -- links --------------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Accept waiting connections. Unauthenticated peers may use an eighth of the descriptors.

        At the limit, a new connection replaces the oldest such one if that is older than KEEP_S.
        """
        limit = max_unauthenticated()
        while True:
            unauthenticated = [link for link in self._links.values() if not link.is_client and not link.id]
            oldest = min(unauthenticated, key=lambda link: link.opened_s) if unauthenticated else None
            if oldest and len(unauthenticated) >= limit:
                if time.monotonic() - oldest.opened_s < KEEP_S:
                    self._pause_listener()
                    return
                self._refuse(oldest, f"more than {limit} unauthenticated connections are open")
            try:
                connection, _ = self._listener.accept()
                self._add(Link(connection, self.token, self.me.id, vars(self.me), is_client=False, opened_s=time.monotonic()))
            except BlockingIOError:
                return
            except ConnectionError:  # already closed by its peer
                continue
            except OSError as error:  # out of descriptors or memory
                if oldest:
                    self._refuse(oldest, f"no connection can be accepted ({error.strerror})")
                self._pause_listener()
                return

    def _pause_listener(self) -> None:
        """Ignore the listener until the next turn."""
        if not self._listener_paused:
            self._listener_paused = True
            self._selector.unregister(self._listener)

    def _connect(self, member: Member) -> None:
        if not is_loopback_reachable(member.loopback):
            self._watch_unreachable(member)
            return
        host, _, port = member.address.rpartition(":")
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:  # out of descriptors
            log.debug("cannot open a connection to %s: %s", member.id, error)
            self._apply(self.protocol.on_connect_failed(member.id, False, time.monotonic()))
            return
        connection.setblocking(False)
        code = connection.connect_ex((host, int(port)))
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            self._apply(self.protocol.on_connect_failed(member.id, code == errno.ECONNREFUSED, time.monotonic()))
            return
        opened_s = time.monotonic()
        self._add(Link(connection, self.token, self.me.id, vars(self.me), True, opened_s, expected_id=member.id, member=vars(member)))

    def _watch_unreachable(self, member: Member) -> None:
        """Treat an unreachable member as dead if its liveness file does not change for LIVENESS_S."""
        now_s = time.monotonic()
        if not self._unreachable_since_s:
            log.info("%s has a loopback address of another host: waiting %g s for its liveness file", member.id, LIVENESS_S)
        since_s = self._unreachable_since_s.setdefault(member.id, now_s)
        self._apply(self.protocol.on_connect_failed(member.id, now_s - since_s > LIVENESS_S, now_s))

    def _refuse_second_training(self, member: Member) -> Sequence[Effect]:
        """Abort this start: another host trains in this folder."""
        effects = self.protocol.abort_start()
        self._exit(
            UsageError(
                f"another training is running on host {member.host}, in {self.folder}",
                f"generation {self.protocol.number}: the liveness file of {member.id}, at {member.address} on that host, changes",
                "wait for it, stop it there (lockstep launch --stop), or give another --out; to train on both hosts, use --hosts",
            )
        )
        return effects

    def _add(self, link: Link) -> None:
        self._links[link.socket.fileno()] = link
        self._selector.register(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _serve(self, link: Link, events: int) -> None:
        was_authenticated = bool(link.id)
        try:
            error = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            messages = link.receive() if events & selectors.EVENT_READ else []
            if link.id and not was_authenticated:
                self._on_authenticated(link)
            for message in messages:
                self._on_message(link, message)
            self._flush(link)
        except (EOFError, ConnectionResetError):
            self._fail(link, refused=False, exiting=link.is_client and not link.id)
        except OSError as error:
            self._fail(link, refused=error.errno == errno.ECONNREFUSED)
        except (AuthenticationError, KeyError, TypeError, ValueError) as error:
            self._refuse(link, str(error))

    def _refuse(self, link: Link, why: str) -> None:
        peer = peer_address(link.socket)
        if times := self._refusals.due((peer, why), time.monotonic()):
            log.warning("refused a connection from %s%s: %s", peer, f", {times} times" if times > 1 else "", why)
        self._fail(link, refused=False)

    def _on_authenticated(self, link: Link) -> None:
        self._exiting_since_s.pop(link.expected_id, None)
        if link.is_client and link.id != link.expected_id:  # another worker has its port now
            self._fail(link, refused=True)
        elif not link.id.startswith("control/") and len([other for other in self._links.values() if other.id == link.id]) == 1:
            self._apply(self.protocol.on_link_up(link.id, time.monotonic()))

    def _on_message(self, link: Link, message: dict[str, Any]) -> None:
        if link.id.startswith("control/"):
            link.send(self._answer(message))
        elif message["kind"] == "beat":
            self._apply(self.protocol.on_message(link.id, message, time.monotonic()))
            self.watchdog.on_heartbeat(link.id, message.get("doing"), time.monotonic())
        elif message["kind"] == "where":
            threading.Thread(target=self._send_stack, args=(link.id,), daemon=True).start()
        elif message["kind"] == "here":
            self.watchdog.on_stack(link.id, str(message["stack"]))
        else:
            self._apply(self.protocol.on_message(link.id, message, time.monotonic()))

    def _send_stack(self, id: str) -> None:
        """Send the main thread's stack; on a separate thread, since it reads source files."""
        message = {"kind": "here", "stack": stack_of(self.main_thread)}
        self._call(lambda: [Send(id, message)])

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a control command."""
        if message["kind"] == "stop":
            name = str(message.get("signal"))
            self._apply(self.protocol.request_stop(name if STOP_EXIT_CODES.get(name) else "SIGTERM", time.monotonic()))
            return {"kind": "stopping", "id": self.me.id}
        protocol = self.protocol
        known = {"id": self.me.id, "membership": protocol.phase, "number": protocol.number, "waiting": protocol.joiner_count}
        return {"kind": "status", **known, "doing": read_status(self.board)}

    def _flush(self, link: Link) -> None:
        try:
            link.flush()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_outgoing else 0)
            self._selector.modify(link.socket, wanted, link)
        except KeyError:
            return  # dropped in the meantime
        except OSError:
            self._fail(link, refused=False)

    def _drop(self, link: Link) -> None:
        if self._links.pop(link.socket.fileno(), None) is not None:
            self._selector.unregister(link.socket)
        link.socket.close()

    def _fail(self, link: Link, *, refused: bool, exiting: bool = False) -> None:
        """Drop a link that broke or was never established.

        exiting  the peer accepted the connection and closed it before the handshake: the kernel is
                 tearing down a killed process, which takes longer the more memory it had, and soon
                 refuses. A peer that does so for longer than EXITING_S rejects this worker.
        """
        authenticated = link.id and not (link.is_client and link.id != link.expected_id)
        self._drop(link)
        if authenticated and not link.id.startswith("control/"):
            if not any(other.id == link.id for other in self._links.values()):
                self._apply(self.protocol.on_link_down(link.id, time.monotonic()))
        elif exiting and time.monotonic() - self._exiting_since_s.setdefault(link.expected_id, time.monotonic()) < EXITING_S:
            self._exiting.append(Member(**link.member))
        elif link.is_client:
            if refused:
                self._exiting_since_s.pop(link.expected_id, None)
            self._apply(self.protocol.on_connect_failed(link.expected_id, refused, time.monotonic()))

    # -- the disk thread ------------------------------------------------------------------------------------------------

    def _serve_disk(self) -> None:
        while (job := self._disk.get()) is not None:
            try:
                job()
            except OSError as error:
                log.debug("run folder: %s", error)
                self._call(lambda: self.protocol.on_disk_error(time.monotonic()))
            finally:
                self._reading_log = False

    def _unregister(self) -> None:
        waiting.unregister(self.folder, self.me)
        self._registered = False

    def _read_log(self, known: int) -> None:
        if self._reading_log:
            return
        self._reading_log = True
        outside, writes_liveness = self.protocol.phase == "out", self.protocol.writes_liveness
        registers = outside and self.protocol.join_requested
        members = self.protocol.generation.members if self.protocol.generation else ()

        def read() -> None:
            if registers and not self._registered:
                waiting.register(self.folder, self.me)
                self._registered = True
            if writes_liveness:
                waiting.write_liveness(self.folder, self.me)
            newest = self.generation_log.newest(known)
            room = list(waiting.registered_members(self.folder)) if outside else []
            before, self._liveness = self._liveness, waiting.read_liveness(self.folder, members) if outside else {}
            alive = [id for id, content in self._liveness.items() if before.get(id, content) != content]
            for member in members:
                if member.id in alive and not is_loopback_reachable(member.loopback):
                    self._call(partial(self._refuse_second_training, member))
                    return
            self._call(lambda: self.protocol.on_log_read(newest, room, time.monotonic(), alive))

        self._disk.put(read)

    def _propose(self, generation: Generation) -> None:
        """Propose a generation with a store here, which listens before the proposal is visible."""

        def propose() -> None:
            with socket.create_server((self.worker_env.address, 0), backlog=1024) as listener:
                host, port = listener.getsockname()[:2]
                wanted = replace(generation, store=f"{host}:{port}")
                winner = self.generation_log.propose(wanted)
                if winner.token == wanted.token and wanted.members:
                    size = len(wanted.members)
                    descriptor = listener.detach()
                    try:
                        self._store = TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
                    except RuntimeError as error:  # out of descriptors
                        raise OSError(None, f"cannot open a store: {error}") from error
            self._call(lambda: self.protocol.on_proposed(winner, time.monotonic()))

        self._disk.put(propose)


def exit_for_restart(why: str, stack: str) -> NoReturn:
    """Exit at once, since the main thread is stuck; the agent starts a new worker."""
    send_exit_report(ExitReport(FencedError.exit_code, time.monotonic(), why, stack, lost_peers=True))
    flush_log()
    os._exit(FencedError.exit_code)


def stack_in_collective() -> str:
    """Return the stack of a thread in a collective of torch; "" if there is none."""
    for frame in sys._current_frames().values():
        if any(entry.f_code.co_filename.endswith("distributed_c10d.py") for entry, _ in traceback.walk_stack(frame)):
            return "".join(traceback.format_stack(frame))
    return ""


def hang_limits(limits: ElasticLimits) -> hang.HangLimits:
    allowances_s = hang.ALLOWANCES_S | {"evaluating": limits.evaluate_timeout_s}
    return hang.HangLimits(
        hang_timeout_s=limits.hang_timeout_s,
        allowances_s=allowances_s,
        heartbeat_timeout_s=limits.heartbeat_timeout_s,
        action=limits.on_hang,
    )


def write_result(generation_log: GenerationLog, end: RunResult) -> Generation:
    """Record the end of the run in the log; return the record, which may be another worker's."""
    newest = generation_log.newest()
    while newest is None or not newest.end:
        number, step = (newest.number + 1, newest.step) if newest else (1, 0)
        newest = generation_log.propose(Generation(number, new_token(), (), "", step, end.text or "the run ended", end=end))
    return newest


def record_hang(run: Path, verdict: hang.HangVerdict) -> None:
    """Write the verdict to events.jsonl."""
    append_event(run, "hang", culprits=list(verdict.culprits), action=verdict.action, why=verdict.paragraph)


def max_unauthenticated() -> int:
    """Return how many unauthenticated connections may be open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(256, soft // 8)) if soft != resource.RLIM_INFINITY else 256


def peer_address(connection: socket.socket) -> str:
    """Return the peer's address, for the log."""
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "an unknown address"
