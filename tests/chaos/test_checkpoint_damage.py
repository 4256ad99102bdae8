"""Changed, short and missing files are detected; whole checkpoints are used; nothing is lost."""

from __future__ import annotations

import logging
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint import commands
from lockstep.checkpoint.commit import find_damage
from lockstep.checkpoint.folder import pinned
from lockstep.checkpoint.state_dict import digest
from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import CheckpointError


def state(step: int) -> dict[str, Tensor]:
    """60 KB that depend on the step only."""
    generator = torch.Generator().manual_seed(step)
    shapes = {
        "model.a": (100, 100),
        "model.b": (7,),
        "optim.a.exp_avg": (50, 100),
        "optim.a.step": (),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def filled(folder: Path, steps: list[int], keep: int = 0) -> CheckpointStore:
    store = CheckpointStore(folder, keep=keep, file_bytes=25_000)
    for step in steps:
        store.save(step, state(step), {"step": step})
    return store


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_any_flipped_bit_in_any_file_is_detected(tmp_path: Path) -> None:
    filled(tmp_path, [10])
    path = tmp_path / "step-00000010"
    files = sorted(path.iterdir())
    assert [f.name for f in files] == [
        "COMMITTED", "facts.json", "manifest.json", "tensors-00000.safetensors", "tensors-00001.safetensors",
    ]  # fmt: skip
    draw = random.Random(0)
    found_by_load = found_by_verify = 0
    for n in range(60):
        file = files[n % len(files)]
        bit = draw.randrange(file.stat().st_size * 8)
        flip(file, bit)
        found_by_verify += not commands.verify(tmp_path)[0]
        with pytest.raises(CheckpointError, match="damaged: the checkpoint of step 10"):
            CheckpointStore(tmp_path).load(10)
        found_by_load += 1
        flip(file, bit)
        assert commands.verify(tmp_path)[0]
    assert (found_by_verify, found_by_load) == (60, 60)


def test_any_flipped_bit_of_manifest_and_marker_is_detected(tmp_path: Path) -> None:
    filled(tmp_path, [10])
    for name in ("COMMITTED", "manifest.json"):
        file = tmp_path / "step-00000010" / name
        for bit in range(file.stat().st_size * 8):
            flip(file, bit)
            assert find_damage(tmp_path / "step-00000010", 10), (name, bit)
            flip(file, bit)
    assert find_damage(tmp_path / "step-00000010", 10) == []


def test_short_long_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    store = filled(tmp_path, [10])
    path = tmp_path / "step-00000010"
    data = path / "tensors-00000.safetensors"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    assert find_damage(tmp_path / "step-00000010", 10) == [
        f"{data.name} has {len(content) - 1} bytes, the manifest lists {len(content)}"
    ]
    data.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match=f"{data.name} has {len(content) + 1} bytes"):
        store.load(10)
    data.unlink()
    assert find_damage(tmp_path / "step-00000010", 10) == [f"{data.name} is missing"]
    with pytest.raises(
        CheckpointError,
        match=rf"{data.name} is missing\n  there is no other checkpoint; nothing was deleted",
    ):
        store.load(10)
    (path / "manifest.json").unlink()
    assert find_damage(tmp_path / "step-00000010", 10) == ["manifest.json is missing"]


def test_unlisted_file_is_reported_but_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path, [10])
    (tmp_path / "step-00000010" / "notes.txt").write_text("notes")
    assert find_damage(tmp_path / "step-00000010", 10) == [
        "notes.txt does not belong here: the manifest does not list it"
    ]
    checkpoint = store.load_newest()
    assert checkpoint and digest(checkpoint.tensors) == digest(state(10))
    assert "holds files that are not part of it: notes.txt" in caplog.text


def test_error_for_a_missing_step_lists_the_available_ones(tmp_path: Path) -> None:
    store = filled(tmp_path, [10, 20])
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 15\n.*checkpoints: 10, 20"):
        store.load(15)
    assert CheckpointStore(tmp_path / "new").load_newest() is None


def test_damaged_newest_checkpoint_is_set_aside_and_the_previous_one_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, [10, 20, 30])
    flip(tmp_path / "step-00000030" / "tensors-00001.safetensors", 12_345)
    flip(tmp_path / "step-00000020" / "facts.json", 3)
    caplog.set_level(logging.INFO)
    store = CheckpointStore(tmp_path)
    checkpoint = store.load_newest()
    assert (
        checkpoint
        and checkpoint.step == 10
        and checkpoint.facts == {"step": 10}
        and digest(checkpoint.tensors) == digest(state(10))
    )
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "step-00000030 is damaged (tensors-00001.safetensors has changed" in lines[0]
    assert "set aside as step-00000030.damaged; step 10 is used instead" in lines[0]
    assert store.steps() == [10]
    for step in (20, 30):  # the run repeats these steps
        store.save(step, state(step), {"step": step})
    flip(tmp_path / "step-00000030" / "manifest.json", 12)
    assert store.load_newest() is not None
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000010", "step-00000020", "step-00000020.damaged", "step-00000030.damaged", "step-00000030.damaged-2",
    ]  # fmt: skip


