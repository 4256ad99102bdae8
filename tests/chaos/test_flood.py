"""A flood of connections that prove nothing, at members that may open few files."""

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
from test_wire import door, member

from lockstep.elastic.generation_log import Member
from lockstep.elastic.link import ask, read_token
from lockstep.elastic.membership import Membership, most_strangers
from lockstep.elastic.protocol import Connect, Cut

__all__ = ["member"]
LIMITED = Host(enter=("prlimit", "--nofile=192:192"))
FLOOD = Path(__file__).parents[1] / "support" / "flood.py"


def test_the_oldest_of_too_many_strangers_is_dropped_and_members_are_still_answered(member: Membership) -> None:
    most = most_strangers()
    flood = [door(member) for _ in range(most)]
    time.sleep(0.3)  # none of them is young
    flood += [door(member) for _ in range(5)]
    assert ask(member.me.address, read_token(member.folder), {"kind": "status"})["kind"] == "status"
    assert len(member._links) <= most
    for one in flood[:5]:
        while one.recv(65536):
            pass
    for one in flood:
        one.close()


def test_a_flood_and_a_killed_worker_at_once_do_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    one = Training(tmp_path, [LIMITED], steps=80)
    try:
        one.wait_for_step(5)
        before = one.newest
        addresses = [member.address for member in before.members]
        flood = subprocess.Popen([sys.executable, str(FLOOD), "400", *addresses], stdout=subprocess.PIPE)
        try:
            assert flood.stdout and flood.stdout.readline() == b"flooding\n"
            one.wait_for_step(one.step + 3)
            one.kill(one.leader)
            after_s = one.wait_until_whole(before)
            print(f"whole after {after_s:.2f} s; {len(os.listdir(f'/proc/{one.leader.pid}/fd'))} descriptors")
            stayed = {member.id for member in one.newest.members} & {member.id for member in before.members[1:]}
            assert len(stayed) == 2, one.story()
        finally:
            flood.kill()
            flood.communicate()
        assert not one.says("Too many open files")
    finally:
        one.close()


def test_a_member_without_a_free_descriptor_goes_on_when_there_are_some_again(member: Membership) -> None:
    host, _, port = member.me.address.rpartition(":")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as early, socket.socket() as free:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free.fileno(), limits[1]))
        try:
            early.connect((host, int(port)))
            member._call(lambda: [Connect(Member("there/0/a", "there", 0, 1, member.me.address))])
            member._call(lambda: [Cut("for the test")])
            time.sleep(0.5)
            assert member._threads[0].is_alive() and member._threads[1].is_alive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert ask(member.me.address, read_token(member.folder), {"kind": "status"})["kind"] == "status"


def test_cutting_a_group_is_tried_again_when_there_was_no_descriptor_for_it(member: Membership) -> None:
    calls: list[int] = []

    def cut() -> None:
        calls.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    member.on_cut = cut
    member._call(lambda: [Cut("for the test")])
    assert ask(member.me.address, read_token(member.folder), {"kind": "status"})["kind"] == "status"
    assert calls and member._threads[0].is_alive()
