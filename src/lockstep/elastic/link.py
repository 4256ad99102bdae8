"""Authenticated messages between members: JSON frames over TCP, for peers with the run's token.

    both              {"kind": "hello", "nonce": N}
    client -> server  {"kind": "i_am", "id": ID}    signed, like each further frame
    server -> client  {"kind": "i_am", "id": ID}

The token (run_folder.py) is never sent. Nothing
received is unpickled or evaluated. A frame is four bytes of length and that much JSON. A signed
frame starts with a MAC over its number and text, under a key that both sides derive from the token,
the two nonces and the direction. So the first one proves that its sender has the token, and an
altered, repeated, dropped, reordered or reflected frame closes the connection.
"""

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lockstep.elastic.generation_log import Member

MAX_FRAME_BYTES = 1 << 20
MAX_HANDSHAKE_BYTES = 1 << 16  # from an unauthenticated peer
MAC_BYTES = 16
LENGTH_PREFIX = struct.Struct("!I")


class AuthenticationError(Exception):
    """The peer failed to authenticate or sent a malformed frame."""


@dataclass
class Signer:
    """The MACs of one direction of a connection, in frame order. About 2 microseconds each."""

    key: bytes
    count: int = 0

    def next_mac(self, text: bytes) -> bytes:
        self.count += 1
        return hashlib.blake2b(
            self.count.to_bytes(8, "big") + text, key=self.key, digest_size=MAC_BYTES
        ).digest()


def make_signers(token: bytes, *nonces: str) -> tuple[Signer, Signer]:
    """Return (the client's signer, the server's) for a connection with their nonces."""
    client, server = (
        Signer(hmac.digest(token, json.dumps([side, *nonces]).encode(), "sha256"))
        for side in ("client", "server")
    )
    return client, server


def encode_frame(message: dict[str, Any] | bytes, signer: Signer | None = None) -> bytes:
    """Return the frame of a message or of its JSON; without a signer, of one of the handshake."""
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    mac = signer.next_mac(text) if signer else b""
    return LENGTH_PREFIX.pack(len(mac) + len(text)) + mac + text


@dataclass
class PeerLink:
    """A non-blocking connection with its partly read and partly written frames."""

    socket: socket.socket
    token: bytes
    me: str
    is_client: bool  # this side opened the connection
    opened_s: float
    expected: Member | None = None  # that it was opened to
    id: str = ""  # of the peer, once it has authenticated
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    _signer: Signer | None = None  # set with _verifier by the peer's hello
    _verifier: Signer | None = None
    _incoming: bytearray = field(default_factory=bytearray)
    _outgoing: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.send({"kind": "hello", "nonce": self.nonce})

    def send(self, message: dict[str, Any] | bytes) -> None:
        """Queue a message or its JSON; `flush` writes it."""
        self._outgoing += encode_frame(message, self._signer)

    @property
    def is_control(self) -> bool:
        """Whether the authenticated peer is a control command (`send_control_message`)."""
        return self.id.startswith("control/")

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    def flush(self) -> None:
        """Write as much as the socket accepts. OSError when the connection is broken."""
        with suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: self.socket.send(self._outgoing)]

    def receive(self) -> list[dict[str, Any]]:
        """Return the complete messages received after the handshake.
        EOFError: closed by the peer. OSError: broken. AuthenticationError: an invalid frame."""
        closed, messages = False, []
        with suppress(BlockingIOError):
            while not closed and len(self._incoming) <= self._max_bytes + LENGTH_PREFIX.size:
                chunk = self.socket.recv(65536)
                self._incoming += chunk
                closed = not chunk
        while len(self._incoming) >= LENGTH_PREFIX.size:
            (length,) = LENGTH_PREFIX.unpack_from(self._incoming)
            if length > self._max_bytes:
                raise AuthenticationError(
                    f"a message of {length} bytes, above the limit of {self._max_bytes}"
                )
            if len(self._incoming) < LENGTH_PREFIX.size + length:
                break
            text = bytes(self._incoming[LENGTH_PREFIX.size : LENGTH_PREFIX.size + length])
            del self._incoming[: LENGTH_PREFIX.size + length]
            message = self._decode(self._verified(text) if self._verifier else text)
            if self.id:
                messages.append(message)
            else:
                self._handshake(message)
        if closed and not messages:
            raise EOFError
        return messages

    @property
    def _max_bytes(self) -> int:
        return MAX_FRAME_BYTES if self.id else MAX_HANDSHAKE_BYTES

    def _verified(self, signed: bytes) -> bytes:
        assert self._verifier is not None
        mac, text = signed[:MAC_BYTES], signed[MAC_BYTES:]
        if hmac.compare_digest(mac, self._verifier.next_mac(text)):
            return text
        changed = "a frame was altered, repeated, dropped or reordered in transit"
        raise AuthenticationError(
            changed if self.id else "wrong proof: the peer does not have this run's token"
        )

    @staticmethod
    def _decode(text: bytes) -> dict[str, Any]:
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):  # thousands of opening brackets
            raise AuthenticationError("malformed message") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise AuthenticationError("message without a kind")
        return message

    def _handshake(self, message: dict[str, Any]) -> None:
        """Process a message of the handshake; the last one sets `id`."""
        match message:
            case {"kind": "hello", "nonce": str(nonce)} if not self._verifier:
                if self.is_client:
                    self._signer, self._verifier = make_signers(self.token, self.nonce, nonce)
                    self.send({"kind": "i_am", "id": self.me})
                else:
                    self._verifier, self._signer = make_signers(self.token, nonce, self.nonce)
            case {"kind": "i_am", "id": str(id)} if self._verifier:
                if not self.is_client:
                    self.send({"kind": "i_am", "id": self.me})
                self.id = id
            case _:
                raise AuthenticationError(f"{message['kind']!r} instead of a handshake")


def send_control_message(
    address: str, token: bytes, message: dict[str, Any], timeout_s: float = 5.0
) -> dict[str, Any]:
    """Return the answer of the member at `address`. OSError, EOFError, AuthenticationError."""
    host, _, port = address.rpartition(":")
    me = f"control/{os.getpid()}/{secrets.token_hex(4)}"
    deadline_s, sent = time.monotonic() + timeout_s, False
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        link = PeerLink(connection, token, me, is_client=True, opened_s=0.0)
        while (left_s := deadline_s - time.monotonic()) > 0:
            select.select([connection], [connection] if link.has_outgoing else [], [], left_s)
            for answer in link.receive():
                if answer["kind"] != "heartbeat":
                    return answer
            if link.id and not sent:
                link.send(message)
                sent = True
            link.flush()
    raise TimeoutError(f"{address} did not answer within {timeout_s:g} s")
