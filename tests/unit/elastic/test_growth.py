"""The work of the membership protocol, counted, grows with the number of members and no faster."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.many_members import ManyMembers, make_member

from lockstep.elastic import run_folder
from lockstep.elastic.generation_log import Generation
from lockstep.elastic.protocol.decisions import ElasticLimits
from lockstep.elastic.protocol.state import Effect, FormGroup, Propose, ReadLog, Send
from lockstep.elastic.protocol.transitions import Protocol
from lockstep.elastic.run_folder import create_run_folder
from lockstep.object_store import storage


def count_calls(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return (the result of a function, the number of calls of Python and C functions in it)."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        return function(), calls
    finally:
        sys.setprofile(None)


def proposal_after_a_loss(cluster: ManyMembers) -> list[Effect]:
    """One worker exits, all others report, and the coordinator proposes the next generation."""
    lost, protocol = cluster.members[len(cluster.members) // 2], cluster.protocol
    effects = [*cluster.lose(lost), *cluster.leave()]
    for id, message in cluster.reports(lost):
        effects += protocol.on_message(id, message, cluster.now_s)
    effects += protocol.advance(cluster.now_s)
    cluster.adopt(effects)
    return effects


def test_work_of_a_start_and_a_loss_is_linear_in_the_members() -> None:
    work: dict[str, list[int]] = {"start": [], "heartbeat": [], "loss": []}
    for members in (128, 512):
        cluster = ManyMembers(members)
        _, calls = count_calls(cluster.start)
        work["start"].append(calls)
        beats, calls = count_calls(cluster.beat)
        assert len([effect for effect in beats if isinstance(effect, Send)]) == members - 1
        work["heartbeat"].append(calls)
        effects, calls = count_calls(lambda cluster=cluster: proposal_after_a_loss(cluster))
        work["loss"].append(calls)
        (proposal,) = [effect.generation for effect in effects if isinstance(effect, Propose)]
        assert len(proposal.members) == members - 1
        assert len([effect for effect in effects if isinstance(effect, Send)]) == members - 2, (
            "one message to each member"
        )
    for name, (few, many) in work.items():
        assert many <= 4.4 * few, f"{name}: {few} calls for 128 members, {many} for 512"


def test_announcement_names_only_the_changes() -> None:
    cluster = ManyMembers(512)
    first = cluster.start()
    survivor, newcomer = (
        Protocol(make_member(index), ElasticLimits(), lambda: "token", 0.0) for index in (5, 600)
    )
    survivor.request_join(0.0, {"torch": "2.13"})
    survivor.on_log_read(first, [], 0.0)
    joiner = make_member(16)  # it replaces a member of the third host, so all ranks after it move
    joined = Generation(
        2,
        "token 2",
        (
            *first.members[:16],
            *first.members[17:30],
            replace(joiner, id="h0002/0/new"),
            *first.members[30:],
        ),
        "",
        7,
        "",
    )
    message = json.dumps(
        {"kind": "generation", "number": 2, "follows": "token", "generation": joined.to_json(first)}
    )
    assert len(message) < 500
    assert (
        FormGroup(joined) in survivor.on_message("h0000/0", json.loads(message), 1.0)
        and survivor.generation == joined
    )
    assert newcomer.on_message("h0000/0", json.loads(message), 1.0) == [ReadLog(0)], (
        "it does not know generation 1"
    )
    proposal_after_a_loss(cluster)
    assert len(json.dumps(cluster.protocol.outbox.announcement)) < 400


@pytest.mark.parametrize(
    ("index", "is_linked", "reads"), [(0, True, 20), (1, True, 2), (1, False, 20)]
)
def test_members_linked_to_the_coordinator_seldom_read_the_log(
    index: int, is_linked: bool, reads: int
) -> None:
    members = tuple(map(make_member, range(3)))
    worker = Protocol(members[index], ElasticLimits(), lambda: "token", 0.0)
    worker.request_join(0.0, {"torch": "2.13"})
    worker.on_log_read(Generation(1, "token", members, "", 0, ""), [], 0.0)
    others = [member for member in members if member != worker.me]
    for other in others if is_linked else ():
        worker.on_link_up(other.id, 0.0)
    effects: list[Effect] = []
    for tick in range(1, 201):
        for other in others:
            worker.on_message(other.id, {"kind": "heartbeat"}, tick / 10)
        effects += worker.tick(tick / 10)
    assert abs(len([effect for effect in effects if isinstance(effect, ReadLog)]) - reads) <= 1
    (read,) = [effect for effect in worker.tick(22.0) if isinstance(effect, ReadLog)]
    assert read == ReadLog(1), "a process that was stopped reads the log at once"


def test_waiting_worker_reads_each_file_of_the_waiting_room_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = run_folder.open_waiting_room(tmp_path)
    create_run_folder(tmp_path, "here")
    members, opened = [make_member(index) for index in range(20)], []
    for member in members[:-1]:
        room.register(member)
    room.write_liveness(members[3])
    monkeypatch.setattr(
        storage, "read_json", lambda path: opened.append(path.name)
    )  # where a store would be named
    read = storage.read_bytes
    monkeypatch.setattr(storage, "read_bytes", lambda path: opened.append(path.name) or read(path))
    known: dict[str, Any] = {}
    assert room.members(known) == members[:-1] and len(opened) == 19
    room.register(members[-1])
    room.unregister(members[0])
    opened.clear()
    assert room.members(known) == members[1:] and len(opened) == 1
    opened.clear()
    assert list(room.read_liveness(members)) == [members[3].id] and len(opened) == 1
