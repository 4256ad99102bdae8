"""Rate limit of log lines about refused connections; peers that accept and close connections."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from lockstep.elastic.connections import MAX_REFUSAL_KEYS, REJECTING_S, Connections, LogLimiter
from lockstep.elastic.generation_log import Member
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.protocol.transitions import Protocol


def test_first_event_is_logged_and_later_ones_counted() -> None:
    limiter = LogLimiter(10.0)
    assert [limiter.due("a", now_s) for now_s in (0.0, 0.1, 5.0, 9.9)] == [1, 0, 0, 0]
    assert limiter.due("b", 5.0) == 1
    assert limiter.due("a", 10.0) == 4
    assert limiter.due("a", 25.0) == 1


def test_number_of_keys_is_limited() -> None:
    limiter = LogLimiter(10.0)
    assert (
        sum(bool(limiter.due(number, 0.0)) for number in range(10 * MAX_REFUSAL_KEYS))
        == MAX_REFUSAL_KEYS + 1
    )
    assert limiter.due("the last", 10.0) == 9 * MAX_REFUSAL_KEYS


def test_rejecting_peer_is_forgotten() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    protocol = Protocol(
        Member("a/0/x", "a", 0, 1, "127.0.0.1:1"), ElasticLimits(), lambda: "token", 0.0
    )
    connections = Connections(
        listener, b"token", protocol, lambda *event: None, lambda link, message: None
    )
    with socket.create_server(("127.0.0.1", 0)) as peer:
        connections.connect(Member("b/0/y", "b", 0, 2, f"127.0.0.1:{peer.getsockname()[1]}"))
        peer.accept()[0].close()
        while not connections._exiting_since_s:
            connections.serve(0.1)
        connections.retry(time.monotonic())
        assert connections._exiting_since_s
    connections.retry(time.monotonic() + REJECTING_S)
    assert not connections._exiting_since_s
    connections.close()


def test_closed_connections_leave_no_descriptor_and_never_write_to_another(tmp_path: Path) -> None:
    protocol = Protocol(
        Member("a/0/x", "a", 0, 1, "127.0.0.1:1"), ElasticLimits(), lambda: "token", 0.0
    )
    before = sorted(os.listdir("/proc/self/fd"))
    connections = Connections(
        socket.create_server(("127.0.0.1", 0)),
        b"token",
        protocol,
        lambda *event: None,
        lambda link, message: None,
    )
    connections.wake()
    connections.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    # They get the numbers of the closed descriptors.
    files = [open(tmp_path / str(number), "wb") for number in range(8)]  # noqa: SIM115
    connections.wake()
    for file in files:
        file.close()
    assert not any(path.stat().st_size for path in tmp_path.iterdir())
