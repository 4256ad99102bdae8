"""The rank of this process among all workers, and the process group that they share.

Under an agent the workers form numbered generations: a worker can leave the group and form the next one without a restart, so rank and
size change during a run. Elsewhere (torchrun, srun, two machines by hand) rank and size come from environment variables
(runtime/environment.py). The workers then meet at a store on rank 0 and wait for all ranks; a start with missing ranks fails with their
numbers and never continues as a smaller run. A single process has a group, too, so that callers need no second path.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # torch.distributed has them too, untyped

from lockstep.elastic.fault_injection import DRILL, FaultyBoard
from lockstep.elastic.generation_log import Arbiter, End, Record
from lockstep.elastic.membership import Membership, OthersBegan, RunEnded
from lockstep.elastic.protocol import Limits, Report
from lockstep.errors import FencedError, PeersLostError, UsageError
from lockstep.record.events import note
from lockstep.record.goodput import Ledger
from lockstep.runtime import numerics, sources
from lockstep.runtime.environment import Place, choose_device, find_place
from lockstep.runtime.exit_report import is_out_of_memory, peers_lost, plainly
from lockstep.runtime.numerics import seed_unseeded_generators
from lockstep.runtime.process_group import FORM_S, gather_json, init_group
from lockstep.runtime.signals import Stopped
from lockstep.runtime.status_board import Board
from lockstep.runtime.worker_env import ONE_SCREEN, Seat, find_seat, within_reach

log = logging.getLogger("lockstep")
T = TypeVar("T")
ABANDON_S = 5.0
LOOK_S = 0.02
TRIES = 50  # generations in a row that do not form


@dataclass
class World:
    """This process among all of them. Under an agent rank and size change with the generation; otherwise they stay.

    rank, size              among all workers of the run
    local_rank, local_size  among those of this machine
    node                    this machine's name
    device                  where this worker computes
    sockets                 gloo's, as (descriptor, name in /proc/self/fd), so that a failure can cut them
    membership              this worker's part in the generations; None: the group is for life
    generation              the number of the one that this worker is in
    joining                 others are at work, and this worker has not got the state from them yet: it has no group
    fresh                   all workers of the first group began together, so that what prepares a run is done by all
    members                 their ids, in the order of the ranks
    standing, standings     where this worker stands, told to all when a generation forms, and where each of them stood then
    code                    with which the run ends, when this worker leaves without an error
    board, ledger           what this worker is doing, for its agent and for the verdict on a hang; where the run's time went
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    device: torch.device
    sockets: tuple[tuple[int, str], ...] = field(default=(), repr=False, compare=False)
    membership: Membership | None = field(default=None, repr=False, compare=False)
    generation: int = 0
    joining: bool = False
    fresh: bool = True
    timeout_s: float = 600.0
    members: tuple[str, ...] = ()
    standing: dict[str, Any] = field(default_factory=lambda: {"at": "join", "step": -1})
    standings: list[dict[str, Any]] = field(default_factory=list)
    code: int = 0
    board: Board = field(default_factory=lambda: Board(None), repr=False, compare=False)
    ledger: Ledger = field(default_factory=lambda: Ledger(time.monotonic()), repr=False, compare=False)
    _before: set[tuple[int, str]] = field(default_factory=set, repr=False, compare=False)
    _forming: bool = field(default=False, repr=False, compare=False)
    _users: dict[str, weakref.ref[object]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def leader(self) -> bool:
        """Whether this is rank 0, which alone writes what there is one of."""
        return self.rank == 0

    def leads(self) -> bool:
        """Whether this is rank 0 now: for who must follow a change of generation."""
        return self.leader

    @property
    def local_leader(self) -> bool:
        """Whether this is the first worker of its machine."""
        return self.local_rank == 0

    def shows(self) -> bool:
        """Whether this process shows now how far the run is: the first worker of its machine, or of all machines that share a screen."""
        if os.environ.get(ONE_SCREEN) != "1" or not self.members:
            return self.local_leader
        firsts = [rank for rank, id in enumerate(self.members) if id.split("/")[1] == "0"]
        return firsts[:1] == [self.rank]

    @property
    def number(self) -> int:
        """What this process is called in logs: its slot on its machine under an agent, else its rank."""
        return self.membership.seat.slot if self.membership else self.rank

    @classmethod
    def join(cls, threads: int = 1, timeout_s: float = 600.0, limits: Limits | None = None) -> World:
        """Collective. The place of this process, in a group with all others. Also a context: `with World.join() as world:`.

        threads    of torch in this process; their number changes bits, so it belongs to the run
        timeout_s  after which a missing or silent peer counts as lost, now and in every collective
        limits     under an agent: how soon a peer that says nothing, or a run that does not move, has a consequence
        Seeds the global generators of torch, NumPy and Python with 0, where the user has not seeded them.
        Errors: UsageError (the environment contradicts itself, a busy port), PeersLostError (others did not come).
        """
        torch.set_num_threads(threads)
        seed_unseeded_generators()
        if seat := find_seat(os.environ):
            return cls.sit(seat, timeout_s, limits or Limits())
        place, found = find_place(os.environ)
        device, why = take_device(place)
        place = place or Place(0, 1, 0, 1, "", 0, "nobody")
        store = meet(place, timeout_s, found)
        if place.size > 1:
            name, route = choose_interface(os.environ, place)
            if name:
                os.environ["GLOO_SOCKET_IFNAME"] = name
            why = f"{why}; gloo on {os.environ['GLOO_SOCKET_IFNAME']}: {route}"
        if place.rank == 0:
            log.info("%s; %s, %d thread%s: %s", found, device, threads, "s"[: threads - 1], why)
            for warning in place.warnings:
                log.warning("%s", warning)
        before = open_sockets()
        form(place, store, device, timeout_s)
        sockets = tuple(sorted(open_sockets() - before))
        return cls(place.rank, place.size, place.local_rank, place.local_size, socket.gethostname(), device, sockets)

    def take(self, user: object) -> None:
        """Register a Team or Keeper. UsageError while another of its kind is open: two Teams would vote and regroup independently."""
        kind = type(user).__name__
        if (holder := self._users.get(kind)) and holder() is not None:
            raise UsageError(
                f"a second {kind} on one World",
                f"{kind}(...) while the first one is open",
                "put all trained modules into one nn.ModuleDict with one Team and one Keeper, or close the first one (`with`) before",
            )
        self._users[kind] = weakref.ref(user)

    def give_back(self, user: object) -> None:
        """Unregister a Team or Keeper that was closed."""
        self._users.pop(type(user).__name__, None)

    # -- under an agent -------------------------------------------------------------------------------------------------

    @classmethod
    def sit(cls, seat: Seat, timeout_s: float, limits: Limits) -> World:
        """Collective. The world of a worker that an agent started.

        With all other workers in a first generation; or `joining`, when a generation is at work, or when the first one begins without this
        worker, which stands by: `enter` comes later, when the state of the others can be taken, so that they need not wait until this
        worker has built its model.
        """
        device, why = take_device(Place(seat.slot, seat.slots, seat.slot, seat.slots, "", 0, "lockstep"))
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(seat.address)
        world = cls(-1, 0, seat.slot, seat.slots, seat.host, device, timeout_s=timeout_s)
        limits = replace(limits, expected=seat.expected, least=seat.least, most=seat.most)
        path = Path(seat.state) / f"{seat.slot}.board"
        world.board = FaultyBoard(path, path.with_suffix(".fault")) if os.environ.get(DRILL) == "1" else Board(path)
        world.board.tell_of_compiling()
        world.membership = Membership(seat, limits, world.cut)
        if seat.slot == 0:
            log.info("%s, %d of %d workers on %s: %s", device, seat.slots, seat.expected, seat.host, why)
        try:
            world.joining = others_at_work(Path(seat.folder), seat)
            if not world.joining:
                world.begin()
        except BaseException:
            world.membership.close()
            raise
        return world

    def begin(self) -> None:
        """Collective. Take part in the first generation, in which nobody has built anything yet. Where it is at work without this worker,
        that is `joining` from then on."""
        assert self.membership is not None
        self.membership.ask({}, joins=False)
        try:
            self.form_next()
        except OthersBegan:
            self.joining = True

    def enter(self, facts: Mapping[str, str]) -> None:
        """Collective. Join those that are at work. `facts`, and what decides the bits of this process, must be equal on all."""
        assert self.membership is not None
        self.membership.ask(self.facts(facts), joins=True)
        self.form_next()

    def know(self, facts: Mapping[str, str]) -> None:
        """What must be equal on all who train together; whoever wants to join and differs is refused."""
        if self.membership:
            self.membership.know(self.facts(facts))

    def facts(self, facts: Mapping[str, str]) -> dict[str, str]:
        """Return everything that must be equal on all workers: `facts`, the numerics, the code, the flags of an own loop."""
        return {**numerics.fingerprint(self.device), **sources.fingerprint(), **self.flags, **facts}

    @property
    def flags(self) -> dict[str, str]:
        """The arguments of a user's own function, as they were given to the agent."""
        return {f"--{name}": text for name, text in self.membership.seat.flags.items()} if self.membership else {}

    def form_next(self) -> None:
        """Collective. Form the next generation that this worker is in, and hear where each of its members stands.

        A generation that breaks while it forms is left for the one after it. FencedError when nobody may go on from what this one holds.
        """
        assert self.membership is not None
        last = self.generation
        for _ in range(TRIES):
            record = self.membership.next(after=self.generation)
            if why := self.membership.arbiter.condemned(last):
                raise FencedError(why, "by the word of those that found it", "this worker is started anew")
            self.generation = record.number
            try:
                self._form(record)
                spent = self.ledger.to_json(time.monotonic(), time.time())
                self.standings = gather_json(self.size, self.standing | {"fresh": self.fresh, "time": spent})
                break
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                why = plainly(error)
                error.__traceback__ = None  # it holds the group
            self.leave_group(why)
        else:
            raise PeersLostError(f"{TRIES} generations in a row did not form: {why}", f"{self.node}, {self.membership.me.address}")
        steps = [int(one["step"]) for one in self.standings]
        self.joining = self.standing["step"] < 0 <= max(steps)
        if self.joining:  # who may lead one day counts the time of the run, not its own
            spent = self.standings[steps.index(max(steps))]["time"]
            self.ledger = Ledger.from_json(spent, time.monotonic(), self.ledger.category)
        self.fresh = all(one["fresh"] for one in self.standings) and max(steps) < 0  # the same on all: collectives depend on it
        if max(steps) < 0 and len({one["at"] for one in self.standings}) > 1:
            raise FencedError("the workers of this start do not stand at the same place", self.members[self.rank], "they are started anew")

    def leave_group(self, why: str, *, leaving: bool = False) -> None:
        """Leave the group of this generation, whole or broken, and tell the others where this worker stands."""
        assert self.membership is not None
        log.debug("leaving generation %d: %s", self.generation, why)
        self.membership.leaving()
        self.abandon()
        self.membership.left(Report(self.generation, int(self.standing["step"]), leaving, why))

    def lost(self, error: BaseException) -> bool:
        """Whether an error means that the next generation is to be formed. Not a lack of memory, which would be the same there."""
        if self.membership is None or isinstance(error, FencedError):
            return False
        if not isinstance(error, RuntimeError) or is_out_of_memory(error):
            return isinstance(error, PeersLostError)
        return peers_lost(error) or bool(self.broken())

    def redo(self, function: Callable[[], T]) -> T:
        """Collective. What `function` gives, called again from its beginning with the members of the next generation whenever one is lost.

        For what all do together outside of the steps. Nobody joins from now on.
        """
        if self.membership:
            self.membership.close_doors()
        while True:
            try:
                return function()
            except Exception as error:
                if not self.lost(error):
                    raise
                why = plainly(error)
                error.__traceback__ = None  # it holds the group
            self.leave_group(why)
            self.form_next()

    @contextmanager
    def during(self, phase: Literal["saving", "evaluating"]) -> Iterator[None]:
        """Be in `phase`, on the board and in the ledger."""
        before = self.ledger.switch(phase, time.monotonic())
        try:
            with self.board.during(phase):
                yield
        finally:
            self.ledger.switch(before, time.monotonic())

    def evict(self, rank: int, why: str) -> None:
        """Go on without a member, from the next generation on."""
        assert self.membership is not None
        self.membership.evict(self.members[rank], why)

    def condemn(self, why: str, facts: dict[str, Any]) -> None:
        """See to it that nobody goes on from what the members of this generation hold, also who has not found out: all begin anew."""
        if self.membership:
            try:
                self.membership.arbiter.condemn(self.generation, why, facts)
            except OSError as error:
                log.error("it could not be written down that nobody may go on from generation %d: %s", self.generation, error)

    def broken(self) -> str:
        """Why this generation has come to its end; "" while it lives, and where groups are for life."""
        return self.membership.over(self.generation) if self.membership else ""

    def _form(self, record: Record) -> None:
        """Collective. The process group of a generation. RuntimeError when it does not come to be."""
        rank = record.rank_of(self.membership.me.id) if self.membership else None
        assert rank is not None
        self.board.enter("joining", generation=record.number)
        self.rank, self.size = rank, len(record.members)
        self.members = tuple(one.id for one in record.members)
        mine = sorted(one.slot for one in record.members if one.host == self.node)
        self.local_rank, self.local_size = mine.index(record.members[rank].slot), len(mine)
        self._before = open_sockets()
        if why := self.broken():
            raise RuntimeError(why)
        store = self._reach_store(record.store)
        prefixed = PrefixStore(f"generation-{record.number}-{record.token}", store)
        init_group(prefixed, self.rank, self.size, self.device, FORM_S)  # where two members do not reach each other, it ends soon
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_s), dist.group.WORLD)
        self.sockets = tuple(sorted(open_sockets() - self._before))
        log.info("generation %d: rank %d of %d (%s)", record.number, self.rank, self.size, record.reason)

    def _reach_store(self, address: str) -> TCPStore:
        """The store at "ADDRESS:PORT". RuntimeError when it does not answer, or the generation is over.

        On a thread: where nobody listens any more torch's client tries again and again for its whole time-out, and nothing stops it.
        """
        host, _, port = address.rpartition(":")
        reached: Future[TCPStore] = Future()

        def reach() -> None:
            try:
                reached.set_result(TCPStore(host, int(port), self.size, is_master=False, timeout=timedelta(seconds=FORM_S)))
            except RuntimeError as error:
                reached.set_exception(error)

        threading.Thread(target=reach, daemon=True).start()
        while True:
            try:
                return reached.result(LOOK_S)
            except TimeoutError:
                if why := self.broken():
                    raise RuntimeError(why) from None

    def cut(self) -> None:
        """End all that waits in this generation's groups, formed or forming. For the member thread."""
        links = self.membership.sockets() if self.membership else set()
        now = open_sockets()
        forming = now - self._before if not self.sockets or self._forming else set()
        cut_sockets(one for one in now & set(self.sockets) | forming if one[0] not in links)

    @contextmanager
    def more_groups(self) -> Iterator[None]:
        """Groups of some members are formed inside: they are left and cut like the group of all."""
        self._before, self._forming = open_sockets(), True
        try:
            yield
        finally:
            self.sockets = tuple(sorted({*self.sockets, *(open_sockets() - self._before)}))
            self._forming = False

    # -- leaving ----------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Close the group; its threads, sockets and port are gone."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave after a failure, when peers may hang: pending collectives end here and there, at once, with an error.

        Closing a gloo group waits for its pending collectives, up to its time-out; cutting its sockets ends those in milliseconds. NCCL may
        still wait, so it gets a few seconds, and then the end of the process closes it.
        """
        cut_sockets(open_sockets() & set(self.sockets))
        self.sockets = ()
        self._before = open_sockets()
        closing = threading.Thread(target=self.leave, daemon=True)
        closing.start()
        closing.join(ABANDON_S)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave. An error of torch that says that a peer is gone becomes a PeersLostError."""
        try:
            if error is None or isinstance(error, Stopped):
                if self.membership:
                    self.tell_goodput(self.membership.folder)
                    self._conclude(self.membership, End(self.code if error is None else int(str(error))))
                self.leave()
                return
            with suppress(RuntimeError):  # no memory for a thread: the end of the process closes the group
                self.abandon()
        finally:
            if self.membership:
                self.membership.close()
        if not isinstance(error, PeersLostError) and peers_lost(error):
            raise PeersLostError(
                f"rank {self.rank} lost its peers: {plainly(error)}",
                f"{self.node}, pid {os.getpid()}",
                "the first failure is another worker's, see its log; the same command goes on from the newest checkpoint",
            ) from error

    def tell_goodput(self, folder: Path) -> None:
        """Show where the time of the run in `folder` went, and note it in its diary."""
        if self.leader:
            note(folder, "goodput", **self.ledger.summary(time.monotonic()))
        log.log(logging.INFO if self.shows() else logging.DEBUG, self.ledger.show(time.monotonic()))

    def _conclude(self, membership: Membership, end: End) -> None:
        """Collective. Nobody leaves before all have done all; then the leader writes down that the run has ended, and they go."""

        def part() -> None:
            gather_json(self.size, "done")
            if self.leader:
                membership.end(end)
            else:
                membership.await_end(self.generation)

        with suppress(RunEnded):
            self.redo(part)


