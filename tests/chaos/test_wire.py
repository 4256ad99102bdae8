"""Unauthenticated peers, altered frames, foreign run folders; with real sockets and threads."""

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

from lockstep.elastic.generation_log import Generation, GenerationLog, Member, new_token
from lockstep.elastic.link import (
    LENGTH_PREFIX,
    MAX_FRAME_BYTES,
    AuthenticationError,
    PeerLink,
    Signer,
    encode_frame,
    send_control_message,
)
from lockstep.elastic.membership import Membership
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.run_folder import (
    create_run_folder,
    folder_error,
    make_token,
    open_waiting_room,
    read_token,
)
from lockstep.errors import UsageError
from lockstep.runtime.worker_env import WorkerEnv


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Membership]:
    mark = create_run_folder(tmp_path / "run", "here")
    env = WorkerEnv(
        str(tmp_path / "run"), str(tmp_path), "here", 0, 1, 1, 1, 8, "127.0.0.1", folder_id=mark
    )
    membership = Membership(env, ElasticLimits(), on_abort=lambda sockets: None)
    yield membership
    membership.close()


def connect_to(member: Membership) -> socket.socket:
    host, _, port = member.me.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    connection.settimeout(5)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the peer closes the connection instead of answering."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_control_command_needs_the_token(member: Membership) -> None:
    token = read_token(member.folder)
    answer = send_control_message(member.me.address, token, {"kind": "status"})
    assert answer["kind"] == "status" and answer["membership"] == "out"
    with pytest.raises((EOFError, ConnectionResetError, AuthenticationError)):
        send_control_message(member.me.address, b"another token", {"kind": "stop"})
    assert not member.stop_signal
    assert send_control_message(member.me.address, token, {"kind": "stop"})["kind"] == "stopping"
    assert member.stop_signal == "SIGTERM"


