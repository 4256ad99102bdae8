"""Membership with its real threads, fake peers on loopback and a generation log in memory."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.membership_fakes import DISK_FULL, FakePeer, MemoryLog, serve_until

from lockstep.elastic import run_folder
from lockstep.elastic.generation_log import Generation, Member, RunResult
from lockstep.elastic.link import send_control_message
from lockstep.elastic.membership import Membership, RunEnded
from lockstep.elastic.protocol.decisions import ElasticLimits, LeaveReport
from lockstep.elastic.run_folder import create_run_folder, read_token
from lockstep.errors import FencedError, PeersLostError, UsageError
from lockstep.object_store.storage import DiskStorage
from lockstep.runtime.worker_env import WorkerEnv

LIMITS = ElasticLimits(
    heartbeat_s=0.2,
    heartbeat_timeout_s=0.4,
    log_poll_s=0.05,
    rendezvous_timeout_s=0.2,
    takeover_s=0.5,
)
FINGERPRINT = {"torch": "2.13"}


class Cluster:
    """A membership, the log that it uses, and how often its group was aborted."""

    def __init__(self, folder: Path, limits: ElasticLimits = LIMITS) -> None:
        run = folder / "run"
        mark = create_run_folder(run, "here")
        env = WorkerEnv(str(run), str(folder), "here", 0, 1, 1, 1, 8, "127.0.0.1", folder_id=mark)
        self.log, self.token, self.aborts = MemoryLog(), read_token(run), 0
        self.membership = Membership(env, limits, self._count_abort, self.log)
        self.me, self.peers = self.membership.me, [FakePeer(self.token)]

    def _count_abort(self, sockets: set[int]) -> None:
        self.aborts += 1

    @property
    def peer(self) -> FakePeer:
        return self.peers[0]

    def write(self, number: int, *members: Member, end: RunResult | None = None) -> Generation:
        """Write a generation to the log, as another worker would."""
        return self.log.records.setdefault(
            number,
            Generation(number, f"token {number}", members, "127.0.0.1:9", 0, "test", end=end),
        )

    def start(self, *members: Member) -> None:
        """Form generation 1 of these members, with links to the peer if it is one."""
        self.write(1, *members)
        self.membership.request_join(FINGERPRINT, is_joining=False)
        assert self.membership.next_generation(0).number == 1
        if self.peer.me in members:
            self.peer.connect(self.me)
            self.until(lambda: self.peer.is_linked)

    def until(self, condition: Callable[[], object]) -> None:
        serve_until(condition, *self.peers)

    def status(self) -> dict[str, Any]:
        return send_control_message(self.me.address, self.token, {"kind": "status"})

    def join_request(self) -> dict[str, Any]:
        """A request of the peer to join generation 1."""
        return {
            "kind": "join",
            "number": 1,
            "member": vars(self.peer.me),
            "fingerprint": FINGERPRINT,
            "reaches": [self.me.id],
        }

    def close(self) -> None:
        self.log.opened.set()
        self.membership.close()
        for peer in self.peers:
            peer.exit()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_single_worker_forms_the_first_generation(cluster: Cluster) -> None:
    cluster.membership.request_join({}, is_joining=False)
    generation = cluster.membership.next_generation(0)
    assert (generation.number, generation.members, generation.reason) == (1, (cluster.me,), "start")
    assert cluster.log.records == {1: generation} and generation.store.startswith("127.0.0.1:")


def test_waiting_worker_is_in_the_waiting_room_until_it_is_a_member(cluster: Cluster) -> None:
    registered = cluster.membership.folder / "waiting" / run_folder.name_of(cluster.me)
    cluster.log.error = DISK_FULL
    cluster.membership.request_join({}, is_joining=False)
    cluster.until(registered.exists)
    cluster.log.error = None
    assert cluster.membership.next_generation(0).members == (cluster.me,)
    cluster.until(lambda: not registered.exists())


def test_joiner_is_counted_and_admitted_to_the_next_generation(cluster: Cluster) -> None:
    cluster.start(cluster.me)
    cluster.peer.connect(cluster.me)
    cluster.until(lambda: cluster.peer.is_linked)
    cluster.peer.send(cluster.join_request())
    cluster.until(lambda: cluster.membership.joiner_count == 1)
    cluster.membership.report_left(LeaveReport(1, 7, why="a joiner waits"))
    cluster.until(lambda: 2 in cluster.log.records)
    generation = cluster.membership.next_generation(1)
    assert generation.members == (cluster.me, cluster.peer.me) and generation.step == 7
    assert generation.reason == "there/1 joined"


def test_joiner_with_another_fingerprint_is_refused(cluster: Cluster) -> None:
    cluster.start(cluster.me)
    cluster.peer.connect(cluster.me)
    cluster.until(lambda: cluster.peer.is_linked)
    cluster.peer.send(cluster.join_request() | {"fingerprint": {"torch": "2.11"}})
    cluster.until(lambda: "refused" in cluster.peer.kinds())
    assert cluster.membership.joiner_count == 0


def test_refused_worker_raises_the_reason_in_the_main_thread(cluster: Cluster) -> None:
    cluster.write(1, cluster.peer.me)
    cluster.membership.request_join(FINGERPRINT, is_joining=True)
    cluster.until(lambda: "join" in cluster.peer.kinds())
    cluster.peer.send({"kind": "refused", "why": "torch is another there"})
    with pytest.raises(UsageError, match="torch is another there"):
        cluster.membership.next_generation(0)


def test_heartbeat_silence_of_a_member_aborts_the_group(cluster: Cluster) -> None:
    cluster.start(cluster.me, cluster.peer.me)
    assert not cluster.membership.generation_error(1) and cluster.aborts == 0
    cluster.peer.beats = False
    cluster.until(lambda: cluster.aborts)
    assert cluster.membership.generation_error(1) == "there/1: no heartbeat for 0.4 s"
    with pytest.raises(PeersLostError, match="no heartbeat"):
        cluster.membership.wait_for_result(1)


def test_member_with_heartbeats_is_not_lost(cluster: Cluster) -> None:
    cluster.start(cluster.me, cluster.peer.me)
    until_s = time.monotonic() + 2 * LIMITS.heartbeat_timeout_s
    cluster.until(lambda: time.monotonic() > until_s)
    assert not cluster.membership.generation_error(1) and "heartbeat" in cluster.peer.kinds()


def test_refused_connection_proves_that_a_member_exited(cluster: Cluster) -> None:
    cluster.start(cluster.me, cluster.peer.me)
    cluster.peer.exit()
    cluster.until(lambda: cluster.aborts)
    assert cluster.membership.generation_error(1) == "there/1: exited"
    cluster.membership.report_left(LeaveReport(1, 3, why="a peer is lost"))
    generation = cluster.membership.next_generation(1)
    assert generation.members == (cluster.me,) and generation.step == 3
    assert [(removed.id, removed.why) for removed in generation.out] == [("there/1/peer", "exited")]


def test_broken_link_to_a_living_member_is_opened_again(cluster: Cluster) -> None:
    cluster.start(cluster.me, cluster.peer.me)
    cluster.peer.disconnect()
    cluster.until(lambda: cluster.peer.is_linked)
    assert not cluster.membership.generation_error(1) and cluster.aborts == 0


def test_failed_abort_is_repeated_until_the_group_is_left(cluster: Cluster) -> None:
    failures: list[OSError] = []

    def fail() -> None:
        failures.append(DISK_FULL)
        raise DISK_FULL

    cluster.membership.thread.aborter.on_abort = fail
    cluster.start(cluster.me, cluster.peer.me)
    cluster.peer.exit()
    cluster.until(lambda: len(failures) > 2)
    cluster.membership.start_leaving()
    cluster.membership.report_left(LeaveReport(1, 3))
    cluster.membership.next_generation(1)
    assert cluster.membership.thread.is_alive()


def test_disk_errors_are_retried(cluster: Cluster) -> None:
    cluster.log.error = DISK_FULL
    cluster.membership.request_join({}, is_joining=False)
    cluster.until(lambda: cluster.log.errors_raised > 2)
    assert cluster.status()["membership"] == "out"
    cluster.log.error = None
    assert cluster.membership.next_generation(0).number == 1


def test_failed_proposal_is_repeated(cluster: Cluster) -> None:
    cluster.start(cluster.me)
    cluster.log.error = DISK_FULL
    cluster.membership.report_left(LeaveReport(1, 7, why="test"))
    cluster.until(lambda: cluster.log.errors_raised > 2)
    assert list(cluster.log.records) == [1]
    cluster.log.error = None
    assert cluster.membership.next_generation(1).step == 7


def test_blocked_disk_does_not_stop_heartbeats_and_replies(cluster: Cluster) -> None:
    cluster.start(cluster.me, cluster.peer.me)
    cluster.log.opened.clear()
    cluster.peer.received.clear()
    cluster.until(lambda: len(cluster.peer.received) > 3)
    assert cluster.status()["membership"] == "in" and not cluster.membership.generation_error(1)


def test_proposer_adopts_the_generation_of_another_worker(cluster: Cluster) -> None:
    cluster.log.rival = lambda generation: Generation(
        generation.number, "rival", (cluster.peer.me, cluster.me), "127.0.0.1:9", 0, "rival"
    )
    cluster.membership.request_join({}, is_joining=False)
    generation = cluster.membership.next_generation(0)
    assert generation.token == "rival" and generation.rank_of(cluster.me.id) == 1


def test_member_left_out_by_another_proposer_is_fenced(cluster: Cluster) -> None:
    cluster.start(cluster.me)
    cluster.log.rival = lambda generation: Generation(
        generation.number, "rival", (cluster.peer.me,), "127.0.0.1:9", 7, "rival"
    )
    cluster.membership.report_left(LeaveReport(1, 7, why="test"))
    with pytest.raises(FencedError, match="it was not there"):
        cluster.membership.next_generation(1)
    assert "it was not there" in cluster.membership.generation_error(1)


def test_evicted_worker_is_fenced(cluster: Cluster) -> None:
    cluster.start(cluster.me)
    cluster.membership.evict(cluster.me.id, "its replica differs")
    with pytest.raises(FencedError, match="its replica differs"):
        cluster.membership.next_generation(1)


def test_status_command_reports_the_membership(cluster: Cluster) -> None:
    assert cluster.status() == {
        "kind": "status",
        "id": cluster.me.id,
        "membership": "out",
        "number": 0,
        "waiting": 0,
        "doing": None,
    }
    cluster.start(cluster.me)
    assert (cluster.status()["membership"], cluster.status()["number"]) == ("in", 1)


@pytest.mark.parametrize(
    ("signal", "expected"), [("SIGINT", "SIGINT"), ("SIGKILL", "SIGTERM"), (None, "SIGTERM")]
)
def test_stop_command_sets_the_signal(cluster: Cluster, signal: str | None, expected: str) -> None:
    cluster.start(cluster.me)
    reply = send_control_message(
        cluster.me.address, cluster.token, {"kind": "stop", "signal": signal}
    )
    assert (
        reply == {"kind": "stopping", "id": cluster.me.id}
        and cluster.membership.stop_signal == expected
    )


def test_stop_of_a_waiting_run_records_its_end(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ElasticLimits(log_poll_s=0.05, expected_workers=2, min_workers=2))
    cluster.membership.request_join({}, is_joining=False)
    with pytest.raises(RunEnded) as ended:
        cluster.membership.next_generation(0, lambda: "SIGTERM")
    cluster.close()
    assert ended.value.exit_code == 75 and cluster.log.records[1].end == ended.value.end


def test_published_result_ends_the_run_for_this_worker_and_its_peers(cluster: Cluster) -> None:
    cluster.start(cluster.me, cluster.peer.me)
    cluster.membership.publish_result(RunResult(0, "complete"))
    cluster.membership.wait_for_result(1)
    cluster.until(lambda: "generation" in cluster.peer.kinds())
    (record,) = [
        message["generation"]
        for message in cluster.peer.received
        if message["kind"] == "generation"
    ]
    assert (
        record["number"] == 2
        and record["end"]["code"] == 0
        and record["end"] == vars(cluster.log.records[2].end)
    )
    assert cluster.aborts == 0, "some ranks may still be in the last collective"


def test_publishing_a_result_survives_a_disk_error(cluster: Cluster) -> None:
    cluster.start(cluster.me)
    cluster.log.error = DISK_FULL
    cluster.membership.publish_result(RunResult(0, "complete"))
    assert cluster.membership.thread.is_alive() and list(cluster.log.records) == [1]


def test_malformed_message_of_a_member_closes_its_link(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lockstep").propagate = True
    cluster.start(cluster.me, cluster.peer.me)
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        cluster.peer.send({"kind": "left", "number": 1})
        cluster.until(lambda: "refused a connection from 127.0.0.1" in caplog.text)
    cluster.until(lambda: cluster.peer.is_linked)
    assert not cluster.membership.generation_error(1)


def test_stack_of_the_main_thread_is_sent_on_request(cluster: Cluster) -> None:
    cluster.start(cluster.me, cluster.peer.me)
    cluster.peer.send({"kind": "get_stack"})
    cluster.until(lambda: "stack" in cluster.peer.kinds())
    (answer,) = [message for message in cluster.peer.received if message["kind"] == "stack"]
    assert "test_stack_of_the_main_thread_is_sent_on_request" in answer["stack"]


def test_changing_liveness_file_of_an_unreachable_member_refuses_a_second_training(
    cluster: Cluster,
) -> None:
    other = Member("there/0/other", "there", 0, 1, "127.0.0.1:9", loopback="another boot")
    cluster.write(1, other)
    cluster.membership.request_join({}, is_joining=False)
    stop = threading.Event()
    room = run_folder.WaitingRoom(DiskStorage(cluster.membership.folder / run_folder.WAITING))

    def write_liveness() -> None:
        while not stop.wait(0.02):
            room.write_liveness(other)

    writer = threading.Thread(target=write_liveness)
    writer.start()
    with pytest.raises(UsageError, match="another training is running on host there"):
        cluster.membership.next_generation(0)
    stop.set()
    writer.join()


def test_messages_that_arrive_together_are_answered_in_one_turn(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start(cluster.me, cluster.peer.me)
    answered: list[int] = []
    handled, advance = 0, cluster.membership.protocol.advance

    def advance_and_count(now_s: float) -> list[Any]:
        nonlocal handled
        if handled:
            answered.append(handled)
            handled = 0
        return advance(now_s)

    def count_message(id: str, message: dict[str, Any], now_s: float) -> list[Any]:
        nonlocal handled
        handled += message["kind"] == "ended"
        return on_message(id, message, now_s)

    on_message = cluster.membership.protocol.on_message
    monkeypatch.setattr(cluster.membership.protocol, "advance", advance_and_count)
    monkeypatch.setattr(cluster.membership.protocol, "on_message", count_message)
    ended = {"kind": "ended", "number": 1, "why": "lost", "dead": {}, "partition_suspected": False}
    link = [link for link in cluster.peer.links if link.id][-1]
    for _ in range(100):
        link.send(ended)
    cluster.until(lambda: sum(answered) == 100)
    assert len(answered) < 10, "a turn answers all messages that it received"


def test_message_to_many_members_is_encoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path)
    cluster.peers += [FakePeer(cluster.token, slot) for slot in range(2, 6)]
    for slot, peer in enumerate(cluster.peers, 1):
        peer.me = replace(peer.me, id=f"there/{slot}/peer")
    encoded: list[str] = []
    dumps = json.dumps

    def count(value: Any, **options: Any) -> str:
        encoded.extend([value["kind"]] if isinstance(value, dict) and "kind" in value else [])
        return dumps(value, **options)

    cluster.write(1, cluster.me, *(peer.me for peer in cluster.peers))
    cluster.membership.request_join(FINGERPRINT, is_joining=False)
    cluster.membership.next_generation(0)
    for peer in cluster.peers:
        peer.connect(cluster.me)
    cluster.until(lambda: all(peer.is_linked for peer in cluster.peers))
    monkeypatch.setattr("lockstep.elastic.connections.json.dumps", count)
    cluster.membership.publish_result(RunResult(0, "complete"))
    cluster.until(lambda: all("generation" in peer.kinds() for peer in cluster.peers))
    monkeypatch.undo()
    cluster.close()
    (message,) = {
        dumps(message)
        for peer in cluster.peers
        for message in peer.received
        if message["kind"] == "generation"
    }
    assert encoded.count("generation") == 1 and json.loads(message)["follows"] == "token 1"


def test_bug_in_the_membership_thread_ends_the_worker(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start(cluster.me)
    monkeypatch.setattr(cluster.membership.protocol, "tick", lambda now_s: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cluster.membership.next_generation(1)
    cluster.until(lambda: cluster.aborts)


def test_closed_membership_has_no_threads_and_no_files(cluster: Cluster) -> None:
    cluster.membership.request_join({}, is_joining=False)
    cluster.membership.next_generation(0)
    cluster.membership.close()
    cluster.membership.close()
    assert (
        not cluster.membership.thread.is_alive()
        and not cluster.membership.thread.disk.thread.is_alive()
    )
    assert list((cluster.membership.folder / "waiting").iterdir()) == []
    assert cluster.membership.thread.connections.descriptors() == {-1}
