"""The rendezvous of workers without an agent: a TCPStore on rank 0, then a process group.

The launch variables fix rank and size. It waits for all ranks, or fails with the numbers of the
missing ones: a run never starts smaller than requested.
"""

import errno
import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

# Public at run time.
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lockstep.elastic.generation_group import GenerationGroup
from lockstep.elastic.world import World
from lockstep.errors import PeersLostError, UsageError
from lockstep.log import log
from lockstep.runtime.device import select_device
from lockstep.runtime.environment import NO_LAUNCHER, RankInfo, read_rank_info
from lockstep.runtime.exit_report import error_summary, is_peer_loss
from lockstep.runtime.process_group import init_default_group
from lockstep.runtime.sockets import choose_interface, open_sockets


@dataclass
class StoreConnection:
    """A process's connection to the store of its launch, kept for its later groups.

    Rank 0 keeps serving: another rank may form the next group before rank 0 has left this one.
    """

    info: RankInfo | None = None
    store: Store | None = None
    groups: int = 0  # formed so far; each has separate keys

    def next_store(self, info: RankInfo, deadline_s: float, timeout_s: float) -> Store:
        """Return the keys of the next group in the store of this launch, which is connected
        once."""
        if self.info != info:
            self.info = info
            self.store = None
            self.groups = 0
        self.store = self.store or connect(info, deadline_s, timeout_s)
        self.groups += 1
        return PrefixStore(f"lockstep-{info.attempt}-{self.groups}", self.store)


# Of this process: its launcher gives it one address for all of its groups.
LAUNCH_STORE = StoreConnection()


def join_static_group(threads: int, timeout_s: float) -> tuple[World, GenerationGroup]:
    """Collective. Form the process group that the launch variables describe; alone without them."""
    launched = read_rank_info(os.environ)
    device, reason = select_device(launched)
    info = launched or RankInfo(0, 1, 0, 1, "", 0, "no launcher")
    store = rendezvous(info, timeout_s, LAUNCH_STORE)
    if info.size > 1:
        interface, route = choose_interface(os.environ, info)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        reason = f"{reason}; gloo on {os.environ['GLOO_SOCKET_IFNAME']}: {route}"
    if info.rank == 0:
        source = launched or NO_LAUNCHER
        log.info("%s; %s, %d thread%s: %s", source, device, threads, "s"[: threads - 1], reason)
        for warning in info.warnings:
            log.warning("%s", warning)
    before = open_sockets()
    init_static_group(info, store, device, timeout_s)
    world = World(
        info.rank, info.size, info.local_rank, info.local_size, socket.gethostname(), device
    )
    return world, GenerationGroup(device, timeout_s, open_sockets() - before)


def rendezvous(
    info: RankInfo, timeout_s: float, connection: StoreConnection | None = None
) -> Store:
    """Collective. Return a store that all workers share, after all of them have connected.

    timeout_s   for missing workers
    connection  of this process, if it may form several groups, one after the other
    """
    if info.size == 1:
        return HashStore()
    connection = connection or StoreConnection()
    deadline_s = time.monotonic() + timeout_s
    try:
        store = connection.next_store(info, deadline_s, timeout_s)
        wait_for_all_ranks(info, store, deadline_s, timeout_s)
    except RuntimeError as error:
        if not is_peer_loss(error):
            raise
        raise PeersLostError(
            f"rank 0's store at {info.master_addr}:{info.master_port} "
            f"failed during the rendezvous of {info.size} workers",
            str(info),
            "another worker failed first, see its log",
        ) from error
    return store


