"""Who this process is among all of them, and the group in which they talk.

`join` takes the place that the environment gives (place.py), meets the others at a store that rank 0 holds, calls the roll, and only then
forms the group: a start that is not whole ends with the names of those that are missing, and never as a smaller run. There is always a
group, of one process too, so that nothing downstream needs a second path.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # torch.distributed has them too, untyped

from lockstep.errors import PeersLostError, UsageError
from lockstep.failures import peers_lost, plainly
from lockstep.place import Place, choose_device, find_place

log = logging.getLogger("lockstep")
ABANDON_S = 5.0


@dataclass(frozen=True)
class World:
    """This process among all of them.

    rank, size              among all workers of the run
    local_rank, local_size  among those of this machine
    node                    this machine's name
    device                  where this worker computes
    sockets                 gloo's, as (descriptor, name in /proc/self/fd), so that a failure can cut them
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    device: torch.device
    sockets: tuple[tuple[int, str], ...] = field(default=(), repr=False, compare=False)

    @property
    def leader(self) -> bool:
        """Whether this is rank 0, which alone writes what there is one of."""
        return self.rank == 0

    @property
    def local_leader(self) -> bool:
        """Whether this is the first worker of its machine."""
        return self.local_rank == 0

    @classmethod
    def join(cls, threads: int = 1, timeout_s: float = 600.0) -> World:
        """Collective. The place of this process, in a group with all others. Also a context: `with World.join() as world:`.

        threads    of torch in this process; their number changes bits, so it belongs to the run
        timeout_s  after which a missing or silent peer counts as lost, now and in every collective
        Errors: UsageError (the environment contradicts itself, a busy port), PeersLostError (others did not come).
        """
        place, found = find_place(os.environ)
        torch.set_num_threads(threads)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        name, why = choose_device(os.environ, place, gpus)
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.set_device(device)
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

    def leave(self) -> None:
        """Close the group; its threads, sockets and port are gone."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave after a failure, when peers may hang: pending collectives end here and there, at once, with an error.

        Closing a gloo group waits for its pending collectives, up to its time-out; cutting its sockets ends those in milliseconds. NCCL may
        still wait, so it gets a few seconds, and then the end of the process closes it.
        """
        for one in open_sockets() & set(self.sockets):
            # gloo's own thread may close a pair at any moment, when the peer is gone too.
            with suppress(OSError), socket.socket(fileno=os.dup(one[0])) as pair:
                if not pair.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo's listener ends the process when it is cut
                    pair.shutdown(socket.SHUT_RDWR)
        closing = threading.Thread(target=self.leave, daemon=True)
        closing.start()
        closing.join(ABANDON_S)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave. An error of torch that says that a peer is gone becomes a PeersLostError."""
        if error is None:
            self.leave()
            return
        self.abandon()
        if not isinstance(error, PeersLostError) and peers_lost(error):
            raise PeersLostError(
                f"rank {self.rank} lost its peers: {plainly(error)}",
                f"{self.node}, pid {os.getpid()}",
                "the first failure is another worker's, see its log; the same command goes on from the newest checkpoint",
            ) from error


# Meeting.


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
    """A descriptor that listens at the master's port on all interfaces. UsageError when the port is taken."""
    dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", place.master_port), family=family, backlog=1024, dualstack_ipv6=dual).detach()
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        raise UsageError(
            f"port {place.master_port} is busy" if busy else f"port {place.master_port} cannot be had: {error.strerror}",
            f"MASTER_PORT, on {socket.gethostname()}, set by {place.starter}",
            f"give another port to all machines; who holds it: ss -ltnp 'sport = :{place.master_port}'",
        ) from None


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
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=timeout_s))
        dist.all_reduce(torch.zeros(1))
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