# Under an agent.


def take_device(place: Place | None) -> tuple[torch.device, str]:
    """(where this worker computes, the reason). A GPU is made the current one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name, why = choose_device(os.environ, place, gpus)
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device, why


def others_at_work(folder: Path, seat: Seat) -> bool:
    """Whether a generation is at work in `folder`. UsageError when it is on another host, and this start is for one host alone."""
    newest = Arbiter(folder / "generations", since=seat.known).newest()
    if newest is None or newest.end:
        return False
    alive = [one for one in newest.members if within_reach(one.loopback) and answers(one.address)]
    foreign = [one for one in alive if one.host != seat.host]
    if seat.agent and foreign:
        raise UsageError(
            f"another training is at work in {folder}",
            f"generation {newest.number} on {', '.join(sorted({one.host for one in foreign}))}",
            "wait for it, stop it with lockstep launch --stop, or give another --out",
        )
    return bool(alive)


def answers(address: str) -> bool:
    """Whether something listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
        return True
    except OSError:
        return False


def interface_of(address: str) -> str:
    """The network interface that has `address`. UsageError when none does."""
    found = psutil.net_if_addrs()
    of_address: dict[str, str] = {one.address.partition("%")[0]: name for name, all_of in found.items() for one in all_of}
    if address.startswith("127.") and address not in of_address:
        return of_address["127.0.0.1"]
    if address not in of_address:
        raise UsageError(f"{address} is no address of {socket.gethostname()}", "hosts file", f"it has {', '.join(sorted(of_address))}")
    return of_address[address]


