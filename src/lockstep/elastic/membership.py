"""A worker's part in membership: one thread that keeps the links, one that waits for the disk, and what the main thread asks of them.

The decisions are protocol.py's. Here are the sockets, the log and the clock: what happens is told to the protocol, its effects are carried
out. The disk has a thread of its own, since a shared disk may not answer for minutes, and a member that says nothing counts as gone.

The main thread:  member.ask(facts)      a new worker wants in
                  member.next()          the generation that it is in now; waits for it
                  member.left(report)    it has left the group of the generation before
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
from lockstep.elastic.generation_log import Arbiter, End, Member, Record, new_token
from lockstep.elastic.hang import stack_of
from lockstep.elastic.link import Link, Stranger
from lockstep.elastic.log_limiter import Seldom
from lockstep.elastic.protocol import Connect, Cut, Effect, Form, Leave, Limits, Look, Prepare, Propose, Protocol, Report, Say, Send
from lockstep.elastic.run_folder import token_of
from lockstep.elastic.watchdog import Watch, doing_at
from lockstep.errors import FencedError, LockstepError, PeersLostError, UsageError
from lockstep.log import let_out
from lockstep.record.events import note
from lockstep.runtime.exit_report import Account
from lockstep.runtime.signals import EXIT_CODES
from lockstep.runtime.subprocesses import tell_parent
from lockstep.runtime.worker_env import Seat, loopback_network, within_reach

log = logging.getLogger("lockstep")
TICK_S = 0.1
WISH_S = 1.0  # from one look for a signal to the next, while the main thread waits for a generation
CONNECT_S = 1.0
AGAIN_S = 0.01
YOUNG_S = 0.05  # for which a new connection is kept although others wait: its peer needs time to authenticate
DYING_S = 1.0  # for which a member that lets connections fall counts as being taken apart
SAY_S = 10.0  # from one line about refused connections of one peer, for one reason, to the next
STUCK_S = 3.0  # after which a collective in a group whose connections are cut is given up: it should have ended within milliseconds
LEAVE_S = 20.0  # that the main thread may take to get out of a broken group, once it has begun to: it should be milliseconds
STUCK_FORMING_S = 12.0  # the same while the group forms, which gloo gives up by itself before that (world.FORM_S)
SIGN_S = 10.0  # without a sign of life, after which an unreachable worker counts as dead; a leader writes one each second
AGREED = (0, 75, 130)
SAME = "start it with the command, the code and the versions of the others, on processors like theirs"


class RunEnded(LockstepError):
    """The run has ended, by the word of another: what was asked for is done, or cannot be."""

    def __init__(self, end: End) -> None:
        super().__init__(f"the run has ended with exit code {end.code}", "", "")
        self.end = end
        self.exit_code = end.code


class OthersBegan(Exception):
    """The first generation has formed without this worker, and is at work: it joins that once it is warm."""


class Membership:
    """This worker among those of its run.

    on_cut  ends all that waits in the group, at once; called from the thread, perhaps several times
    """

    def __init__(self, seat: Seat, limits: Limits, on_cut: Callable[[], None]) -> None:
        self.seat, self.on_cut = seat, on_cut
        self.board = Path(seat.state) / f"{seat.slot}.board"
        self.folder = Path(seat.folder)
        self.token = token_of(seat)
        self.arbiter = Arbiter(self.folder / "generations", since=seat.known)
        self._listener = socket.create_server((seat.address, 0), backlog=256)
        self._listener.setblocking(False)
        host, port = self._listener.getsockname()[:2]
        loopback = loopback_network() if ipaddress.ip_address(host.partition("%")[0]).is_loopback else ""
        self.me = Member(f"{seat.host}/{seat.slot}/{secrets.token_hex(4)}", seat.host, seat.slot, os.getpid(), f"{host}:{port}", loopback)
        self.protocol = Protocol(self.me, limits, tokens=new_token, now_s=time.monotonic(), after=seat.after)
        self.waiting = 0  # joiners; read by the main thread when it votes
        self.wants: Callable[[], str] = lambda: ""  # the signal with which this worker wants the run to stop; asked by the main thread
        self.main_thread = threading.get_ident()
        self.watch = Watch(hang_limits(limits), seat.host, self._ask_stack)
        self._links: dict[int, Link] = {}
        self._calls: queue.SimpleQueue[Callable[[], Sequence[Effect]] | None] = queue.SimpleQueue()
        self._disk: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._turn = threading.Condition()
        self._formed: Record | None = None
        self._gone: Exception | None = None
        self._others_began = False
        self._store: TCPStore | None = None  # of the generation that this worker proposed last
        self._busy_looking = False
        self._shown = False  # in the waiting room; the disk's thread alone looks at it
        self._signs: dict[str, str] = {}  # of members, as this worker saw them last
        self._cut_s = 0.0  # when the group was first cut; 0.0 while it is whole
        self._leaving_s = 0.0  # when the main thread began to leave the group; 0 while it does not
        self._unreachable_since_s: dict[str, float] = {}  # id -> since when a sign of life is waited for, of those who cannot be asked
        self._dying: list[Member] = []  # to whom a connection is tried again at once
        self._dying_since_s: dict[str, float] = {}  # id -> when that began
        self._refusals = Seldom(SAY_S)
        self._crowded = False  # the listener is left alone until the next turn
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._ended = False
        self._threads = [
            threading.Thread(target=self._run, name="lockstep-member", daemon=True),
            threading.Thread(target=self._serve_disk, name="lockstep-disk", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # -- what the main thread asks ----------------------------------------------------------------------------------------

    def ask(self, facts: Mapping[str, str], *, joins: bool) -> None:
        """This worker is warm and wants in. `joins`: to those that are at work, and with nobody else."""
        self._call(lambda: self.protocol.ask(time.monotonic(), facts, joins=joins))

    def know(self, facts: Mapping[str, str]) -> None:
        """What must be equal on all members: who wants to join and differs is refused."""

        self._call(lambda: self.protocol.know(dict(facts), time.monotonic()))

    def next(self, after: int) -> Record:
        """The first generation above `after` that this worker is in. FencedError, RunEnded or UsageError when there will be none;
        OthersBegan when it has to ask again."""
        with self._turn:
            while self._gone is None and not self._others_began and (self._formed is None or self._formed.number <= after):
                if name := self.wants():
                    self.stop(name)
                self._turn.wait(WISH_S)  # with a limit, so that a signal's handler gets its turn
            if self._others_began:
                self._others_began = False
                raise OthersBegan
            if self._gone is not None:
                raise self._gone
            assert self._formed is not None
            return self._formed

    @property
    def stop_wanted(self) -> str:
        """The signal with which the run is to stop, as far as this worker was told; "" for none."""
        return self.protocol.stops

    def stop(self, name: str) -> None:
        """The run is to save and stop, as on the signal `name`: also while it waits for workers."""
        if not self.stop_wanted:
            self._call(lambda: self.protocol.stop(name, time.monotonic()))

    def left(self, report: Report) -> None:
        """The main thread has left generation `report.number`."""
        self._leaving_s = 0.0
        self._call(lambda: self.protocol.left(report, time.monotonic()))

    def leaving(self) -> None:
        """The main thread has begun to leave the group; `left` follows."""
        self._leaving_s = time.monotonic()

    def evict(self, id: str, why: str) -> None:
        """Go on without a member."""
        self._call(lambda: self.protocol.evict(id, why, time.monotonic()))

    def close_doors(self) -> None:
        """Let nobody join any more, and wait for nobody: the run is about to end."""

        def close() -> Sequence[Effect]:
            self.protocol.limits = replace(self.protocol.limits, least=1)
            return self.protocol.close_doors()

        self._call(close)

    def over(self, number: int) -> str:
        """Why generation `number` has come to its end; "" while it lives."""
        record = self.protocol.record
        if self._gone is not None:
            return str(self._gone)
        return self.protocol.over if record is None or record.number <= number else "a newer generation exists"

    def end(self, end: End) -> None:
        """Write into the log that the run has ended; the others learn it there. Gives up when the disk does not do it."""
        done = threading.Event()

        def propose() -> None:
            with suppress(OSError):
                ended = write_end(self.arbiter, end)
                self._call(lambda: self.protocol.proposed(ended, time.monotonic()))
            done.set()

        self._disk.put(propose)
        done.wait(10.0)

    def await_end(self, number: int) -> None:
        """Wait until the run has ended. PeersLostError when generation `number` breaks before that."""
        while True:
            with self._turn:
                if isinstance(self._gone, RunEnded):
                    return
                if self._gone is not None:
                    raise self._gone
                self._turn.wait(0.05)
            if why := self.over(number):
                raise PeersLostError(why)

    def close(self) -> None:
        """End the threads and every link."""
        if self._ended:
            return
        self._ended = True
        self._calls.put(None)
        self._wake()
        self._threads[0].join(5.0)
        self._disk.put(lambda: waiting.leave(self.folder, self.me, sign_too=True))
        self._disk.put(None)
        self._threads[1].join(2.0)  # the disk may be gone: the thread ends with the process

    def sockets(self) -> set[int]:
        """The descriptors of the links: no part of the group."""
        return {self._listener.fileno(), *self._links}

    # -- the thread ---------------------------------------------------------------------------------------------------------

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
        except Exception as error:  # a fault of ours must end this worker, not leave it deaf
            log.exception("the member thread failed")
            self._leave(error)
            self._cut()
        for link in list(self._links.values()):
            self._drop(link)
        self._selector.close()
        self._listener.close()
        os.close(self._wake_reader)

    def _turn_once(self) -> bool:
        """Wait for something to happen, or for the next tick; tell the protocol, and carry out what it wants."""
        events_of = self._selector.select(AGAIN_S if self._dying or self._crowded else TICK_S)
        if self._crowded:
            self._crowded = False
            self._selector.register(self._listener, selectors.EVENT_READ)
        for key, events in events_of:
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
                self._do(function())
        now_s = time.monotonic()
        for link in [one for one in self._links.values() if not one.id and now_s - one.began_s > CONNECT_S]:
            self._fail(link, refused=False)
        again, self._dying = self._dying, []
        for member in again:
            self._connect(member)
        self._do(self.protocol.tick(now_s))
        if self._leaving_s and now_s - self._leaving_s > LEAVE_S:
            log.error("the main thread does not get out of the broken generation: this worker starts anew\n%s", stack_of(self.main_thread))
            end_here("stuck on its way out of a broken group", "")
        if self.protocol.over and self.protocol.phase == "in":
            self._cut()  # again: the main thread may have opened more since
            self._cut_s = self._cut_s or now_s
            where = in_a_collective() if now_s - self._cut_s > STUCK_S else ""
            forming = "in init_process_group" in where or "in new_group" in where
            if where and now_s - self._cut_s > (STUCK_FORMING_S if forming else STUCK_S):
                log.error(
                    "a collective of the broken generation does not end, though its connections are cut: this worker starts anew\n%s", where
                )
                end_here("stuck in a broken group", where)
        else:
            self._cut_s = 0.0
        self.waiting = self.protocol.waiting
        self._watch(now_s)
        return True

    def _watch(self, now_s: float) -> None:
        """As the hub, see whether everybody moves."""
        protocol = self.protocol
        if not protocol.leads or protocol.phase != "in" or protocol.over or protocol.record is None:
            self.watch.forget()
            return
        self.watch.beat(self.me.id, doing_at(self.board), now_s)
        verdict = self.watch.due(protocol.record, now_s)
        if verdict is None:
            return
        log.error("%s", verdict.paragraph)
        self._disk.put(lambda: hangs(self.folder, verdict))
        why = verdict.paragraph.partition(";")[0]
        if verdict.action == "end":
            threading.Thread(target=self.end, args=(End(1, verdict.paragraph),), daemon=True).start()
        elif self.me.id in verdict.culprits and verdict.action == "evict":
            # The main thread cannot be told. Once this process has ended, the next member is the hub.
            end_here(verdict.paragraph, stack_of(self.main_thread))
        elif verdict.action != "tell":
            for id in verdict.culprits:
                self._do(protocol.evict(id, why, now_s))
            if not verdict.culprits:
                self._do(protocol.break_up(why, now_s))

    def _ask_stack(self, id: str) -> None:
        if id == self.me.id:
            self.watch.stack(id, stack_of(self.main_thread))
        else:
            self._do([Send(id, {"kind": "where"})])

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, Look) and not (isinstance(effect, Send) and effect.message["kind"] == "beat"):
                log.debug("%s", effect)
            match effect:
                case Send(id, message):
                    if message["kind"] == "beat":
                        message = {"kind": "beat", "doing": doing_at(self.board)}
                    for link in [one for one in self._links.values() if one.id == id][:1]:
                        link.send(message)
                        self._flush(link)
                case Connect(member):
                    self._connect(member)
                case Look(known):
                    self._look(known)
                case Propose(record):
                    self._propose(record)
                case Cut(why):
                    newest = self.protocol.record
                    if newest and newest.end and newest.end.code in AGREED:
                        continue  # all have done all, and some may still be in the last collective
                    ending = self.protocol.limits.most == 0  # the doors are closed: members leave when they are done
                    log.log(logging.DEBUG if ending else logging.INFO, "generation %d is over: %s", self.protocol.number, why)
                    self._cut()
                case Form(record):
                    with self._turn:
                        self._formed = record
                        self._turn.notify_all()
                    self._disk.put(self._leave_room)
                case Prepare():
                    self._disk.put(self._leave_room)
                    with self._turn:
                        self._others_began = True
                        self._turn.notify_all()
                case Leave(why, fenced, end):
                    self._leave(RunEnded(end) if end else FencedError(why) if fenced else UsageError(why, self.me.id, SAME))
                case Say(text):
                    log.warning("%s", text)

    def _cut(self) -> None:
        with suppress(OSError):  # out of descriptors: each turn tries again, as long as the generation is over
            self.on_cut()

    def _leave(self, error: Exception) -> None:
        with self._turn:
            self._gone = error
            self._turn.notify_all()

    # -- links --------------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Accept waiting connections. Unauthenticated peers may use an eighth of the descriptors. At the limit the oldest such connection
        is closed for the next one, unless it is younger than YOUNG_S."""
        most = most_strangers()
        while True:
            strangers = [link for link in self._links.values() if not link.ours and not link.id]
            oldest = min(strangers, key=lambda link: link.began_s) if strangers else None
            if oldest and len(strangers) >= most:
                if time.monotonic() - oldest.began_s < YOUNG_S:
                    self._leave_listener()
                    return
                self._refuse(oldest, f"more than {most} connections are open whose peers have not proved to know this run's token")
            try:
                connection, _ = self._listener.accept()
                self._add(Link(connection, self.token, self.me.id, vars(self.me), ours=False, began_s=time.monotonic()))
            except BlockingIOError:
                return
            except ConnectionError:  # its peer has closed it already
                continue
            except OSError as error:  # out of descriptors or memory
                if oldest:
                    self._refuse(oldest, f"no connection can be accepted ({error.strerror})")
                self._leave_listener()
                return

    def _leave_listener(self) -> None:
        """Ignore the listener until the next turn."""
        if not self._crowded:
            self._crowded = True
            self._selector.unregister(self._listener)

    def _connect(self, member: Member) -> None:
        if not within_reach(member.loopback):
            self._wait_for_sign(member)
            return
        host, _, port = member.address.rpartition(":")
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:  # out of descriptors
            log.debug("no connection to %s can be opened: %s", member.id, error)
            self._do(self.protocol.connect_failed(member.id, False, time.monotonic()))
            return
        connection.setblocking(False)
        code = connection.connect_ex((host, int(port)))
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            self._do(self.protocol.connect_failed(member.id, code == errno.ECONNREFUSED, time.monotonic()))
            return
        began_s = time.monotonic()
        self._add(Link(connection, self.token, self.me.id, vars(self.me), True, began_s, expected=member.id, member=vars(member)))

    def _wait_for_sign(self, member: Member) -> None:
        """Watch a member whose loopback address belongs to another host: it counts as dead without a sign in the run folder for SIGN_S."""
        now_s = time.monotonic()
        if not self._unreachable_since_s:
            log.info("%s has a loopback address of another host: waiting %g s for a sign of life in the run folder", member.id, SIGN_S)
        since_s = self._unreachable_since_s.setdefault(member.id, now_s)
        self._do(self.protocol.connect_failed(member.id, now_s - since_s > SIGN_S, now_s))

    def _refuse_second_training(self, member: Member) -> Sequence[Effect]:
        """End this start: another host trains in this folder."""
        self.protocol.phase = "gone"
        self._leave(
            UsageError(
                f"another training is running on host {member.host}, in {self.folder}",
                f"generation {self.protocol.number}: {member.id} listens at {member.address}, which only that host reaches, and is alive",
                "wait for it, stop it there (lockstep launch --stop), or give another --out; to train on both hosts, use --hosts",
            )
        )
        return []

    def _add(self, link: Link) -> None:
        self._links[link.socket.fileno()] = link
        self._selector.register(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _serve(self, link: Link, events: int) -> None:
        known = link.id
        try:
            error = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            messages = link.receive() if events & selectors.EVENT_READ else []
            if link.id and not known:
                self._met(link)
            for message in messages:
                self._hear(link, message)
            self._flush(link)
        except (EOFError, ConnectionResetError):
            self._fail(link, refused=False, dying=link.ours and not link.id)
        except OSError as error:
            self._fail(link, refused=error.errno == errno.ECONNREFUSED)
        except (Stranger, KeyError, TypeError, ValueError) as error:
            self._refuse(link, str(error))

    def _refuse(self, link: Link, why: str) -> None:
        peer = peer_of(link.socket)
        if times := self._refusals.due((peer, why), time.monotonic()):
            log.warning("refused a connection from %s%s: %s", peer, f", {times} times" if times > 1 else "", why)
        self._fail(link, refused=False)

    def _met(self, link: Link) -> None:
        self._dying_since_s.pop(link.expected, None)
        if link.ours and link.id != link.expected:  # its port is another worker's now
            self._fail(link, refused=True)
        elif not link.id.startswith("control/") and len([one for one in self._links.values() if one.id == link.id]) == 1:
            self._do(self.protocol.link_up(link.id, time.monotonic()))

    def _hear(self, link: Link, message: dict[str, Any]) -> None:
        if link.id.startswith("control/"):
            link.send(self._answer(message))
        elif message["kind"] == "beat":
            self.protocol.heard_s[link.id] = time.monotonic()
            self.watch.beat(link.id, message.get("doing"), time.monotonic())
        elif message["kind"] == "where":
            threading.Thread(target=self._say_where, args=(link.id,), daemon=True).start()
        elif message["kind"] == "here":
            self.watch.stack(link.id, str(message["stack"]))
        else:
            self._do(self.protocol.heard(link.id, message, time.monotonic()))

    def _say_where(self, id: str) -> None:
        """Tell the hub the main thread's stack. On a thread of its own: source files are read from a disk, which may not answer."""
        message = {"kind": "here", "stack": stack_of(self.main_thread)}
        self._call(lambda: [Send(id, message)])

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a person's command."""
        if message["kind"] == "stop":
            name = str(message.get("signal"))
            self._do(self.protocol.stop(name if EXIT_CODES.get(name) else "SIGTERM", time.monotonic()))
            return {"kind": "stopping", "id": self.me.id}
        known = {"id": self.me.id, "membership": self.protocol.phase, "number": self.protocol.number, "waiting": self.protocol.waiting}
        return {"kind": "status", **known, "doing": doing_at(self.board)}

    def _flush(self, link: Link) -> None:
        try:
            link.flush()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_more else 0)
            self._selector.modify(link.socket, wanted, link)
        except KeyError:
            return  # dropped meanwhile
        except OSError:
            self._fail(link, refused=False)

    def _drop(self, link: Link) -> None:
        if self._links.pop(link.socket.fileno(), None) is not None:
            self._selector.unregister(link.socket)
        link.socket.close()

    def _fail(self, link: Link, *, refused: bool, dying: bool = False) -> None:
        """A link is gone, or never came to be.

        dying  the other side took the connection and let it fall before it was known: the kernel is taking a killed process apart, which
               takes the longer the more memory it had. A moment later it refuses. One that does so for DYING_S does not want this worker
        """
        met = link.id and not (link.ours and link.id != link.expected)
        self._drop(link)
        if met and not link.id.startswith("control/"):
            if not any(one.id == link.id for one in self._links.values()):
                self._do(self.protocol.link_down(link.id, time.monotonic()))
        elif dying and time.monotonic() - self._dying_since_s.setdefault(link.expected, time.monotonic()) < DYING_S:
            self._dying.append(Member(**link.member))
        elif link.ours:
            if refused:
                self._dying_since_s.pop(link.expected, None)
            self._do(self.protocol.connect_failed(link.expected, refused, time.monotonic()))

    # -- the disk -----------------------------------------------------------------------------------------------------------

    def _serve_disk(self) -> None:
        while (job := self._disk.get()) is not None:
            try:
                job()
            except OSError as error:
                log.debug("the run folder: %s", error)
                self._call(lambda: self.protocol.disk_failed(time.monotonic()))
            finally:
                self._busy_looking = False

    def _leave_room(self) -> None:
        waiting.leave(self.folder, self.me)
        self._shown = False  # who asks again shows itself again

    def _look(self, known: int) -> None:
        if self._busy_looking:
            return
        self._busy_looking = True
        out, signs = self.protocol.phase == "out", self.protocol.signs
        shows = out and self.protocol.asked
        members = self.protocol.record.members if self.protocol.record else ()

        def look() -> None:
            if shows and not self._shown:
                waiting.show(self.folder, self.me)
                self._shown = True
            if signs:
                waiting.sign(self.folder, self.me)
            newest = self.arbiter.newest(known)
            room = list(waiting.members(self.folder)) if out else []
            before, self._signs = self._signs, waiting.signs(self.folder, members) if out else {}
            alive = [id for id, sign in self._signs.items() if before.get(id, sign) != sign]
            for one in members:
                if one.id in alive and not within_reach(one.loopback):
                    self._call(partial(self._refuse_second_training, one))
                    return
            self._call(lambda: self.protocol.looked(newest, room, time.monotonic(), alive))

        self._disk.put(look)

    def _propose(self, record: Record) -> None:
        """Propose with a store on this worker, which listens before anybody can know of it: nobody has to wait for it."""

        def propose() -> None:
            with socket.create_server((self.seat.address, 0), backlog=1024) as listener:
                host, port = listener.getsockname()[:2]
                wanted = replace(record, store=f"{host}:{port}")
                winner = self.arbiter.propose(wanted)
                if winner.token == wanted.token and wanted.members:
                    size = len(wanted.members)
                    descriptor = listener.detach()
                    try:
                        self._store = TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
                    except RuntimeError as error:  # out of descriptors
                        raise OSError(None, f"no store can be opened: {error}") from error
            self._call(lambda: self.protocol.proposed(winner, time.monotonic()))

        self._disk.put(propose)


