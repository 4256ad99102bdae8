"""The open sockets of this process, and how to break their connections."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress


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


def shutdown_sockets(sockets: Iterable[tuple[int, str]]) -> None:
    """Shut down connections: reads and writes on both sides fail at once."""
    for descriptor, name in sockets:
        # gloo's own thread may close a pair at any moment, if the peer has gone too.
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") != name:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as pair:
                if not pair.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # shutting down gloo's listener would end the process
                    pair.shutdown(socket.SHUT_RDWR)