def cut_sockets(some: Iterable[tuple[int, str]]) -> None:
    """Shut connections down in both directions: whoever waits in one, here or there, gets an error at once."""
    for descriptor, name in some:
        # gloo's own thread may close a pair at any moment, when the peer is gone too.
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") != name:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as pair:
                if not pair.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo's listener ends the process when it is cut
                    pair.shutdown(socket.SHUT_RDWR)


def meet(place: Place, timeout_s: float, found: str) -> Store:
    """Collective. A store that all workers share, once every one of them is there."""
    os.environ.pop("LOCKSTEP_LISTEN_FD", None)  # the socket is used up below; the number means nothing to our children
    if place.size == 1:
        if place.listen_fd is not None:
            os.close(place.listen_fd)
        return HashStore()
    deadline_s = time.monotonic() + timeout_s
    hosting = place.rank == 0 and not place.store_given
    listen_fd = (take_socket(place.listen_fd) if place.listen_fd is not None else listen(place)) if hosting else None
    try:
        reach(place, deadline_s, timeout_s)
        store: Store = TCPStore(
            place.master_addr,
            place.master_port,
            place.size,
            is_master=hosting,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
        store = PrefixStore(f"lockstep-{place.attempt}", store)
        call_the_roll(place, store, deadline_s, timeout_s, found)
    except RuntimeError as error:
        if not peers_lost(error):
            raise
        raise PeersLostError(
            f"rank 0's store at {place.master_addr}:{place.master_port} went away while the {place.size} workers met",
            found,
            "the first failure is another worker's, see its log",
        ) from error
    return store


def take_socket(descriptor: int) -> int:
    """The inherited descriptor, when it is a listening socket. UsageError when it is none."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as one:
            listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        listening = 0
    if not listening:
        raise UsageError(
            f"descriptor {descriptor} is no listening socket",
            f"environment: LOCKSTEP_LISTEN_FD={descriptor}",
            "something between `lockstep` and this worker closed it; start the workers without a shell in between",
        )
    return descriptor


def listen(place: Place) -> int:
    """A descriptor that listens at the master's port, on its address where this machine has it. UsageError when the port is taken."""
    dual = socket.has_dualstack_ipv6()
    everywhere = ("", socket.AF_INET6 if dual else socket.AF_INET, dual)
    try:
        for address, family, both in [*own_address(place.master_addr), everywhere]:
            try:
                return socket.create_server((address, place.master_port), family=family, backlog=1024, dualstack_ipv6=both).detach()
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or not address:
                    raise
        raise AssertionError("everywhere is the last")
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        raise UsageError(
            f"port {place.master_port} is busy" if busy else f"port {place.master_port} cannot be had: {error.strerror}",
            f"MASTER_PORT, on {socket.gethostname()}, set by {place.starter}",
            f"give another port to all machines; who holds it: ss -ltnp 'sport = :{place.master_port}'",
        ) from None


def own_address(master_addr: str) -> list[tuple[str, socket.AddressFamily, bool]]:
    """(address, family, False) of the master as this machine knows it; none where others may know another one.

    A machine's own name may stand for a loopback address in its own files (Debian: 127.0.1.1), where other machines cannot reach it.
    """
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(master_addr, None, type=socket.SOCK_STREAM)[0]
    except OSError:
        return []
    loopback = ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    return [] if loopback and master_addr not in (address, "localhost") else [(str(address), family, False)]


def reach(place: Place, deadline_s: float, timeout_s: float) -> None:
    """Wait until the master's port answers: torch's own client fills the terminal while it waits. PeersLostError when it does not."""
    pause_s = 0.02
    while True:
        try:
            left_s = max(0.1, deadline_s - time.monotonic())
            socket.create_connection((place.master_addr, place.master_port), timeout=left_s).close()
            return
        except OSError as error:
            if time.monotonic() + pause_s > deadline_s:
                raise PeersLostError(
                    f"rank {place.rank} cannot reach rank 0 at {place.master_addr}:{place.master_port}: {error}",
                    f"tried for {timeout_s:g} s from {socket.gethostname()}; set by {place.starter}",
                    "is rank 0 running, does the name resolve here, does a firewall stand between? "
                    f"Try: nc -vz {place.master_addr} {place.master_port}",
                ) from None
        time.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)


