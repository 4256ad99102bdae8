"""Strangers at a member's door: real sockets, a real member thread."""

from __future__ import annotations

import json
import logging
import select
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.elastic import waiting_room as waiting
from lockstep.elastic.generation_log import Arbiter, Member, Record, new_token
from lockstep.elastic.link import HEAD, LARGEST, Link, Stranger, ask, frame, make_token, read_token
from lockstep.elastic.membership import Membership
from lockstep.elastic.protocol import Limits
from lockstep.elastic.run_folder import make, trouble
from lockstep.errors import UsageError
from lockstep.runtime.worker_env import Seat


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Membership]:
    mark = make(tmp_path / "run", "here")
    seat = Seat(str(tmp_path / "run"), str(tmp_path), "here", 0, 1, 1, 1, 8, "127.0.0.1", folder_mark=mark)
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
    make_token(tmp_path)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        read_token(tmp_path)


def test_the_token_never_crosses_the_wire(member: Membership) -> None:
    with door(member) as connection:
        hello = connection.recv(65536)
    assert read_token(member.folder) not in hello and json.loads(hello[HEAD.size :])["kind"] == "hello"


def test_who_is_refused_tries_again_now_and_then_and_is_logged_once(
    member: Membership, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lockstep").propagate = True
    mark = make(tmp_path / "other", "there")
    seat = Seat(str(tmp_path / "other"), str(tmp_path), "there", 0, 1, 1, 1, 8, "127.0.0.1", folder_mark=mark)
    arbiter = Arbiter(tmp_path / "other" / "generations")
    arbiter.propose(Record(1, new_token(), (member.me,), "", 0, "for the test"))
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        stranger = Membership(seat, Limits(), on_cut=lambda: None)
        refused = counted(member)
        stranger.ask({}, joins=True)
        time.sleep(2.0)
        at_first = len(refused)
        time.sleep(2.0)
        stranger.close()
    assert at_first > 2
    assert len(refused) - at_first < 15  # a look is 0.25 s, and no longer 10 ms
    assert caplog.text.count("it does not know this run's token") == 1


def counted(member: Membership) -> list[object]:
    """A list to which every refused connection of `member` is added."""
    seen: list[object] = []
    due = member._refusals.due

    def count(what: object, now_s: float) -> int:
        seen.append(what)
        return due(what, now_s)  # type: ignore[arg-type]

    member._refusals.due = count  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("what", ["no token", "another token", "the log is empty", "no waiting room"])
def test_a_folder_that_is_not_the_runs_is_trouble_and_nothing_is_made_in_it(tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    mark = make(run, "here")
    Arbiter(run / "generations").propose(Record(1, new_token(), (), "", 0, "for the test"))
    seat = Seat(str(run), str(tmp_path), "here", 0, 1, 1, 1, 8, "127.0.0.1", folder_mark=mark, known=1)
    assert trouble(seat) == ""
    run.rename(tmp_path / "away")
    run.mkdir()
    if what != "no token":
        make(run, "here")
    if what not in ("no token", "another token"):
        (run / "token").unlink()
        shutil.copy(tmp_path / "away" / "token", run / "token")
    if what == "no waiting room":
        shutil.copytree(tmp_path / "away" / "generations", run / "generations", dirs_exist_ok=True)
        (run / "waiting").rmdir()
    before = sorted(run.rglob("*"))
    assert trouble(seat)
    with pytest.raises(OSError):
        Membership(seat, Limits(), on_cut=lambda: None) if "token" in what else waiting_or_log(run, seat)
    assert sorted(run.rglob("*")) == before


def waiting_or_log(run: Path, seat: Seat) -> None:
    """What a worker does first with the log and the waiting room."""
    Arbiter(run / "generations", since=seat.known).newest()
    waiting.show(run, Member("here/0/a", "here", 0, 1, "127.0.0.1:1"))


@pytest.mark.parametrize("gone", ["the folder", "its records"])
def test_a_log_that_is_gone_is_neither_read_as_empty_nor_begun_anew(tmp_path: Path, gone: str) -> None:
    run = tmp_path / "run"
    make(run, "here")
    log = Arbiter(run / "generations")
    log.propose(Record(1, new_token(), (), "", 0, "for the test"))
    (run / "generations").rename(run / "away")
    if gone == "its records":
        (run / "generations").mkdir()
    before = sorted(run.rglob("*"))
    for number in (1, 2):
        with pytest.raises(FileNotFoundError):
            log.propose(Record(number, new_token(), (), "", 0, "a fork"))
    for known in (0, 1):
        with pytest.raises(FileNotFoundError):
            log.newest(known)
    assert sorted(run.rglob("*")) == before


# Somebody between two members, who can read and change all that they send, and does not know the token.

TOKEN = b"f" * 64


def connection() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


class Between:
    """Two ends of a connection whose bytes pass through here, frame by frame."""

    def __init__(self) -> None:
        self.sockets = [*connection(), *connection()]
        client, self.at_client, server, self.at_server = self.sockets
        self.client = Link(client, TOKEN, "a/0/x", {"id": "a/0/x", "address": "127.0.0.1:1"}, True, 0.0, expected="b/0/y")
        self.server = Link(server, TOKEN, "b/0/y", {"id": "b/0/y"}, False, 0.0)

    def __enter__(self) -> Between:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.sockets:
            one.close()

    def take(self, link: Link) -> bytes:
        """What the link sends next: one frame."""
        link.flush()
        source = self.at_client if link is self.client else self.at_server
        source.settimeout(5)
        head = source.recv(HEAD.size, socket.MSG_WAITALL)
        return head + source.recv(HEAD.unpack(head)[0], socket.MSG_WAITALL)

    def give(self, link: Link, *frames: bytes) -> list[dict[str, object]]:
        """Let the link receive these; what it takes for messages."""
        (self.at_client if link is self.client else self.at_server).sendall(b"".join(frames))
        select.select([link.socket], [], [], 5)
        return link.receive()

    def introduce(self) -> None:
        """Pass the introduction on, unchanged."""
        for sender, receiver in ((self.server, self.client), (self.client, self.server), (self.server, self.client)):
            assert self.give(receiver, self.take(sender)) == []
        assert (self.client.id, self.server.id) == ("b/0/y", "a/0/x")

    def say(self, link: Link, *kinds: str) -> list[bytes]:
        """The frames in which the link sends messages of these kinds."""
        frames = []
        for kind in kinds:
            link.send({"kind": kind})
            frames.append(self.take(link))
        return frames


def test_what_members_say_passes_unchanged_in_both_directions() -> None:
    with Between() as between:
        between.introduce()
        for sender, receiver in ((between.client, between.server), (between.server, between.client)):
            frames = between.say(sender, "one", "two", "three")
            assert [one["kind"] for one in between.give(receiver, *frames)] == ["one", "two", "three"]


def flipped(data: bytes, at: int) -> bytes:
    """The bytes, with one bit flipped."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "attack", ["altered", "altered MAC", "repeated", "left out", "swapped", "sent back", "unsigned", "of another connection"]
)
def test_a_frame_that_is_not_what_the_peer_sends_next_ends_the_connection(attack: str) -> None:
    with Between() as between, Between() as other:
        between.introduce()
        first, second = between.say(between.client, "one", "two")
        if attack == "of another connection":
            other.introduce()
        sent = {
            "altered": [flipped(first, len(first) - 3)],
            "altered MAC": [flipped(first, HEAD.size)],
            "repeated": [first, first],
            "left out": [second],
            "swapped": [second, first],
            "sent back": between.say(between.server, "one"),
            "unsigned": [frame({"kind": "stop"})],
            "of another connection": other.say(other.client, "one") if other.client.id else [],
        }[attack]
        with pytest.raises(Stranger, match="altered, repeated, left out or reordered"):
            between.give(between.server, *sent)
        if attack == "sent back":
            with pytest.raises(Stranger):
                between.give(between.client, first)


def test_an_introduction_whose_address_was_changed_on_its_way_is_refused() -> None:
    with Between() as between:
        between.give(between.client, between.take(between.server))
        introduction = json.loads(between.take(between.client)[HEAD.size :])
        introduction["member"]["address"] = "10.0.0.66:1"
        with pytest.raises(Stranger, match="wrong proof"):
            between.give(between.server, frame(introduction))


def test_who_has_not_proved_to_know_the_token_may_send_little() -> None:
    with Between() as between, pytest.raises(Stranger, match="the largest is 65536"):
        between.give(between.server, HEAD.pack(LARGEST // 2) + bytes(100))