def connect(info: RankInfo, deadline_s: float, timeout_s: float) -> Store:
    """Return the store at the master's address; rank 0 serves it, unless the launcher does."""
    is_master = info.rank == 0 and not info.launcher_has_store
    listen_fd = listen_on_master_port(info) if is_master else None
    wait_for_master(info, deadline_s, timeout_s)
    return TCPStore(
        info.master_addr,
        info.master_port,
        info.size,
        is_master=is_master,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def listen_on_master_port(info: RankInfo) -> int:
    """Return a descriptor that listens, on the master address if possible. UsageError if busy."""
    dual = socket.has_dualstack_ipv6()
    any_address = ("", socket.AF_INET6 if dual else socket.AF_INET, dual)
    try:
        for address, family, both in [*local_master_address(info.master_addr), any_address]:
            try:
                return socket.create_server(
                    (address, info.master_port), family=family, backlog=1024, dualstack_ipv6=both
                ).detach()
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or not address:
                    raise
        raise AssertionError("any_address comes last")
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        raise UsageError(
            f"port {info.master_port} is busy"
            if busy
            else f"cannot listen on port {info.master_port}: {error.strerror}",
            f"MASTER_PORT, on {socket.gethostname()}, set by {info.launcher}",
            "give all machines another port; "
            f"to see what holds it: ss -ltnp 'sport = :{info.master_port}'",
        ) from None


def local_master_address(master_addr: str) -> list[tuple[str, socket.AddressFamily, bool]]:
    """Return [(address, family, False)] of the master; [] if other machines may resolve another
    one. Debian resolves a machine's own name to 127.0.1.1, where other machines cannot reach it."""
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(
            master_addr, None, type=socket.SOCK_STREAM
        )[0]
    except OSError:
        return []
    loopback = ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    return (
        []
        if loopback and master_addr not in (address, "localhost")
        else [(str(address), family, False)]
    )


def wait_for_master(info: RankInfo, deadline_s: float, timeout_s: float) -> None:
    """Wait until the master port accepts connections; torch's client would flood the terminal."""
    pause_s = 0.02
    while True:
        try:
            left_s = max(0.1, deadline_s - time.monotonic())
            socket.create_connection((info.master_addr, info.master_port), timeout=left_s).close()
            return
        except OSError as error:
            if time.monotonic() + pause_s > deadline_s:
                raise PeersLostError(
                    f"rank {info.rank} cannot reach rank 0 "
                    f"at {info.master_addr}:{info.master_port}: {error}",
                    f"tried for {timeout_s:g} s from {socket.gethostname()}; "
                    f"set by {info.launcher}",
                    "is rank 0 running? does the name resolve here? "
                    "does a firewall block the port? "
                    f"Try: nc -vz {info.master_addr} {info.master_port}",
                ) from None
        time.sleep(pause_s)
        pause_s = min(1.0, 2 * pause_s)


def wait_for_all_ranks(info: RankInfo, store: Store, deadline_s: float, timeout_s: float) -> None:
    """Collective. Wait for all ranks. UsageError for wrong ones, PeersLostError for missing
    ones."""
    where = f"{info}; on {socket.gethostname()}, pid {os.getpid()}"
    size = int(store.compare_set("size", "", str(info.size)))
    if size != info.size:
        raise UsageError(
            f"different world sizes: {info.size} here, {size} on other workers",
            where,
            "start all machines with the same number of workers",
        )
    if store.add(f"rank {info.rank}", 1) > 1:
        raise UsageError(
            f"another worker already has rank {info.rank}",
            where,
            "too many workers were started, "
            "two machines have the same number, or an earlier run still holds the port",
        )
    pause_s, arrived = 0.005, store.add("came", 1)
    while arrived < size:
        if time.monotonic() > deadline_s:
            missing = [str(rank) for rank in range(size) if not store.check([f"rank {rank}"])]
            raise PeersLostError(
                f"{size - len(missing)} of {size} workers arrived within {timeout_s:g} s: "
                f"missing rank {', '.join(missing[:20])}{' ...' if len(missing) > 20 else ''}",
                str(info),
                "start the missing workers, or set the world size to the number of workers; "
                "nothing was trained",
            )
        time.sleep(pause_s)
        pause_s = min(0.2, 2 * pause_s)
        arrived = store.add("came", 0)


def init_static_group(info: RankInfo, store: Store, device: torch.device, timeout_s: float) -> None:
    """Collective. Initialize the process group over a store, which is not needed for it
    afterwards."""
    try:
        init_default_group(store, info.rank, info.size, device, timeout_s)
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
        raise PeersLostError(
            f"rank {info.rank} could not connect to the other {info.size - 1} workers: "
            f"{error_summary(error)}",
            f"GLOO_SOCKET_IFNAME={interface} on {socket.gethostname()}",
            "another worker may have failed, see its log; "
            "or set GLOO_SOCKET_IFNAME to the interface between the machines (ip -br addr)",
        ) from error