def call_the_roll(place: Place, store: Store, deadline_s: float, timeout_s: float, found: str) -> None:
    """Collective. Return when all have come; UsageError for a wrong size or a rank given twice; PeersLostError for missing ones."""
    size = int(store.compare_set("size", "", str(place.size)))
    if size != place.size:
        raise UsageError(
            f"this worker was told of {place.size} workers, others of {size}",
            f"{found}; on {socket.gethostname()}, pid {os.getpid()}",
            "start all machines with the same number of workers",
        )
    if store.add(f"rank {place.rank}", 1) > 1:
        raise UsageError(
            f"there is another rank {place.rank} already",
            f"{found}; on {socket.gethostname()}, pid {os.getpid()}",
            "more workers were started than asked for, two machines have one number, or an earlier run still holds the port",
        )
    pause_s, came = 0.005, store.add("came", 1)
    while came < size:
        if time.monotonic() > deadline_s:
            missing = [str(rank) for rank in range(size) if not store.check([f"rank {rank}"])]
            raise PeersLostError(
                f"{size} workers were asked for, {size - len(missing)} came within {timeout_s:g} s: "
                f"no rank {', '.join(missing[:20])}{' ...' if len(missing) > 20 else ''}",
                found,
                "start the missing ones, or give the number that there is; nothing was trained",
            )
        time.sleep(pause_s)
        pause_s = min(0.2, 2 * pause_s)
        came = store.add("came", 0)


