"""Strangers at a member's door: real sockets, a real member thread."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.membership.member import Membership
from lockstep.membership.protocol import Limits
from lockstep.membership.seat import Seat
from lockstep.membership.wire import HEAD, LARGEST, Stranger, ask, frame, read_token


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Membership]:
    seat = Seat(str(tmp_path / "run"), str(tmp_path), "here", 0, 1, 1, 1, 8, "127.0.0.1")
    one = Membership(seat, Limits(), on_cut=lambda: None)
    yield one
    one.close()


def door(member: Membership) -> socket.socket:
    host, _, port = member.me.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    connection.settimeout(5)
    return connection


def closed(connection: socket.socket) -> bool:
    """Whether the other side ends the connection, instead of answering."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_control_command_needs_the_token(member: Membership) -> None:
    token = read_token(member.folder)
    answer = ask(member.me.address, token, {"kind": "status"})
    assert answer["kind"] == "status" and answer["membership"] == "out"
    with pytest.raises((EOFError, ConnectionResetError, Stranger)):
        ask(member.me.address, b"another token", {"kind": "stop"})
    assert not member.stop_wanted
    assert ask(member.me.address, token, {"kind": "stop"})["kind"] == "stopping"
    assert member.stop_wanted == "SIGTERM"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (HEAD.pack(LARGEST + 1), "the largest is"),
        (HEAD.pack(16) + bytes(range(200, 216)), "no message"),
        (frame({"kind": "stop"}), "instead of an introduction"),
        (frame({"kind": "i_am", "member": {"id": "control/1"}, "nonce": "0", "proof": "0" * 64}), "a wrong proof"),
        (frame({"kind": "i_am", "member": "nobody", "nonce": "0", "proof": ""}), "without a name"),
        (HEAD.pack(2) + b"[]", "without a kind"),
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "the largest is"),
    ],
    ids=["oversized", "garbage", "a command at once", "a wrong proof", "no name", "no object", "a browser"],
)
def test_a_stranger_is_refused_and_logged(member: Membership, data: bytes, says: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("lockstep").propagate = True
    with caplog.at_level(logging.WARNING, logger="lockstep"), door(member) as connection:
        connection.sendall(data)
        assert closed(connection)
    assert says in caplog.text and "127.0.0.1" in caplog.text
    assert ask(member.me.address, read_token(member.folder), {"kind": "status"})["kind"] == "status"


def test_a_stranger_who_says_nothing_is_not_waited_for(member: Membership) -> None:
    began_s = time.monotonic()
    with door(member) as connection:
        assert closed(connection)
    assert 0.5 < time.monotonic() - began_s < 5


def test_the_door_is_at_the_address_of_the_run_alone(member: Membership) -> None:
    assert member.me.address.startswith("127.0.0.1:")


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    read_token(tmp_path)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        read_token(tmp_path)


def test_the_token_never_crosses_the_wire(member: Membership) -> None:
    with door(member) as connection:
        hello = connection.recv(65536)
    assert read_token(member.folder) not in hello and json.loads(hello[HEAD.size :])["kind"] == "hello"