HELLO = encode_frame({"kind": "hello", "nonce": "0"})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (LENGTH_PREFIX.pack(MAX_FRAME_BYTES + 1), "above the limit of"),
        (LENGTH_PREFIX.pack(16) + bytes(range(200, 216)), "malformed message"),
        (encode_frame({"kind": "stop"}), "instead of a handshake"),
        (encode_frame({"kind": "i_am", "id": "control/1"}), "instead of a handshake"),
        (
            HELLO + encode_frame({"kind": "i_am", "id": "control/1"}, Signer(bytes(32))),
            "wrong proof",
        ),
        (HELLO + HELLO, "wrong proof"),
        (LENGTH_PREFIX.pack(2) + b"[]", "without a kind"),
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "above the limit of"),
    ],
    ids=[
        "oversized",
        "garbage",
        "a command before the handshake",
        "an unsigned id",
        "a wrong proof",
        "two hellos",
        "not an object",
        "a browser",
    ],
)
def test_unauthenticated_peer_is_refused_and_logged(
    member: Membership, data: bytes, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lockstep").propagate = True
    with caplog.at_level(logging.WARNING, logger="lockstep"), connect_to(member) as connection:
        connection.sendall(data)
        assert is_closed(connection)
    assert expected in caplog.text and "127.0.0.1" in caplog.text
    assert (
        send_control_message(member.me.address, read_token(member.folder), {"kind": "status"})[
            "kind"
        ]
        == "status"
    )


def test_silent_peer_is_disconnected(member: Membership) -> None:
    started_s = time.monotonic()
    with connect_to(member) as connection:
        assert is_closed(connection)
    assert 0.5 < time.monotonic() - started_s < 5


def test_listener_is_bound_to_the_address_of_the_run(member: Membership) -> None:
    assert member.me.address.startswith("127.0.0.1:")


def test_token_readable_by_other_users_is_refused(tmp_path: Path) -> None:
    make_token(tmp_path)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(UsageError, match="can be read by other users"):
        read_token(tmp_path)


def test_token_is_never_sent(member: Membership) -> None:
    with connect_to(member) as connection:
        hello = connection.recv(65536)
    assert (
        read_token(member.folder) not in hello
        and json.loads(hello[LENGTH_PREFIX.size :])["kind"] == "hello"
    )


def test_refused_worker_retries_and_is_logged_once(
    member: Membership, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lockstep").propagate = True
    mark = create_run_folder(tmp_path / "other", "there")
    env = WorkerEnv(
        str(tmp_path / "other"), str(tmp_path), "there", 0, 1, 1, 1, 8, "127.0.0.1", folder_id=mark
    )
    log = GenerationLog(tmp_path / "other" / "generations")
    log.propose(Generation(1, new_token(), (member.me,), "", 0, "for the test"))
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        outsider = Membership(env, ElasticLimits(), on_abort=lambda sockets: None)
        refused = collect_refusals(member)
        outsider.request_join({}, is_joining=True)
        time.sleep(2.0)
        first_refusals = len(refused)
        time.sleep(2.0)
        outsider.close()
    assert first_refusals > 2
    assert len(refused) - first_refusals < 15  # it retries every 0.25 s, no longer every 10 ms
    assert caplog.text.count("the peer does not have this run's token") == 1


def collect_refusals(member: Membership) -> list[object]:
    """Return a list that collects every refused connection of `member`."""
    seen: list[object] = []
    due = member.thread.connections._refusals.due

    def count(refusal: object, now_s: float) -> int:
        seen.append(refusal)
        return due(refusal, now_s)  # type: ignore[arg-type]

    member.thread.connections._refusals.due = count  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(
    "state", ["no token", "another token", "the log is empty", "no waiting room"]
)
def test_foreign_folder_is_an_error_and_stays_unchanged(tmp_path: Path, state: str) -> None:
    run = tmp_path / "run"
    mark = create_run_folder(run, "here")
    GenerationLog(run / "generations").propose(
        Generation(1, new_token(), (), "", 0, "for the test")
    )
    env = WorkerEnv(
        str(run),
        str(tmp_path),
        "here",
        0,
        1,
        1,
        1,
        8,
        "127.0.0.1",
        folder_id=mark,
        known_generation=1,
    )
    assert folder_error(env) == ""
    run.rename(tmp_path / "away")
    run.mkdir()
    if state != "no token":
        create_run_folder(run, "here")
    if state not in ("no token", "another token"):
        (run / "token").unlink()
        shutil.copy(tmp_path / "away" / "token", run / "token")
    if state == "no waiting room":
        shutil.copytree(tmp_path / "away" / "generations", run / "generations", dirs_exist_ok=True)
        (run / "waiting").rmdir()
    before = sorted(run.rglob("*"))
    assert folder_error(env)
    with pytest.raises(OSError):
        Membership(
            env, ElasticLimits(), on_abort=lambda sockets: None
        ) if "token" in state else waiting_or_log(run, env)
    assert sorted(run.rglob("*")) == before


def waiting_or_log(run: Path, env: WorkerEnv) -> None:
    """Access the log and the waiting room as a starting worker does."""
    GenerationLog(run / "generations", since=env.known_generation).newest()
    open_waiting_room(run).register(Member("here/0/a", "here", 0, 1, "127.0.0.1:1"))


@pytest.mark.parametrize("missing", ["the folder", "its records"])
def test_missing_log_is_neither_read_as_empty_nor_created(tmp_path: Path, missing: str) -> None:
    run = tmp_path / "run"
    create_run_folder(run, "here")
    log = GenerationLog(run / "generations")
    log.propose(Generation(1, new_token(), (), "", 0, "for the test"))
    (run / "generations").rename(run / "away")
    if missing == "its records":
        (run / "generations").mkdir()
    before = sorted(run.rglob("*"))
    for number in (1, 2):
        with pytest.raises(FileNotFoundError):
            log.propose(Generation(number, new_token(), (), "", 0, "a fork"))
    for known in (0, 1):
        with pytest.raises(FileNotFoundError):
            log.newest(known)
    assert sorted(run.rglob("*")) == before


# An attacker between two members that can read and change every frame, without the token.

TOKEN = b"f" * 64


def connection() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


class ManInTheMiddle:
    """Two ends of a connection whose frames pass through here."""

    def __init__(self) -> None:
        self.sockets = [*connection(), *connection()]
        client, self.at_client, server, self.at_server = self.sockets
        self.client = PeerLink(client, TOKEN, "a/0/x", True, 0.0)
        self.server = PeerLink(server, TOKEN, "b/0/y", False, 0.0)

    def __enter__(self) -> ManInTheMiddle:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.sockets:
            end.close()

    def take_frame(self, link: PeerLink) -> bytes:
        """Return the next frame that the link sends."""
        link.flush()
        source = self.at_client if link is self.client else self.at_server
        source.settimeout(5)
        head = source.recv(LENGTH_PREFIX.size, socket.MSG_WAITALL)
        return head + source.recv(LENGTH_PREFIX.unpack(head)[0], socket.MSG_WAITALL)

    def deliver(self, link: PeerLink, *frames: bytes) -> list[dict[str, object]]:
        """Pass frames to the link; return the messages it accepts."""
        (self.at_client if link is self.client else self.at_server).sendall(b"".join(frames))
        select.select([link.socket], [], [], 5)
        return link.receive()

    def handshake(self) -> None:
        """Pass the unchanged handshake."""
        self.exchange_hellos()
        for sender, receiver in ((self.client, self.server), (self.server, self.client)):
            assert self.deliver(receiver, self.take_frame(sender)) == []
        assert (self.client.id, self.server.id) == ("b/0/y", "a/0/x")

    def exchange_hellos(self) -> None:
        for sender, receiver in ((self.server, self.client), (self.client, self.server)):
            assert self.deliver(receiver, self.take_frame(sender)) == []

    def frames_of(self, link: PeerLink, *kinds: str) -> list[bytes]:
        """Return the frames of messages of these kinds."""
        frames = []
        for kind in kinds:
            link.send({"kind": kind})
            frames.append(self.take_frame(link))
        return frames


def test_messages_pass_in_both_directions() -> None:
    with ManInTheMiddle() as middle:
        middle.handshake()
        for sender, receiver in ((middle.client, middle.server), (middle.server, middle.client)):
            frames = middle.frames_of(sender, "one", "two", "three")
            assert [message["kind"] for message in middle.deliver(receiver, *frames)] == [
                "one",
                "two",
                "three",
            ]


def flipped(data: bytes, at: int) -> bytes:
    """Return the bytes with one bit flipped."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "attack",
    [
        "altered",
        "altered MAC",
        "repeated",
        "dropped",
        "swapped",
        "sent back",
        "unsigned",
        "of another connection",
    ],
)
def test_wrong_frame_closes_the_connection(attack: str) -> None:
    with ManInTheMiddle() as middle, ManInTheMiddle() as other:
        middle.handshake()
        first, second = middle.frames_of(middle.client, "one", "two")
        if attack == "of another connection":
            other.handshake()
        sent = {
            "altered": [flipped(first, len(first) - 3)],
            "altered MAC": [flipped(first, LENGTH_PREFIX.size)],
            "repeated": [first, first],
            "dropped": [second],
            "swapped": [second, first],
            "sent back": middle.frames_of(middle.server, "one"),
            "unsigned": [encode_frame({"kind": "stop"})],
            "of another connection": other.frames_of(other.client, "one")
            if other.client.id
            else [],
        }[attack]
        with pytest.raises(AuthenticationError, match="altered, repeated, dropped or reordered"):
            middle.deliver(middle.server, *sent)
        if attack == "sent back":
            with pytest.raises(AuthenticationError):
                middle.deliver(middle.client, first)


def test_handshake_with_a_changed_id_is_refused() -> None:
    with ManInTheMiddle() as middle:
        middle.exchange_hellos()
        handshake = middle.take_frame(middle.client)
        with pytest.raises(AuthenticationError, match="wrong proof"):
            middle.deliver(middle.server, handshake.replace(b"a/0/x", b"a/0/y"))


def test_handshake_sent_back_is_refused() -> None:
    with ManInTheMiddle() as middle:
        hello = middle.take_frame(middle.client)
        middle.deliver(middle.client, hello)  # with the client's own nonce
        with pytest.raises(AuthenticationError, match="wrong proof"):
            middle.deliver(middle.client, middle.take_frame(middle.client))


def test_unauthenticated_peer_may_send_little() -> None:
    with (
        ManInTheMiddle() as middle,
        pytest.raises(AuthenticationError, match="above the limit of 65536"),
    ):
        middle.deliver(middle.server, LENGTH_PREFIX.pack(MAX_FRAME_BYTES // 2) + bytes(100))
