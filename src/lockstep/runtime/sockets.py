"""The open sockets of this process, how to break their connections, and gloo's network
interface."""

import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress

import psutil

from lockstep.errors import UsageError
from lockstep.runtime.environment import RankInfo


def open_sockets() -> set[tuple[int, str]]:
    """Return the sockets as (file descriptor, kernel name); the name detects reused descriptors."""
    sockets = set()
    for entry in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                sockets.add((int(entry), name))
    return sockets


def reserve_port(address: str) -> socket.socket:
    """Return a socket bound to a free port, on which a program that knows the port can listen."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    return reserved


def is_refused(host: str, port: int) -> bool:
    """Return whether the host answers that nothing listens at the port: its process exited."""
    try:
        socket.create_connection((host, port), timeout=0.2).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # no answer
        return False
    return False


def shutdown_sockets(sockets: Iterable[tuple[int, str]]) -> None:
    """Shut down connections: reads and writes on both sides fail at once."""
    for descriptor, name in sockets:
        # gloo's own thread may close a pair at any moment, if the peer has gone too.
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") != name:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as pair:
                # Shutting down gloo's listener would end the process.
                if not pair.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    pair.shutdown(socket.SHUT_RDWR)


def interface_with_address(address: str) -> str:
    """Return the network interface that has `address`. UsageError if none has it."""
    interface_of = interfaces_by_address()
    if address.startswith("127.") and address not in interface_of:
        return interface_of["127.0.0.1"]
    if address not in interface_of:
        raise UsageError(
            f"{address} is not an address of {socket.gethostname()}",
            "hosts file",
            f"it has {', '.join(sorted(interface_of))}",
        )
    return interface_of[address]


def interfaces_by_address() -> dict[str, str]:
    return {
        item.address.partition("%")[0]: name
        for name, items in psutil.net_if_addrs().items()
        for item in items
    }


def choose_interface(environ: Mapping[str, str], info: RankInfo) -> tuple[str, str]:
    """Return (network interface for gloo, reason). gloo itself may pick a container bridge."""
    if environ.get("GLOO_SOCKET_IFNAME"):
        return "", "GLOO_SOCKET_IFNAME"
    alone = info.size == info.local_size
    source = "127.0.0.1" if alone else source_address(info.master_addr, info.master_port)
    name = interfaces_by_address().get("127.0.0.1" if source.startswith("127.") else source, "")
    if not alone and (source.startswith("127.") or source == "::1"):
        raise UsageError(
            f"{info.master_addr} is {source} on {socket.gethostname()}, "
            "where other machines cannot reach it",
            f"MASTER_ADDR, set by {info.launcher}, for {info.size} workers on several machines",
            "set MASTER_ADDR to an address in the network between them (Debian's /etc/hosts "
            "maps a machine's own name to 127.0.1.1), or GLOO_SOCKET_IFNAME to the interface",
        )
    return (
        name,
        "all workers are on this machine"
        if alone
        else f"the route to {info.master_addr} leaves from {source}",
    )


def source_address(host: str, port: int) -> str:
    """Return the local address of the route to `host`. This sends nothing (connect(2))."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        source: str = probe.getsockname()[0]
        return source.partition("%")[0]
