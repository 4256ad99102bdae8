"""Records and tensors of two replays are compared, and the first difference is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import UsageError
from lockstep.history.diff import compare_lines, describe, describe_distance, first_difference
from lockstep.history.replay import choose_first, copy_of_run, difference_of, script_of
from lockstep.record.events import append_event
from lockstep.record.metrics import append_json
from lockstep.training.step_record import shorten

LINE: dict[str, Any] = {"step": 3, "loss": 3.0, "losses": [1.0, 2.0], "digest": "0f"}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, ""),
        ({"digest": "1f"}, "other weights before it: digest 0f, now 1f"),
        ({"digest": "1f/2"}, ""),  # of slices
        ({"losses": [1.0, 2.5]}, "loss of micro-batch 1 2.0, now 2.5"),
        ({"losses": [None, 2.0]}, "loss of micro-batch 0 1.0, now None"),
        ({"losses": [1.0, 2.0, 0.0]}, "2 micro-batches, now 3"),
    ],
)
def test_what_differs_between_two_records_is_told(change: dict[str, Any], what: str) -> None:
    assert difference_of(LINE, LINE | change) == what


def test_lines_without_losses_are_compared_by_their_loss() -> None:
    line = {"step": 3, "loss": 3.0}
    assert difference_of(line, LINE) == ""
    assert difference_of(line, LINE | {"loss": 4.0}) == "loss 3.0, now 4.0"


def test_a_loss_has_nine_digits_only_where_they_restore_its_bits() -> None:
    single = float(torch.tensor(0.1).item())
    assert shorten(single) == 0.100000001 and len(str(shorten(single))) < len(str(single))
    assert torch.tensor(shorten(single)) == torch.tensor(0.1)
    assert shorten(0.1) == 0.1 and shorten(1e300) == 1e300 and shorten(None) is None
    assert math.isnan(shorten(math.nan) or 0.0)


def test_the_first_differing_step_of_two_runs_is_found(tmp_path: Path) -> None:
    for name, losses in (("a", [1, 2, 3, 4]), ("b", [1, 2, 5])):
        (tmp_path / name).mkdir()
        for step, loss in enumerate(losses, 1):
            append_json(tmp_path / name / "metrics.jsonl", {"step": step, "loss": loss})
    assert first_difference(tmp_path / "a", tmp_path / "b") == (2, 3, "loss 3, now 5")
    assert first_difference(tmp_path / "a", tmp_path / "a") == (4, 0, "")
    (tmp_path / "c").mkdir()
    append_json(tmp_path / "c" / "metrics.jsonl", {"step": 5, "loss": 1})
    assert first_difference(tmp_path / "a", tmp_path / "c") == (0, 0, "")


def observed(*tensors: str, loss: float = 1.0, k: int | None = 0) -> dict[str, Any]:
    pairs = [[name, value] for name, _, value in (item.partition("=") for item in tensors)]
    return {"micro_batch": k, "loss": loss, "tensors": pairs}


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (observed("(batch)=1", "a output=3", "a gradient=3"), "a output"),
        (observed("(batch)=2", "a output=3", "a gradient=3"), "the data: (batch)"),
        (observed("(batch)=1", "a output=2", "a gradient=4"), "a gradient"),
        (observed("(batch)=1", "a output=2", "a gradient=4", loss=2.0), "the loss, 1.0 and 2.0"),
        (observed("(batch)=1", "a output=2", loss=2.0), "the loss, 1.0 and 2.0"),
        (observed("(batch)=1", "b output=2", "a gradient=3"), "a output in one, b output in the"),
        (observed("(batch)=1", "a output=2"), "a gradient in one, nothing in the other"),
    ],
)
def test_the_first_tensor_that_differs_is_named(other: dict[str, Any], what: str) -> None:
    one = observed("(batch)=1", "a output=2", "a gradient=3")
    place = compare_lines(7, [one], [other])
    assert str(place).startswith(f"step 7, micro-batch 0: {what}")
    assert str(compare_lines(7, [one], [one])) == "step 7: nothing that a replay sees"


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        ("layers.1.mlp input", "layers.1, which computes the input of layers.1.mlp"),
        ("head input", "the model, which computes the input of head"),
        ("the model input 1", "the data: the model input 1"),
        ("head.weight updated", "the update of head.weight"),
        ("head.weight before", "the weights before it: head.weight"),
        ("layers.1#2 output", "layers.1#2 output"),
        ("batch_norm output", "batch_norm output"),
    ],
)
def test_a_place_is_told_in_words(tensor: str, what: str) -> None:
    assert describe(tensor) == what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_distances_are_in_units_in_the_last_place(dtype: torch.dtype) -> None:
    ours = torch.tensor([1.0, -1.0, 0.0, 2.0], dtype=dtype)
    theirs = ours.clone()
    for _ in range(3):
        theirs[1] = torch.nextafter(theirs[1], torch.tensor(5.0, dtype=dtype))
    assert describe_distance(ours, theirs) == "1 of 4 elements differ, by at most 3 ulp"
    smallest = torch.nextafter(torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype))
    assert describe_distance(smallest, -smallest) == "1 of 1 elements differ, by at most 2 ulp"
    assert describe_distance(ours, theirs[:2]).startswith("(4,) torch")
    whole = torch.tensor([1, 2])
    assert describe_distance(whole, whole + 1) == "2 of 2 elements differ"


def test_the_newest_checkpoint_before_a_step_is_taken(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        append_event(tmp_path, "saved", step=step)
        if step > 10:
            folder = tmp_path / "checkpoints" / f"step-{step:08d}"
            folder.mkdir(parents=True)
            (folder / "COMMITTED").touch()
    steps = {10: 0, 5: 0, 21: 20, 30: 20, 99: 30}
    assert {step: choose_first(tmp_path, step, from_start=False) for step in steps} == steps
    with pytest.raises(UsageError, match="no checkpoint before step 15 is left"):
        choose_first(tmp_path, 15, from_start=False)
    assert choose_first(tmp_path, 15, from_start=True) == 0


def test_what_a_script_writes_in_the_copy_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    kept = ("data/prepared.json", "checkpoints/step-00000002/COMMITTED")
    written = ("log.csv", "latest.pt", "own/data/state", "own/metrics.jsonl")
    for name in (*kept, *written, "metrics.jsonl", "checkpoints/step-00000004/COMMITTED"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("of the run")
    (tmp_path / "latest").symlink_to("deleted")
    with copy_of_run(tmp_path, 2) as copy:
        files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
        assert files == {*kept, *written}
        assert all((copy / name).samefile(tmp_path / name) for name in kept)
        for name in written:
            (copy / name).write_text("replayed")  # in place: not by a rename
    assert all((tmp_path / name).read_text() == "of the run" for name in (*kept, *written))
    assert not copy.exists()


def test_the_script_is_found_in_the_words_of_a_start() -> None:
    assert script_of(["run", "--out", "runs/a", "train.py", "--", "other.py"]) == "train.py"
    assert script_of(["train", "loop.py:main", "--out", "a.py.d"]) == "loop.py"
    assert script_of(["train", "--out", "runs/a"]) == ""
    assert script_of(["run", "-m", "package.train", "--", "x.py"]) == ""
