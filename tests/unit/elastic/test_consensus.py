"""Replicas of several workers: whole or dead, in the decisions of membership and of the vote."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.elastic.consensus import Vote, decide, differing
from lockstep.elastic.generation_log import Arbiter, Member, Record
from lockstep.elastic.protocol import Joiner, Limits, Report, View, newcomers, next_generation
from lockstep.elastic.world import World
from lockstep.training.replica_group import Divergence
from lockstep.training.state_transfer import roles


def member(number: int, host: str = "h") -> Member:
    return Member(f"{host}/{number}/x", host, number, 100 + number, f"10.0.0.{number}:1")


def view(size: int, dead: set[int], joiners: int = 0) -> View:
    members = tuple(member(number) for number in range(size))
    record = Record(7, "token", members, "", 40, "")
    reports = {one.id: Report(7, 50) for number, one in enumerate(members) if number not in dead}
    reaches = frozenset(one.id for one in members)
    new = [Joiner(member(size + number), {}, reaches) for number in range(joiners)]
    return View(record, reports, {members[number].id: "it has ended" for number in dead}, new)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_only_whole_replicas_go_on(replicas: int, unit: int, data: st.DataObject) -> None:
    size = replicas * unit
    dead = set(data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size - 1)))
    joiners = data.draw(st.integers(0, 5))
    record, _ = next_generation(view(size, dead, joiners), Limits(unit=unit), "next")
    assert record is not None and record.number == 8
    old = [one.slot for one in record.members if one.slot < size]
    whole = [n for first in range(0, size, unit) for n in range(first, first + unit) if not dead & set(range(first, first + unit))]
    assert old == whole  # in their order, so that each keeps its place
    new = len(record.members) - len(old)
    assert new == (joiners // unit * unit if whole else 0) and len(record.members) % unit == 0
    assert {one.id for one in record.out} == {member(n).id for n in range(size) if n not in whole}


def test_where_no_replica_is_whole_nobody_goes_on_and_all_begin_anew() -> None:
    record, reason = next_generation(view(4, {0, 3}), Limits(unit=2), "next")
    assert record is not None and not record.members and len(record.out) == 4 and "newest checkpoint" in reason


def test_those_of_one_host_make_a_replica() -> None:
    hosts = [member(0, "b"), member(0, "a"), member(1, "b"), member(1, "a")]
    new = newcomers([Joiner(one, {}) for one in hosts], [], Limits(unit=2))
    assert [one.host for one in new] == ["a", "a", "b", "b"]


def test_a_difference_is_one_at_the_same_place_of_another_replica() -> None:
    assert differing([1, 2, 1, 2, 1, 2], 2) == ()
    assert differing([1, 2, 1, 9, 1, 2], 2) == (3,)
    assert differing([1, 2, 8, 9, 1, 2], 2) == (2, 3)
    assert differing([1, 2, 1, 9], 2) == (0, 1, 2, 3)  # of two nobody is in the majority
    assert differing([1, 2, 3], 3) == ()  # one replica has nobody to differ from
    assert differing([1, 1, None, 9], 1) == (3,)  # who joins holds nothing
    assert differing([1, 2, None, None, 9, 2], 2) == (0, 1, 4, 5) and differing([None, 1, None], 1) == differing([None], 1) == ()
    verdict = decide([Vote([], digest=digest) for digest in (1, 2, 1, 9, 1, 2)], unit=2)
    assert verdict.differ == (3,) and verdict.digests == (1, 2, 1, 9, 1, 2)


def test_three_divergences_in_a_row_of_workers_that_took_the_same_state_are_the_loops_own() -> None:
    """Each time: the others go on alone and are alike, a new worker takes their state, and differs after one update."""
    world = World(0, 4, 0, 4, "here", torch.device("cpu"))
    divergence = Divergence()
    for turn, step in enumerate((0, 10, 20, 30, 40)):
        world.generation, world.standings = 2 * turn, [{"step": step, "diverged": divergence.count}, {"step": -1}]
        divergence.enter(world, step)
        divergence.passed(step)  # the state as it was taken: no update yet
        assert not divergence.proven
        if healthy := turn == 2:
            divergence.passed(step + 1)
        divergence.failed(step + 1)
        assert divergence.count == (0 if healthy else turn + 1 if turn < 2 else turn - 2)
        world.generation, world.standings = 2 * turn + 1, [{"step": step + 1, "diverged": divergence.count}] * 3
        divergence.enter(world, step + 1)
        divergence.passed(step + 2)  # without the one that differed, which says nothing of it


def test_state_comes_from_those_who_stand_at_the_same_step() -> None:
    first, sources, joiners = roles([{"step": 5}, {"step": 5}, {"step": -1}, {"step": -1}])
    assert (first, sources, joiners) == (5, [0, 1], [2, 3])


def test_it_is_known_which_generations_are_condemned_until_the_culprit_is_found(tmp_path: Path) -> None:
    log = Arbiter(tmp_path)
    for number in (12, 7, 7):  # each that finds it out says it
        log.condemn(number, f"replicas differ in {number}", {"step": number, "what": "weights", "digests": {}})
    assert [log.condemned(number) for number in (6, 7, 12)] == ["", "replicas differ in 7", "replicas differ in 12"]
    assert log.newest() is None  # no generations
    path, found = log.suspects()[0]
    assert found["step"] == 7
    path.unlink()
    (tmp_path / "000009.suspects.json").symlink_to(tmp_path / "gone")  # deleted by another while it is read
    assert log.condemned(7) == log.condemned(9) == "" and [found["step"] for _, found in log.suspects()] == [12]