def end_here(why: str, stack: str) -> NoReturn:
    """End this process, whose main thread does not listen, for another in its place."""
    tell_parent(Account(FencedError.exit_code, time.monotonic(), why, stack, lost_peers=True))
    let_out()
    os._exit(FencedError.exit_code)


def in_a_collective() -> str:
    """The stack of a thread that is in a collective of torch; "" when none is."""
    for frame in sys._current_frames().values():
        if any(entry.f_code.co_filename.endswith("distributed_c10d.py") for entry, _ in traceback.walk_stack(frame)):
            return "".join(traceback.format_stack(frame))
    return ""


def hang_limits(limits: Limits) -> hang.Limits:
    """The limits of the hang verdict for a run's own."""
    allowances_s = hang.ALLOWANCES_S | {"evaluating": limits.evaluate_s}
    return hang.Limits(hang_s=limits.hang_s, allowances_s=allowances_s, silent_s=limits.silent_s, then=limits.on_hang)


def write_end(arbiter: Arbiter, end: End) -> Record:
    """Write into the log that the run has ended; the record that says so, which may be another's."""
    newest = arbiter.newest()
    while newest is None or not newest.end:
        number, step = (newest.number + 1, newest.step) if newest else (1, 0)
        newest = arbiter.propose(Record(number, new_token(), (), "", step, end.text or "the run has ended", end=end))
    return newest


def hangs(run: Path, verdict: hang.Verdict) -> None:
    """Note the verdict in the run's diary."""
    note(run, "hang", culprits=list(verdict.culprits), action=verdict.action, why=verdict.paragraph)


def most_strangers() -> int:
    """Return how many connections of unauthenticated peers may be open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(256, soft // 8)) if soft != resource.RLIM_INFINITY else 256


def peer_of(connection: socket.socket) -> str:
    """The other side's address, for the log."""
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "somebody"
