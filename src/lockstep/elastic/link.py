"""Messages between members: JSON in frames over TCP, from those who know the run's token and from nobody else.

    server -> client   {"kind": "hello", "nonce": N}
    client -> server   {"kind": "i_am", "member": {...}, "nonce": M, "proof": HMAC-SHA256(token, ["client", N, member])}
    server -> client   {"kind": "you_know", "id": ID, "proof": HMAC-SHA256(token, ["server", M, ID])}

The token is in the run folder, for its owner alone (mode 600), and never crosses the wire. Nothing received is unpickled or evaluated. A
frame is four bytes of length and that much JSON. After the introduction each frame begins with a MAC under a key of this connection and
direction, over the frame's number and text: a frame that was altered, repeated, left out, reordered, or sent back ends the connection, as
do a longer one than LARGEST, bytes that are no frame and a wrong proof.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import DamagedFileError, UsageError
from lockstep.files import regular, write_first

LARGEST = 1 << 20
LARGEST_INTRODUCTION = 1 << 16  # from a peer that has not proved to know the token
MAC_BYTES = 16
TOKEN_BYTES = 32
TOKEN = re.compile(rb"[0-9a-f]{%d}" % (2 * TOKEN_BYTES))
HEAD = struct.Struct("!I")
# Linux <tcp.h>: a connection whose bytes are not acknowledged for so long is closed by the kernel.
TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)


class Stranger(Exception):
    """The other side does not speak as a member of this run does; the reason is for the log."""


def make_token(run: Path) -> None:
    """Make the run's token, if it has none. OSError when it cannot be written."""
    if not (run / "token").exists():
        write_first(run / "token", secrets.token_hex(TOKEN_BYTES), 0o600)


def read_token(run: Path) -> bytes:
    """Return the run's token. OSError when it is missing; DamagedFileError (an OSError) when it is malformed, since everybody knows an
    empty token; UsageError when users other than its owner can read it."""
    path = run / "token"
    with open(path, "rb", opener=regular) as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise UsageError(f"{path} can be read by others than its owner", "the run's token lets workers join", f"chmod 600 {path}")
        found = file.read(LARGEST).strip()
    if not TOKEN.fullmatch(found):
        raise DamagedFileError(
            f"the run's token is damaged: {len(found)} bytes, not {2 * TOKEN_BYTES} hexadecimal digits",
            str(path),
            "stop the workers of this run on all hosts, then remove the file: the next start makes a new token",
        )
    return found


def proof(token: bytes, *words: Any) -> str:
    """Return the HMAC of these words under the token."""
    return hmac.new(token, json.dumps(words, sort_keys=True).encode(), hashlib.sha256).hexdigest()


@dataclass
class Signer:
    """The MACs of one direction of one connection, in the order of its frames. About 2 microseconds each."""

    key: bytes
    count: int = 0

    def next_mac(self, text: bytes) -> bytes:
        """Return the MAC of the next frame."""
        self.count += 1
        return hashlib.blake2b(self.count.to_bytes(8, "big") + text, key=self.key, digest_size=MAC_BYTES).digest()


def signers(token: bytes, *session: str) -> tuple[Signer, Signer]:
    """(of the client's frames, of the server's) for a connection with these nonces and ids."""
    client, server = (Signer(bytes.fromhex(proof(token, f"frames of the {side}", *session))) for side in ("client", "server"))
    return client, server


def frame(message: dict[str, Any], signer: Signer | None = None) -> bytes:
    """A message as bytes on the wire; without a signer one of the introduction."""
    text = json.dumps(message).encode()
    mac = signer.next_mac(text) if signer else b""
    return HEAD.pack(len(mac) + len(text)) + mac + text