def form(place: Place, store: Store, device: torch.device, timeout_s: float) -> None:
    """Collective. The process group over a store; when it returns, nobody needs the store for it any more."""
    try:
        init_group(store, place.rank, place.size, device, timeout_s)
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
        raise PeersLostError(
            f"all {place.size} workers came, and rank {place.rank} could not connect to them: {plainly(error)}",
            f"GLOO_SOCKET_IFNAME={interface} on {socket.gethostname()}",
            "another worker may have failed, see its log; or set GLOO_SOCKET_IFNAME to the interface between the machines (ip -br addr)",
        ) from error


def open_sockets() -> set[tuple[int, str]]:
    """The sockets of this process, as (descriptor, name); the kernel's name tells a descriptor that was given out anew."""
    found = set()
    for entry in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with suppress(OSError):  # closed since
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                found.add((int(entry), name))
    return found


def choose_interface(environ: Mapping[str, str], place: Place) -> tuple[str, str]:
    """(the network interface for gloo, the reason); "" when the environment names one. By itself gloo may take a container's bridge."""
    if environ.get("GLOO_SOCKET_IFNAME"):
        return "", "GLOO_SOCKET_IFNAME"
    alone = place.size == place.local_size
    source = "127.0.0.1" if alone else source_address(place.master_addr, place.master_port)
    of_address = {one.address.partition("%")[0]: name for name, all_of in psutil.net_if_addrs().items() for one in all_of}
    name = of_address.get("127.0.0.1" if source.startswith("127.") else source, "")
    if not alone and (source.startswith("127.") or source == "::1"):
        raise UsageError(
            f"{place.master_addr} is {source} on {socket.gethostname()}, where the other machines cannot reach it",
            f"MASTER_ADDR, set by {place.starter}, for {place.size} workers on several machines",
            "set MASTER_ADDR to an address in the network between them (Debian's /etc/hosts gives a machine's own name 127.0.1.1), "
            "or GLOO_SOCKET_IFNAME to the interface",
        )
    return name, "all workers are on this machine" if alone else f"the route to {place.master_addr} leaves from {source}"


def source_address(host: str, port: int) -> str:
    """The address from which packets to `host` leave. Connecting a datagram socket picks the route and sends nothing (connect(2))."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        source: str = probe.getsockname()[0]
        return source.partition("%")[0]
