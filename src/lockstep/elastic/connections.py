"""The connections of a worker to its peers: accept, connect, authenticate, send and receive."""

import errno
import json
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lockstep.elastic.generation_log import Member
from lockstep.elastic.link import AuthenticationError, PeerLink
from lockstep.elastic.protocol.transitions import Protocol
from lockstep.log import log

CONNECT_S = 1.0  # time for a new connection to authenticate
RETRY_S = 0.01  # interval between connection attempts to an exiting process
KEEP_S = 0.05  # minimum age of an unauthenticated connection that is closed in favor of a new one
# How long a peer that accepts and closes connections is retried: its process may be exiting.
EXITING_S = 1.0
REJECTING_S = 60.0  # how long a peer that did so for EXITING_S is retried less often
REFUSAL_LOG_S = 10.0  # interval between log lines about one peer refused for one reason
# More share one counter: an unauthenticated peer could cause any number of them.
MAX_REFUSAL_KEYS = 256


class Connections:
    """The listener and all links of a worker. All methods but `wake` are for its membership thread.

    handle      passes an event to `protocol`, which learns of every link
    on_message  handles a message. KeyError, TypeError, ValueError: malformed, which closes the link
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        protocol: Protocol,
        handle: Callable[..., None],
        on_message: Callable[[PeerLink, dict[str, Any]], None],
    ) -> None:
        self._listener = listener
        self._token = token
        self._protocol = protocol
        self._handle = handle
        self._on_message = on_message
        self._links: dict[int, PeerLink] = {}  # by file descriptor
        self._pending: dict[int, PeerLink] = {}  # those without authentication, oldest first
        # Authenticated links to each worker, without control commands.
        self._by_id: dict[str, list[PeerLink]] = {}
        # The newest message and its text: most go to many links.
        self._encoded: tuple[dict[str, Any], bytes] = ({}, b"{}")
        self._exiting: list[Member] = []  # peers to connect to again in the next `retry`
        self._exiting_since_s: dict[str, float] = {}
        self._refusals = LogLimiter(REFUSAL_LOG_S)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def descriptors(self) -> set[int]:
        """Return the sockets of the membership, which do not belong to the process group."""
        return {self._listener.fileno(), *self._links}

    def wake(self) -> None:
        """Make `serve` return soon; for any thread."""
        with suppress(OSError):  # closed, or full of wakes
            self._waker.send(b".")

    def serve(self, timeout_s: float) -> None:
        """Wait for events for up to `timeout_s` and process them."""
        is_paused = self._listener not in self._selector.get_map()
        ready = self._selector.select(RETRY_S if self._exiting or is_paused else timeout_s)
        if is_paused:
            self._selector.register(self._listener, selectors.EVENT_READ)
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                with suppress(BlockingIOError):
                    self._woken.recv(65536)
            elif (link := self._links.get(key.fd)) is not None:
                self._serve_link(link, events)

    def retry(self, now_s: float) -> None:
        """Drop links that have not authenticated in time, and connect again to exiting peers."""
        for link in [link for link in self._pending.values() if now_s - link.opened_s > CONNECT_S]:
            self._fail(link, refused=False)
        self._exiting_since_s = {
            id: since_s
            for id, since_s in self._exiting_since_s.items()
            if now_s - since_s < REJECTING_S
        }
        exiting, self._exiting = self._exiting, []
        for member in exiting:
            self.connect(member)

    def connect(self, member: Member) -> None:
        host, _, port = member.address.rpartition(":")
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:  # out of descriptors
            log.debug("cannot open a connection to %s: %s", member.id, error)
            self._on_connect_failed(member.id, refused=False)
            return
        connection.setblocking(False)
        code = connection.connect_ex((host, int(port)))
        if code in (0, errno.EINPROGRESS):
            self._add(connection, member)
        else:
            connection.close()
            self._on_connect_failed(member.id, refused=code == errno.ECONNREFUSED)

    def send(self, id: str, message: dict[str, Any]) -> None:
        if links := self._by_id.get(id):
            if message is not self._encoded[0]:
                self._encoded = message, json.dumps(message).encode()
            links[0].send(self._encoded[1])
            self._flush(links[0])

    def close(self) -> None:
        for link in list(self._links.values()):
            self._drop(link)
        self._selector.close()
        self._listener.close()
        self._woken.close()
        self._waker.close()

    def _accept(self) -> None:
        """Accept waiting connections. Unauthenticated peers may use an eighth of the descriptors.
        At the limit, a new connection replaces the oldest such one if that is older than KEEP_S."""
        limit = max_unauthenticated()
        while True:
            unauthenticated = [link for link in self._pending.values() if not link.is_client]
            oldest = unauthenticated[0] if unauthenticated else None
            if oldest and len(unauthenticated) >= limit:
                if time.monotonic() - oldest.opened_s < KEEP_S:
                    return self._pause_listener()
                self._refuse(oldest, f"more than {limit} unauthenticated connections are open")
            try:
                self._add(self._listener.accept()[0], None)
            except BlockingIOError:
                return
            except ConnectionError:  # already closed by its peer
                continue
            except OSError as error:  # out of descriptors or memory
                if oldest:
                    self._refuse(oldest, f"no connection can be accepted ({error.strerror})")
                return self._pause_listener()

    def _pause_listener(self) -> None:
        """Ignore the listener until the next turn."""
        self._selector.unregister(self._listener)

    def _on_connect_failed(self, id: str, *, refused: bool) -> None:
        self._handle(self._protocol.on_connect_failed, id, refused)

    def _add(self, connection: socket.socket, expected: Member | None) -> None:
        me, is_client = self._protocol.me.id, expected is not None
        link = PeerLink(connection, self._token, me, is_client, time.monotonic(), expected)
        self._links[connection.fileno()] = self._pending[connection.fileno()] = link
        self._selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _serve_link(self, link: PeerLink, events: int) -> None:
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

    def _refuse(self, link: PeerLink, why: str) -> None:
        try:
            peer = str(link.socket.getpeername()[0])
        except OSError:
            peer = "an unknown address"
        if times := self._refusals.due((peer, why), time.monotonic()):
            often = f", {times} times" if times > 1 else ""
            log.warning("refused a connection from %s%s: %s", peer, often, why)
        self._fail(link, refused=False)

    def _on_authenticated(self, link: PeerLink) -> None:
        self._exiting_since_s.pop(link.id, None)
        del self._pending[link.socket.fileno()]
        if link.expected and link.id != link.expected.id:  # another worker has its port now
            self._fail(link, refused=True)
        elif not link.is_control:
            links = self._by_id.setdefault(link.id, [])
            links.append(link)
            if len(links) == 1:
                self._handle(self._protocol.on_link_up, link.id)

    def _flush(self, link: PeerLink) -> None:
        try:
            link.flush()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_outgoing else 0)
            self._selector.modify(link.socket, wanted, link)
        except KeyError:
            return  # dropped in the meantime
        except OSError:
            self._fail(link, refused=False)

    def _drop(self, link: PeerLink) -> None:
        if self._links.pop(link.socket.fileno(), None) is not None:
            self._selector.unregister(link.socket)
            self._pending.pop(link.socket.fileno(), None)
            if others := [other for other in self._by_id.pop(link.id, ()) if other is not link]:
                self._by_id[link.id] = others
        link.socket.close()

    def _fail(self, link: PeerLink, *, refused: bool, exiting: bool = False) -> None:
        """Drop a link that broke or was never established.

        exiting  the peer accepted the connection and closed it before the handshake: the kernel is
                 tearing down a killed process, which takes longer the more memory it had, and soon
                 refuses. A peer that does so for longer than EXITING_S rejects this worker.
        """
        expected, now_s = link.expected, time.monotonic()
        authenticated = link.id and (expected is None or link.id == expected.id)
        self._drop(link)
        if authenticated and not link.is_control:
            if link.id not in self._by_id:
                self._handle(self._protocol.on_link_down, link.id)
        elif (
            expected
            and exiting
            and now_s - self._exiting_since_s.setdefault(expected.id, now_s) < EXITING_S
        ):
            self._exiting.append(expected)
        elif expected:
            if refused:
                self._exiting_since_s.pop(expected.id, None)
            self._on_connect_failed(expected.id, refused=refused)


def max_unauthenticated() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(256, soft // 8)) if soft != resource.RLIM_INFINITY else 256


@dataclass
class LogLimiter:
    """Allow a line for each key at its first event, then at most every `every_s` seconds."""

    every_s: float
    _logged_s: dict[Hashable, float] = field(default_factory=dict)
    _counts: dict[Hashable, int] = field(default_factory=dict)

    def due(self, key: Hashable, now_s: float) -> int:
        """Count an event. Return the count since the last line if a line is due, else 0."""
        if key not in self._logged_s and len(self._logged_s) >= MAX_REFUSAL_KEYS:
            key = None
        self._counts[key] = self._counts.get(key, 0) + 1
        if now_s - self._logged_s.get(key, now_s - self.every_s) < self.every_s:
            return 0
        self._logged_s[key] = now_s
        return self._counts.pop(key)
