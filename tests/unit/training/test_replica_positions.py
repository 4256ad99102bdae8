"""A member keeps its position in a replica, which decides the slices of the model that it holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.elastic.generation_log import Generation, Member
from lockstep.elastic.protocol.decisions import (
    CoordinatorView,
    ElasticLimits,
    Joiner,
    LeaveReport,
    next_generation,
)
from lockstep.layout import Layout


@given(
    st.sampled_from([Layout(1, 2), Layout(1, 3), Layout(1, 2, 2), Layout(1, 2, 1, 2)]), st.data()
)
def test_member_keeps_its_slices_in_every_later_generation(
    layout: Layout, data: st.DataObject
) -> None:
    """So a joiner may keep its part of the model when the members that it joined are lost."""
    replica_size, count = layout.workers_per_replica, 0

    def new_members(most: int) -> list[Member]:
        nonlocal count
        hosts = [data.draw(st.sampled_from("abc")) for _ in range(most)]
        count += most
        return [
            Member(f"{host}/{number}/x", host, number, number, "")
            for number, host in enumerate(hosts, count - most)
        ]

    generation = Generation(
        1, "token", tuple(new_members(data.draw(st.integers(1, 4)) * replica_size)), "", 0, ""
    )
    for _ in range(4):
        ids = [member.id for member in generation.members]
        dead = dict.fromkeys(
            data.draw(st.lists(st.sampled_from(ids), unique=True, max_size=len(ids) - 1)), "exited"
        )
        reports = {
            id: LeaveReport(generation.number, -1 if data.draw(st.booleans()) else 7)
            for id in ids
            if id not in dead
        }
        joiners = [
            Joiner(member, {}, frozenset(ids))
            for member in new_members(data.draw(st.integers(0, 2 * replica_size)))
        ]
        proposal, _ = next_generation(
            CoordinatorView(generation, reports, dead, joiners),
            ElasticLimits(replica_size=replica_size),
            "t",
        )
        if proposal is None or not proposal.members:
            return
        for rank, member in enumerate(proposal.members):
            if member.id in ids:
                before, now = (
                    layout.coordinates(position) for position in (ids.index(member.id), rank)
                )
                assert (before.shard, before.tensor, before.stage) == (
                    now.shard,
                    now.tensor,
                    now.stage,
                )
        generation = proposal
