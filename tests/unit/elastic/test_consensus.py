"""Replicas of several workers, which survive or leave as a whole: generations and votes;
divergence.
"""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.elastic.consensus import find_divergent_ranks
from lockstep.elastic.generation_log import NO_GENERATION, Generation, GenerationLog, Member
from lockstep.elastic.protocol.decisions import (
    CoordinatorView,
    ElasticLimits,
    Joiner,
    LeaveReport,
    first_whole_replicas,
    next_generation,
    select_joiners,
)
from lockstep.elastic.world import Progress, World, transfer_roles
from lockstep.training.divergence import Divergence


class FakeRuntime:
    """The part of an ElasticRuntime that Divergence reads."""

    def form(self, generation: int, *member_progress: Progress) -> None:
        self.world = World(0, 4, 0, 4, "here", torch.device("cpu"), generation)
        self.member_progress = list(member_progress)


def make_member(number: int, host: str = "h") -> Member:
    return Member(f"{host}/{number}/x", host, number, 100 + number, f"10.0.0.{number}:1")


def view(size: int, dead: set[int], joiners: int = 0) -> CoordinatorView:
    members = tuple(make_member(number) for number in range(size))
    record = Generation(7, "token", members, "", 40, "")
    reports = {
        member.id: LeaveReport(7, 50) for number, member in enumerate(members) if number not in dead
    }
    reaches = frozenset(member.id for member in members)
    new = [Joiner(make_member(size + number), {}, reaches) for number in range(joiners)]
    return CoordinatorView(
        record, reports, {members[number].id: "it has exited" for number in dead}, new
    )


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_only_whole_replicas_survive(replicas: int, unit: int, data: st.DataObject) -> None:
    size = replicas * unit
    dead = set(data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size - 1)))
    joiners = data.draw(st.integers(0, 5))
    record, _ = next_generation(view(size, dead, joiners), ElasticLimits(replica_size=unit), "next")
    assert record is not None and record.number == 8
    old = [member.slot for member in record.members if member.slot < size]
    whole = [
        n
        for first in range(0, size, unit)
        for n in range(first, first + unit)
        if not dead & set(range(first, first + unit))
    ]
    assert old == whole  # in order, so that each keeps its position
    new = len(record.members) - len(old)
    assert new == (joiners // unit * unit if whole else 0) and len(record.members) % unit == 0
    assert {member.id for member in record.out} == {
        make_member(n).id for n in range(size) if n not in whole
    }


def test_without_a_whole_replica_all_members_are_removed_and_restart() -> None:
    record, reason = next_generation(view(4, {0, 3}), ElasticLimits(replica_size=2), "next")
    assert (
        record is not None
        and not record.members
        and len(record.out) == 4
        and "newest checkpoint" in reason
    )


def test_joiners_of_one_host_form_a_replica() -> None:
    hosts = [make_member(0, "b"), make_member(0, "a"), make_member(1, "b"), make_member(1, "a")]
    ids = frozenset(member.id for member in hosts)
    new = select_joiners(
        [Joiner(member, {}, ids) for member in hosts], [], ElasticLimits(replica_size=2)
    )
    assert [member.host for member in new] == ["a", "a", "b", "b"]


def test_without_a_shared_disk_no_replica_spans_hosts() -> None:
    limits = ElasticLimits(replica_size=2, one_host=True)
    hosts = [
        make_member(slot, host)
        for slot, host in ((0, "b"), (0, "a"), (0, "c"), (1, "a"), (2, "a"), (1, "b"))
    ]
    ids = frozenset(member.id for member in hosts)
    new = select_joiners([Joiner(member, {}, ids) for member in hosts], [], limits)
    assert [f"{member.host}{member.slot}" for member in new] == ["a0", "a1", "b0", "b1"]
    assert [f"{member.host}{member.slot}" for member in first_whole_replicas(hosts, 3, limits)] == [
        "b0",
        "b1",
    ]
    assert not first_whole_replicas(hosts[:3], 3, limits)


def test_state_is_compared_with_the_same_position_of_other_replicas() -> None:
    assert find_divergent_ranks([1, 2, 1, 2, 1, 2], 2) == ()
    assert find_divergent_ranks([1, 2, 1, 9, 1, 2], 2) == (3,)
    assert find_divergent_ranks([1, 2, 8, 9, 1, 2], 2) == (2, 3)
    assert find_divergent_ranks([1, 2, 1, 9], 2) == (0, 1, 2, 3)  # no majority among two
    assert find_divergent_ranks([1, 2, 3], 3) == ()  # a single replica cannot diverge
    assert find_divergent_ranks([1, 1, None, 9], 1) == (3,)  # a joiner has no state
    assert find_divergent_ranks([1, 2, None, None, 9, 2], 2) == (0, 1, 4, 5)
    assert find_divergent_ranks([None, 1, None], 1) == find_divergent_ranks([None], 1) == ()


def test_three_divergences_in_a_row_after_a_state_transfer_are_a_bug_of_the_loop() -> None:
    """Each time the others continue without divergence, and a new worker takes their state and
    diverges after one update.
    """
    runtime, divergence = FakeRuntime(), Divergence()
    for turn, step in enumerate((0, 10, 20, 30, 40)):
        runtime.form(
            2 * turn, Progress("step", step, divergences=divergence.count), Progress("join", -1)
        )
        divergence.start_generation(runtime, step)
        divergence.record_equal(step)  # the state as received: no update yet
        assert not divergence.proven
        if healthy := turn == 2:
            divergence.record_equal(step + 1)
        divergence.record_difference(step + 1)
        assert divergence.count == (0 if healthy else turn + 1 if turn < 2 else turn - 2)
        runtime.form(2 * turn + 1, *[Progress("step", step + 1, divergences=divergence.count)] * 3)
        divergence.start_generation(runtime, step + 1)
        divergence.record_equal(
            step + 2
        )  # without the divergent worker, which proves nothing about it


def test_state_comes_from_ranks_at_the_same_step() -> None:
    first, sources, joiners = transfer_roles([Progress("step", step) for step in (5, 5, -1, -1)])
    assert (first, sources, joiners) == (5, [0, 1], [2, 3])


def test_generations_stay_untrusted_until_the_divergent_rank_is_found(tmp_path: Path) -> None:
    log = GenerationLog(tmp_path)
    for number in (12, 7, 7):  # every member that detects it writes it
        log.mark_untrusted(
            number,
            f"replicas differ in {number}",
            {"step": number, "what": "weights", "digests": {}},
        )
    assert [log.untrusted_reason(number) for number in (6, 7, 12)] == [
        "",
        "replicas differ in 7",
        "replicas differ in 12",
    ]
    assert log.newest() == NO_GENERATION  # no generations
    name, record = log.divergence_records()[0]
    assert record["step"] == 7
    log.folder.remove(name)
    (tmp_path / "000009.suspects.json").symlink_to(
        tmp_path / "gone"
    )  # deleted by another while it is read
    assert log.untrusted_reason(7) == log.untrusted_reason(9) == "" and [
        record["step"] for _, record in log.divergence_records()
    ] == [12]
