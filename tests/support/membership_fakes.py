"""Fakes around one real Membership: a generation log in memory, and peers driven by the test."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.elastic.generation_log import NO_GENERATION, Generation, GenerationLog, Member
from lockstep.elastic.link import PeerLink

HEARTBEAT_S = 0.05


class MemoryLog(GenerationLog):
    """A generation log in memory.

    error   raised by every access while it is set
    rival   returns the generation that another worker writes just before a proposal
    opened  accesses block while it is cleared
    """

    def __init__(self) -> None:
        super().__init__(Path("in memory"))
        self.records: dict[int, Generation] = {}
        self.error: OSError | None = None
        self.errors_raised = 0
        self.rival: Callable[[Generation], Generation] | None = None
        self.opened = threading.Event()
        self.opened.set()

    def newest(self, known: int = 0) -> Generation:
        self._access()
        newest = max(self.records, default=0)
        return self.records[newest] if newest > known else NO_GENERATION

    def read(self, number: int) -> Generation:
        return self.records[number]

    def propose(self, generation: Generation) -> Generation:
        self._access()
        if self.rival:
            self.records.setdefault(generation.number, self.rival(generation))
        return self.records.setdefault(generation.number, generation)

    def _access(self) -> None:
        self.opened.wait(10)
        if self.error:
            self.errors_raised += 1
            raise self.error


DISK_FULL = OSError(errno.ENOSPC, "No space left on device")


class FakePeer:
    """Another worker: its listener, its link, and the messages that it received.

    beats  whether `serve` sends heartbeats
    """

    def __init__(self, token: bytes, slot: int = 1) -> None:
        self.token, self.beats = token, True
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.me = Member(f"there/{slot}/peer", "there", slot, 1, address)
        self.links: list[PeerLink] = []
        self.received: list[dict[str, Any]] = []
        self._last_beat_s = 0.0

    def connect(self, member: Member) -> None:
        """Open a link; `serve` completes its handshake."""
        host, _, port = member.address.rpartition(":")
        self._add(
            socket.create_connection((host, int(port)), timeout=5), is_client=True, expected=member
        )

    def send(self, message: dict[str, Any]) -> None:
        """Send a message over the newest authenticated link."""
        [link for link in self.links if link.id][-1].send(message)
        self.serve()

    def serve(self) -> None:
        """Accept connections, receive and send."""
        with suppress(BlockingIOError, OSError):
            self._add(self.listener.accept()[0], is_client=False)
        is_due = self.beats and time.monotonic() - self._last_beat_s > HEARTBEAT_S
        for link in list(self.links):
            try:
                self.received += link.receive()
                if link.id and is_due:
                    self._last_beat_s = time.monotonic()
                    link.send({"kind": "heartbeat"})
                link.flush()
            except (EOFError, OSError):
                self.links.remove(link)
                link.socket.close()

    def kinds(self) -> set[str]:
        """Return the kinds of the received messages."""
        return {message["kind"] for message in self.received}

    @property
    def is_linked(self) -> bool:
        return any(link.id for link in self.links)

    def disconnect(self) -> None:
        """Close the links, but not the listener."""
        for link in self.links:
            link.socket.close()
        self.links.clear()

    def exit(self) -> None:
        """Close all sockets, as the kernel does when a process exits: its port refuses."""
        self.listener.close()
        self.disconnect()

    def _add(
        self, connection: socket.socket, *, is_client: bool, expected: Member | None = None
    ) -> None:
        self.links.append(
            PeerLink(connection, self.token, self.me.id, is_client, time.monotonic(), expected)
        )


def serve_until(condition: Callable[[], object], *peers: FakePeer, timeout_s: float = 5.0) -> None:
    """Let the peers act until the condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        for peer in peers:
            peer.serve()
        time.sleep(0.01)