@dataclass
class Link:
    """One connection and what is half read and half written of it. Non-blocking; nothing here waits.

    id      of the peer, "" until it has proved to know the token
    ours    whether this side opened it; then `expected` is whom it wants to reach
    """

    socket: socket.socket
    token: bytes
    me: str
    introduction: dict[str, Any]
    ours: bool
    began_s: float
    expected: str = ""
    id: str = ""
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    member: dict[str, Any] = field(default_factory=dict)
    _sends: Signer | None = None  # once the peer is known, as is _hears
    _hears: Signer | None = None
    _their_nonce: str = ""
    _incoming: bytearray = field(default_factory=bytearray)
    _outgoing: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not self.ours:
            self.send({"kind": "hello", "nonce": self.nonce})

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; `flush` writes it."""
        self._outgoing += frame(message, self._sends)

    @property
    def has_more(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._outgoing)

    def flush(self) -> None:
        """Write what the socket takes. OSError when the connection is gone."""
        while self._outgoing:
            try:
                del self._outgoing[: self.socket.send(self._outgoing)]
            except BlockingIOError:
                return

    def receive(self) -> list[dict[str, Any]]:
        """The whole messages that have come, less the introduction. EOFError at its end; OSError; Stranger."""
        closed = False
        while True:
            try:
                part = self.socket.recv(65536)
            except BlockingIOError:
                break
            if not part:
                closed = True
                break
            self._incoming += part
            if len(self._incoming) > self._most + HEAD.size:
                break
        found = []
        while len(self._incoming) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._incoming)
            if length > self._most:
                raise Stranger(f"a message of {length} bytes, the largest is {self._most}")
            if len(self._incoming) < HEAD.size + length:
                break
            text = bytes(self._incoming[HEAD.size : HEAD.size + length])
            del self._incoming[: HEAD.size + length]
            if self._hears:
                found.append(self._decode(self._verified(text, self._hears)))
            else:
                self._meet(self._decode(text))
        if closed and not found:
            raise EOFError
        return found

    @property
    def _most(self) -> int:
        """Maximum size of a frame in bytes."""
        return LARGEST if self.id else LARGEST_INTRODUCTION

    @staticmethod
    def _verified(signed: bytes, signer: Signer) -> bytes:
        """The text of a signed frame."""
        mac, text = signed[:MAC_BYTES], signed[MAC_BYTES:]
        if not hmac.compare_digest(mac, signer.next_mac(text)):
            raise Stranger("a message that was altered, repeated, left out or reordered on its way")
        return text

    @staticmethod
    def _decode(text: bytes) -> dict[str, Any]:
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):  # the latter from a few thousand opening brackets
            raise Stranger("bytes that are no message") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise Stranger("a message without a kind")
        return message

    def _meet(self, message: dict[str, Any]) -> None:
        """One message of the introduction; `id` is set when it is over."""
        kind = message["kind"]
        if self.ours and kind == "hello" and not self._their_nonce:
            self._their_nonce = str(message.get("nonce"))
            introduction = {"kind": "i_am", "member": self.introduction, "nonce": self.nonce}
            self.send({**introduction, "proof": proof(self.token, "client", self._their_nonce, self.introduction)})
        elif self.ours and kind == "you_know":
            id = str(message.get("id"))
            self._check(message, proof(self.token, "server", self.nonce, id))
            self.id = id
            self._sends, self._hears = signers(self.token, self._their_nonce, self.nonce, self.me, id)
        elif not self.ours and kind == "i_am":
            member = message.get("member")
            if not isinstance(member, dict) or not isinstance(member.get("id"), str):
                raise Stranger("an introduction without a name")
            self._check(message, proof(self.token, "client", self.nonce, member))
            self._their_nonce = str(message.get("nonce"))
            self.send({"kind": "you_know", "id": self.me, "proof": proof(self.token, "server", self._their_nonce, self.me)})
            self.id, self.member = member["id"], member
            self._hears, self._sends = signers(self.token, self.nonce, self._their_nonce, self.id, self.me)
        else:
            raise Stranger(f"{kind!r} instead of an introduction")

    @staticmethod
    def _check(message: dict[str, Any], right: str) -> None:
        if not hmac.compare_digest(str(message.get("proof")), right):
            raise Stranger("a wrong proof: it does not know this run's token")


def ask(address: str, token: bytes, message: dict[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
    """The answer of the member at "ADDRESS:PORT" to a control message. OSError, EOFError or Stranger when there is none."""
    host, _, port = address.rpartition(":")
    me = f"control/{os.getpid()}/{secrets.token_hex(4)}"
    until_s, asked = time.monotonic() + timeout_s, False
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        link = Link(connection, token, me, {"id": me}, ours=True, began_s=0.0)
        while (left_s := until_s - time.monotonic()) > 0:
            select.select([connection], [connection] if link.has_more else [], [], left_s)
            for answer in link.receive():
                if answer["kind"] != "beat":
                    return answer
            if link.id and not asked:
                link.send(message)
                asked = True
            link.flush()
    raise TimeoutError(f"{address} does not answer")