def test_all_checkpoints_damaged_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    filled(tmp_path, [10, 20])
    for step in (10, 20):
        flip(tmp_path / f"step-000000{step}" / "facts.json", 3)
    before = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match="damaged: the checkpoint of step 10, 20"
        ) as error:
            CheckpointStore(tmp_path).load_newest()
        assert error.value.exit_code == 3
    assert sorted(tmp_path.rglob("*")) == before


def test_saving_equal_content_again_changes_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path, [10])
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    other_cut = CheckpointStore(tmp_path, file_bytes=10**9)
    assert other_cut.save(10, state(10), {"host": "another"}) == tmp_path / "step-00000010"
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
    assert store.load(10).facts == {"step": 10}


def test_saving_other_content_for_a_step_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path, [10])
    changed = state(10) | {"model.b": state(11)["model.b"]}
    with pytest.raises(CheckpointError) as error:
        store.save(10, changed, {})
    assert "step 10 has a checkpoint with other content, which was not overwritten" in str(
        error.value
    )
    assert "1 of 4 tensors differ: model.b" in str(error.value)
    assert digest(changed) in str(error.value) and digest(state(10)) in str(error.value)
    assert digest(store.load(10).tensors) == digest(state(10))
    assert os.listdir(tmp_path) == ["step-00000010"]


def test_saving_over_a_damaged_checkpoint_sets_it_aside(tmp_path: Path) -> None:
    store = filled(tmp_path, [10])
    flip(tmp_path / "step-00000010" / "tensors-00000.safetensors", 9_999)
    store.save(10, state(10), {})
    assert commands.verify(tmp_path)[0]
    assert (tmp_path / "step-00000010.damaged").is_dir()


def test_commit_by_another_process_during_the_save_is_compared(tmp_path: Path) -> None:
    for content in (10, 11):
        folder = tmp_path / str(content)

        def overtaken(place: str, folder: Path = folder, content: int = content) -> None:
            if place == "sealed":
                CheckpointStore(folder).save(10, state(content), {"by": "other process"})

        store = CheckpointStore(folder, fail_point=overtaken)
        if content == 10:
            store.save(10, state(10), {"by": "this process"})
        else:
            with pytest.raises(CheckpointError, match="other content"):
                store.save(10, state(10), {"by": "this process"})
        assert store.load(10).facts == {"by": "other process"}
        assert os.listdir(folder) == ["step-00000010"]


def test_retention_keeps_read_protected_and_last_verified_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20, 30):
        store.save(step, state(step), {}, protect={10})
    assert store.steps() == [10, 20, 30]
    with pinned(tmp_path, 20) as path, pinned(tmp_path, 20):
        assert path == tmp_path / "step-00000020"
        store.save(40, state(40), {})
        assert store.steps() == [20, 30, 40]  # 10 is no longer protected, 20 is being read
        assert find_damage(tmp_path / "step-00000020", 20) == []
    store.save(50, state(50), {})
    assert store.steps() == [40, 50]
    for step in (40, 50):
        flip(tmp_path / f"step-000000{step}" / "facts.json", 3)
    resumed = CheckpointStore(
        tmp_path, keep=2
    )  # resumed before step 40; later checkpoints have undetected damage
    resumed.save(35, state(35), {})
    assert resumed.steps() == [35, 40, 50]
    assert resumed.load(35).step == 35
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_keep_zero_keeps_all(tmp_path: Path) -> None:
    assert filled(tmp_path, [1, 2, 3, 4, 5], keep=0).steps() == [1, 2, 3, 4, 5]


def test_copied_checkpoint_folder_is_whole(tmp_path: Path) -> None:
    filled(tmp_path / "a", [10])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert digest(CheckpointStore(tmp_path / "b").load(10).tensors) == digest(state(10))


def test_loaded_tensors_are_writable(tmp_path: Path) -> None:
    tensors = filled(tmp_path, [10]).load(10).tensors
    tensors["model.b"].add_(1)
    assert torch.equal(tensors["model.b"], state(10)["model.b"] + 1)
    assert torch.equal(tensors["model.a"], state(10)["model.a"])
