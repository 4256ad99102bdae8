"""Process groups before and after a failure: the first error is kept, later works do not start."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import PeersLostError
from lockstep.layout import Layout
from lockstep.parallel.groups import ProcessGroups, all_to_all_rows


@pytest.fixture
def groups() -> ProcessGroups:
    return ProcessGroups(Layout(2, shard=2, tensor=2))


def test_layout_of_a_generation_has_as_many_replicas_as_its_workers_fill(
    groups: ProcessGroups,
) -> None:
    assert groups.layout_of(12) == Layout(3, shard=2, tensor=2)
    assert groups.layout_of(4) == Layout(1, shard=2, tensor=2)


def test_position_is_that_of_the_generation(
    groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.parallel.groups.new_subgroup", lambda ranks: None)
    for rank, size in ((7, 8), (3, 4)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=size: size)
        groups.clear()
        assert groups.position.rank == rank
        groups.form()
        assert groups.position == (rank, groups.layout_of(size), groups.layout.coordinates(rank))


def test_first_error_is_kept_and_nothing_starts_after_it(groups: ProcessGroups) -> None:
    started = []

    def fail() -> list[None]:
        started.append("first")
        raise PeersLostError("worker 1 was lost", "a test")

    assert groups.start_works(fail) == []
    groups.record_failure(ValueError("a later error"))
    assert groups.start_works(lambda: started.append("second") or []) == []  # type: ignore[func-returns-value]
    assert started == ["first"]
    with pytest.raises(PeersLostError, match="worker 1 was lost"):
        groups.raise_failure()
    groups.clear()
    groups.raise_failure()


def test_waits_of_an_evaluation_are_not_those_of_the_step(groups: ProcessGroups) -> None:
    with pytest.raises(ValueError, match="of the user"), groups.not_counting():
        groups.waited_s += 1.0
        raise ValueError("of the user")
    assert groups.waited_s == 0


def test_collectives_along_an_axis_of_size_1_change_nothing(groups: ProcessGroups) -> None:
    tensor = torch.arange(3.0)
    assert groups.all_reduce(tensor, None) is tensor
    assert groups.all_reduce_in_order(tensor, None) is tensor
    assert all_to_all_rows([tensor], None, groups.waits) == [tensor]
    assert tensor.tolist() == [0, 1, 2]
