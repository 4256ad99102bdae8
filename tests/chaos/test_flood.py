"""A flood of unauthenticated connections, to members with few file descriptors."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.hosts import Host, Training
from test_wire import connect_to, member

from lockstep.elastic.connections import max_unauthenticated
from lockstep.elastic.generation_log import Member
from lockstep.elastic.link import send_control_message
from lockstep.elastic.membership import Membership
from lockstep.elastic.protocol.state import AbortGroup, Connect
from lockstep.elastic.run_folder import read_token

__all__ = ["member"]
LIMITED = Host(enter=("prlimit", "--nofile=192:192"))
FLOOD = Path(__file__).parents[1] / "support" / "flood.py"


def test_the_oldest_of_too_many_unauthenticated_connections_is_dropped_and_requests_are_answered(
    member: Membership,
) -> None:
    limit = max_unauthenticated()
    flood = [connect_to(member) for _ in range(limit)]
    time.sleep(0.3)  # none of them is new any more
    flood += [connect_to(member) for _ in range(5)]
    assert (
        send_control_message(member.me.address, read_token(member.folder), {"kind": "status"})[
            "kind"
        ]
        == "status"
    )
    assert len(member.thread.connections.descriptors()) - 1 <= limit  # without the listener
    for connection in flood[:5]:
        while connection.recv(65536):
            pass
    for connection in flood:
        connection.close()


def test_a_flood_and_a_killed_worker_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    training = Training(
        tmp_path, [LIMITED], steps=80, values={"elastic.heartbeat_timeout_s": 15}
    )  # no survivor is starved out
    try:
        training.wait_for_step(5)
        before = training.newest
        addresses = [member.address for member in before.members]
        flood = subprocess.Popen(
            [sys.executable, str(FLOOD), "400", *addresses], stdout=subprocess.PIPE
        )
        try:
            assert flood.stdout and flood.stdout.readline() == b"flooding\n"
            training.wait_for_step(training.step + 3)
            training.kill(training.leader)
            after_s = training.wait_until_whole(before)
            print(
                f"whole after {after_s:.2f} s; {len(os.listdir(f'/proc/{training.leader.pid}/fd'))} descriptors"
            )
            stayed = {member.id for member in training.newest.members} & {
                member.id for member in before.members[1:]
            }
            assert len(stayed) == 2, training.report()
        finally:
            flood.kill()
            flood.communicate()
        assert not training.wrote("Too many open files")
    finally:
        training.close()


def test_a_member_out_of_descriptors_recovers(member: Membership) -> None:
    host, _, port = member.me.address.rpartition(":")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as early, socket.socket() as free:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free.fileno(), limits[1]))
        try:
            early.connect((host, int(port)))
            member.thread.report(
                lambda now_s: [Connect(Member("there/0/a", "there", 0, 1, member.me.address))]
            )
            member.thread.report(lambda now_s: [AbortGroup("for the test")])
            time.sleep(0.5)
            assert member.thread.is_alive() and member.thread.disk.thread.is_alive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (
            send_control_message(member.me.address, read_token(member.folder), {"kind": "status"})[
                "kind"
            ]
            == "status"
        )


def test_aborting_a_group_is_retried_if_no_descriptor_was_free(member: Membership) -> None:
    calls: list[int] = []

    def fail_to_abort() -> None:
        calls.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    member.thread.aborter.on_abort = fail_to_abort
    member.thread.report(lambda now_s: [AbortGroup("for the test")])
    assert (
        send_control_message(member.me.address, read_token(member.folder), {"kind": "status"})[
            "kind"
        ]
        == "status"
    )
    assert calls and member.thread.is_alive()
