"""Layouts, pieces and pipeline schedules as arithmetic."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.layout import AXES, Bounds, Layout, choose, nearest
from lockstep.parallel.pipeline import Message, actions, dealt
from lockstep.tensor_slice import Piece

SIZES = st.integers(1, 4)
LAYOUTS = st.builds(Layout, SIZES, SIZES, SIZES, SIZES)


@given(LAYOUTS)
def test_every_rank_has_one_spot_and_its_lines_cross_there(layout: Layout) -> None:
    assert [layout.rank(layout.spot(rank)) for rank in range(layout.workers)] == list(range(layout.workers))
    for rank, axis in product(range(layout.workers), AXES):
        line = layout.along(rank, axis)
        assert rank in line and len(set(line)) == getattr(layout, axis)
        assert all(layout.along(other, axis) == line for other in line)
    for first in range(0, layout.workers, layout.unit):
        assert {layout.spot(rank).replica for rank in range(first, first + layout.unit)} == {first // layout.unit}


BOUNDS = Bounds(micro_batches=8, tensor=(4, 2, 384), stages=4)


@pytest.mark.parametrize(
    ("asked", "workers", "says"),
    [
        (Layout(0, 2, 3), 6, "tensor 3 does not divide 4, 2"),
        (Layout(0, 3), 4, "it takes 3 workers, and there are 4"),
        (Layout(2, 2), 6, "it takes 4 workers, and there are 6"),
        (Layout(0, 1, 1, 8), 8, "pipeline 8 needs as many layers, the model has 4"),
        (Layout(0, 16), 16, "16 shards of all replicas share 8 micro-batches"),
    ],
)
def test_a_layout_that_does_not_work_is_refused_with_the_nearest_that_do(asked: Layout, workers: int, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        choose(asked, workers, BOUNDS, "here")
    assert says in refused.value.what and "--layout." in refused.value.hint
    for near in nearest(asked, workers, BOUNDS):
        assert near.workers == workers and not BOUNDS.why_not(near)


def test_as_many_replicas_as_there_are() -> None:
    assert choose(Layout(0, 2, 2), 8, BOUNDS, "here") == Layout(2, 2, 2)


@given(st.integers(0, 13), st.integers(1, 7), SIZES, st.integers(1, 3), SIZES)
def test_pieces_of_all_workers_make_the_whole(rows: int, columns: int, tensor: int, groups: int, shards: int) -> None:
    whole = torch.arange(rows * groups * columns).view(-1, columns)
    put_together = torch.full_like(whole, -1)
    for part, shard in product(range(tensor), range(shards)):
        piece = Piece.whole(whole.shape).cut_rows(part, tensor, groups).cut_rows(shard, shards)
        held = piece.of(whole)
        assert tuple(held.shape) == piece.size and Piece.from_json(piece.to_json()) == piece
        assert (put_together[torch.isin(whole, held)] == -1).all(), "held twice"
        piece.copy_to(Piece.whole(whole.shape), held, put_together)
    assert torch.equal(put_together, whole)


@given(st.integers(1, 9), SIZES, SIZES, SIZES)
def test_shards_are_cut_as_torch_cuts_and_columns_come_back(rows: int, tensor: int, width: int, shards: int) -> None:
    whole = torch.arange(rows * tensor * width).view(rows, -1)
    out = torch.empty_like(whole)
    for part in range(tensor):
        column = Piece.whole(whole.shape).cut_columns(part, tensor)
        chunks = column.of(whole).chunk(shards)
        for shard in range(shards):
            piece = column.cut_rows(shard, shards)
            assert torch.equal(piece.of(whole), chunks[shard] if shard < len(chunks) else whole[:0, :width])
            piece.copy_to(Piece.whole(whole.shape), piece.of(whole), out)
    assert torch.equal(out, whole)


@given(st.integers(1, 12), st.integers(1, 3), SIZES, SIZES, st.data())
def test_pieces_meet_where_they_have_numbers_in_common(rows: int, groups: int, tensor: int, shards: int, data: st.DataObject) -> None:
    whole = torch.arange(rows * groups * 2 * tensor).view(rows * groups, -1)

    def draw() -> Piece:
        part, shard = data.draw(st.integers(0, tensor - 1)), data.draw(st.integers(0, shards - 1))
        start = Piece.whole(whole.shape)
        cut = start.cut_columns(part, tensor) if data.draw(st.booleans()) else start.cut_rows(part, tensor, groups)
        return cut.cut_rows(shard, shards)

    one, other = draw(), draw()
    common = set(one.of(whole).flatten().tolist()) & set(other.of(whole).flatten().tolist())
    assert one.meets(other) == other.meets(one) == bool(common)
    found = torch.full(other.size, -1)
    one.copy_to(other, one.of(whole), found)
    assert torch.equal(found, torch.where(torch.isin(other.of(whole), torch.tensor(sorted(common))), other.of(whole), -1))


@pytest.mark.parametrize(("stages", "parts", "micro_batches"), list(product([2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 8, 9])))
def test_a_schedule_can_be_played_to_its_end_and_does_all_once(stages: int, parts: int, micro_batches: int) -> None:
    plans = [actions(stage, stages, micro_batches, parts) for stage in range(stages)]
    for stage, plan in enumerate(plans):
        both = {(what, part, micro) for what in ("forward", "backward") for part in range(parts) for micro in range(micro_batches)}
        assert set(plan) == both and len(plan) == len(both), stage
        for part in range(parts):  # the tree wants micro-batches in their order
            assert [micro for what, p, micro in plan if what == "backward" and p == part] == list(range(micro_batches))
    done: set[tuple[str, int, int]] = set()  # (what, part of all, micro-batch)
    at, last, most = [0] * stages, stages * parts - 1, [0] * stages
    while any(at[stage] < len(plans[stage]) for stage in range(stages)):
        before = list(at)
        for stage in range(stages):
            while at[stage] < len(plans[stage]):
                what, part, micro = plans[stage][at[stage]]
                number = part * stages + stage
                awaited = ("forward", number - 1, micro) if what == "forward" else ("backward", number + 1, micro)
                if not (number == (0 if what == "forward" else last) or awaited in done):
                    break
                done.add((what, number, micro))
                at[stage] += 1
                alive = sum(1 if w == "forward" else -1 for w, _, _ in plans[stage][: at[stage]])
                most[stage] = max(most[stage], alive)
        assert at != before, "nobody can go on"
    if parts == 1:  # what 1F1B is for: no more micro-batches alive than there are stages behind
        assert most == [min(micro_batches, stages - stage) for stage in range(stages)]


@given(st.integers(1, 40), st.integers(1, 8))
def test_layers_are_dealt_evenly_and_in_order(layers: int, stages: int) -> None:
    ranges = dealt(layers, stages)
    assert [layer for one in ranges for layer in one] == list(range(layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_no_two_messages_have_one_tag() -> None:
    every = [
        Message(micro, edge, what).tag(i) for micro in range(40) for edge in range(20) for what in ("states", "slopes") for i in (0, 1)
    ]  # type: ignore[arg-type]
    assert len(set(every)) == len(every)
