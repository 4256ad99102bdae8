"""Layouts, tensor slices and pipeline schedules as arithmetic."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.layout import AXES, Layout, LayoutLimits, choose_layout, nearest_layouts
from lockstep.network.pipeline_schedule import adjacent_blocks, pipeline_schedule
from lockstep.parallel.pipeline import P2PMessage
from lockstep.tensor_slice import TensorSlice

SIZES = st.integers(1, 4)
LAYOUTS = st.builds(Layout, SIZES, SIZES, SIZES, SIZES)


@given(LAYOUTS)
def test_coordinates_and_ranks_along_axes_are_consistent(layout: Layout) -> None:
    assert [layout.rank(layout.coordinates(rank)) for rank in range(layout.workers)] == list(
        range(layout.workers)
    )
    for rank, axis in product(range(layout.workers), AXES):
        line = layout.ranks_along(rank, axis)
        assert rank in line and len(set(line)) == getattr(layout, axis)
        assert all(layout.ranks_along(other, axis) == line for other in line)
    for first in range(0, layout.workers, layout.workers_per_replica):
        assert {
            layout.coordinates(rank).replica
            for rank in range(first, first + layout.workers_per_replica)
        } == {first // layout.workers_per_replica}


BOUNDS = LayoutLimits(micro_batches=8, tensor=(4, 2, 384), stages=4)


@pytest.mark.parametrize(
    ("asked", "workers", "message"),
    [
        (Layout(0, 2, 3), 6, "tensor 3 does not divide 4, 2"),
        (Layout(0, 3), 4, "it needs 3 workers, 4 are running"),
        (Layout(2, 2), 6, "it needs 4 workers, 6 are running"),
        (Layout(0, 1, 1, 8), 8, "pipeline 8 needs as many layers, the model has 4"),
        (Layout(0, 16), 16, "16 shards of all replicas share 8 micro-batches"),
    ],
)
def test_invalid_layout_is_rejected_with_the_nearest_valid_ones(
    asked: Layout, workers: int, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        choose_layout(asked, workers, BOUNDS, "here")
    assert message in refused.value.what and "--layout." in refused.value.hint
    for near in nearest_layouts(asked, workers, BOUNDS):
        assert near.workers == workers and not BOUNDS.problem_with(near)


def test_replicate_0_uses_all_workers() -> None:
    assert choose_layout(Layout(0, 2, 2), 8, BOUNDS, "here") == Layout(2, 2, 2)


@given(st.integers(0, 13), st.integers(1, 7), SIZES, st.integers(1, 3), SIZES)
def test_slices_of_all_workers_make_the_whole_tensor(
    rows: int, columns: int, tensor: int, groups: int, shards: int
) -> None:
    whole = torch.arange(rows * groups * columns).view(-1, columns)
    assembled = torch.full_like(whole, -1)
    for part, shard in product(range(tensor), range(shards)):
        local_slice = (
            TensorSlice.whole(whole.shape)
            .split_rows(part, tensor, groups)
            .split_rows(shard, shards)
        )
        local = local_slice.of(whole)
        assert (
            tuple(local.shape) == local_slice.local_shape
            and TensorSlice.from_json(local_slice.to_json()) == local_slice
        )
        assert (assembled[torch.isin(whole, local)] == -1).all(), "in two slices"
        local_slice.copy_to(TensorSlice.whole(whole.shape), local, assembled)
    assert torch.equal(assembled, whole)


@given(st.integers(1, 9), SIZES, SIZES, SIZES)
def test_rows_split_like_torch_chunk_and_columns_reassemble(
    rows: int, tensor: int, width: int, shards: int
) -> None:
    whole = torch.arange(rows * tensor * width).view(rows, -1)
    out = torch.empty_like(whole)
    for part in range(tensor):
        column = TensorSlice.whole(whole.shape).split_columns(part, tensor)
        chunks = column.of(whole).chunk(shards)
        for shard in range(shards):
            local_slice = column.split_rows(shard, shards)
            assert torch.equal(
                local_slice.of(whole), chunks[shard] if shard < len(chunks) else whole[:0, :width]
            )
            local_slice.copy_to(TensorSlice.whole(whole.shape), local_slice.of(whole), out)
    assert torch.equal(out, whole)


@given(st.integers(1, 12), st.integers(1, 3), SIZES, SIZES, st.data())
def test_intersection_of_slices_has_their_common_elements(
    rows: int, groups: int, tensor: int, shards: int, data: st.DataObject
) -> None:
    whole = torch.arange(rows * groups * 2 * tensor).view(rows * groups, -1)

    def draw() -> TensorSlice:
        part, shard = data.draw(st.integers(0, tensor - 1)), data.draw(st.integers(0, shards - 1))
        start = TensorSlice.whole(whole.shape)
        cut = (
            start.split_columns(part, tensor)
            if data.draw(st.booleans())
            else start.split_rows(part, tensor, groups)
        )
        return cut.split_rows(shard, shards)

    first, second = draw(), draw()
    common = set(first.of(whole).flatten().tolist()) & set(second.of(whole).flatten().tolist())
    assert set(first.intersection(second).of(whole).flatten().tolist()) == common
    assert first.intersection(TensorSlice.whole(whole.shape)) == first.intersection(first) == first
    copied = torch.full(second.local_shape, -1)
    first.copy_to(second, first.of(whole), copied)
    assert torch.equal(
        copied,
        torch.where(
            torch.isin(second.of(whole), torch.tensor(sorted(common))), second.of(whole), -1
        ),
    )


@pytest.mark.parametrize(
    ("stages", "parts", "micro_batches"), list(product([2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 8, 9]))
)
def test_schedule_runs_every_pass_once_without_deadlock(
    stages: int, parts: int, micro_batches: int
) -> None:
    plans = [pipeline_schedule(stage, stages, micro_batches, parts) for stage in range(stages)]
    for stage, plan in enumerate(plans):
        both = {
            (what, part, micro)
            for what in ("forward", "backward")
            for part in range(parts)
            for micro in range(micro_batches)
        }
        assert set(plan) == both and len(plan) == len(both), stage
        for part in range(parts):  # the ordered sum needs micro-batches in order
            assert [micro for what, p, micro in plan if what == "backward" and p == part] == list(
                range(micro_batches)
            )
    done: set[tuple[str, int, int]] = set()  # (what, part of all, micro-batch)
    at, last, most = [0] * stages, stages * parts - 1, [0] * stages
    while any(at[stage] < len(plans[stage]) for stage in range(stages)):
        before = list(at)
        for stage in range(stages):
            while at[stage] < len(plans[stage]):
                what, part, micro = plans[stage][at[stage]]
                number = part * stages + stage
                awaited = (
                    ("forward", number - 1, micro)
                    if what == "forward"
                    else ("backward", number + 1, micro)
                )
                if not (number == (0 if what == "forward" else last) or awaited in done):
                    break
                done.add((what, number, micro))
                at[stage] += 1
                alive = sum(1 if w == "forward" else -1 for w, _, _ in plans[stage][: at[stage]])
                most[stage] = max(most[stage], alive)
        assert at != before, "deadlock"
    if parts == 1:  # 1F1B: in-flight micro-batches are limited by the stages behind
        assert most == [min(micro_batches, stages - stage) for stage in range(stages)]


@given(st.integers(1, 40), st.integers(1, 8))
def test_layers_are_split_evenly_and_in_order(layers: int, stages: int) -> None:
    ranges = adjacent_blocks(range(layers), stages)
    assert [layer for stage in ranges for layer in stage] == list(range(layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_message_tags_are_unique() -> None:
    every = [
        P2PMessage(micro, edge, what).tag(i)
        for micro in range(40)
        for edge in range(20)
        for what in ("forward", "backward")
        for i in (0, 1)
    ]  # type: ignore[arg-type]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(
    ("asked", "workers", "bounds", "hint"),
    [
        (Layout(2, 2), 4, LayoutLimits(2), "set micro_batches=4"),
        (Layout(2, 2), 4, LayoutLimits(2, (2,)), "these work: --layout.shard 2 --layout.tensor 2; --layout.replicate 2 --layout.tensor 2; "
         "or set micro_batches=4"),
        (Layout(2, 2), 3, LayoutLimits(2), "give 4 workers and set micro_batches=4"),
        (Layout(0, 3), 4, LayoutLimits(3), "give 3 workers"),
        (Layout(0, 1, 3), 3, LayoutLimits(2), "leave out the [layout] and set micro_batches=3"),
    ],
)  # fmt: skip
def test_hint_of_a_refusal_names_what_must_change(
    asked: Layout, workers: int, bounds: LayoutLimits, hint: str
) -> None:
    with pytest.raises(UsageError) as refused:
        choose_layout(asked, workers, bounds, "here")
    assert refused.value.hint == hint
