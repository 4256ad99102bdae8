"""Cut an nn.Sequential into stages: which blocks, which refusals."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from lockstep.errors import UsageError
from lockstep.parallel.sequential import block_names, build_sequential_stage, first_blocks


class Reversed(nn.Sequential):
    def forward(self, rows):  # type: ignore[no-untyped-def]
        for block in reversed(list(self)):
            rows = block(rows)
        return rows


def test_nested_blocks_are_flattened_unless_they_run_otherwise() -> None:
    hooked = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    hooked.register_forward_hook(lambda *_: None)
    twice = nn.Sequential(nn.Linear(2, 2))
    parts = {
        "first": nn.Linear(2, 2),
        "inner": nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        "other": Reversed(nn.Linear(2, 2), nn.ReLU()),
    }
    model = nn.Sequential(
        OrderedDict(**parts, hooked=hooked, once=twice, again=twice, same=parts["first"])
    )
    assert block_names(model) == [
        "first",
        "inner.0",
        "inner.1",
        "other",
        "hooked",
        "once",
        "again",
        "same",
    ]
    for wrong in (nn.ModuleList([nn.Linear(2, 2)]), Reversed(nn.Linear(2, 2)), hooked):
        with pytest.raises(UsageError, match=f"the model is a {type(wrong).__name__}"):
            block_names(wrong)


def test_stages_have_similar_bytes_and_at_least_one_block() -> None:
    def starts(widths: list[int], stages: int, *split_points: str) -> list[int]:
        model = nn.Sequential(
            *(nn.Linear(width, 10, bias=False) if width else nn.ReLU() for width in widths)
        )
        return first_blocks(model, block_names(model), stages, split_points)

    assert starts([10] * 8, 4) == [0, 2, 4, 6]
    assert starts([90, 10, 10, 10], 2) == [0, 1] and starts([90, 10, 10, 10], 4) == [0, 1, 2, 3]
    assert starts([10, 10, 10, 90], 3) == [0, 2, 3]
    assert starts([10, 0, 20, 0], 2, "3") == [0, 3]
    for stages, points in (
        (5, []),
        (2, ["0"]),
        (2, ["7"]),
        (3, ["1"]),
        (2, ["1", "2"]),
        (3, ["2", "1"]),
    ):
        with pytest.raises(UsageError, match="stages"):
            starts([10] * 4, stages, *points)


def test_a_stage_keeps_the_names_of_its_blocks() -> None:
    names = []
    for stage in range(3):
        model = nn.Sequential(
            nn.Linear(2, 3),
            nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)),
            nn.ReLU(),
            nn.Linear(3, 2),
        )
        build_sequential_stage(model, stage, 3, ["1.1", "3"])
        names.append(
            [
                name
                for name, _ in (*model.named_parameters(), *model.named_buffers())
                if "weight" in name or "mean" in name
            ]
        )
    assert names == [["0.weight", "1.0.weight", "1.0.running_mean"], ["1.1.weight"], ["3.weight"]]


def test_stages_that_share_tensors_or_train_nothing_are_refused() -> None:
    blocks = [nn.Linear(2, 2) for _ in range(4)]
    blocks[3].weight = blocks[0].weight
    stage = build_sequential_stage(nn.Sequential(*blocks), 1, 2)
    assert stage.borrowed == ("0.weight",) and not stage.lent
    blocks = [nn.Linear(2, 2) for _ in range(4)]
    blocks[2].weight = blocks[1].weight
    with pytest.raises(UsageError, match=r"stages share 1\.weight"):
        build_sequential_stage(nn.Sequential(*blocks), 0, 4)
    norms = [nn.BatchNorm1d(2) for _ in range(2)]
    norms[1].running_mean = norms[0].running_mean
    with pytest.raises(UsageError, match="stages share a buffer"):
        build_sequential_stage(nn.Sequential(*norms), 0, 2)
    blocks[3].requires_grad_(False)
    with pytest.raises(UsageError, match="stage 3 has no parameter to train"):
        build_sequential_stage(nn.Sequential(*blocks[:2], nn.Linear(2, 2), blocks[3]), 0, 4)
