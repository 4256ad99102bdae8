"""A full, read-only or failing disk: a clear error, whole older checkpoints, no leftovers."""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.launching import run_command
from torch import Tensor

from lockstep.checkpoint.state_dict import digest
from lockstep.checkpoint.store import CheckpointStore
from lockstep.errors import CheckpointError

MIB = 2**20


def state(step: int, mib: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"model.{n}": torch.randn(MIB // 8, generator=generator) for n in range(2 * mib)}


def assert_whole(folder: Path, steps: list[int]) -> None:
    """Assert that the folder holds exactly these checkpoints, each with the content of its step."""
    store = CheckpointStore(folder)
    assert store.steps() == steps
    for step in steps:
        assert digest(store.load(step).tensors) == digest(state(step))
    assert sorted(os.listdir(folder)) == [f"step-{step:08d}" for step in steps]


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Callable[[str], None]]:
    """A tmpfs; yields a function that remounts it. Skips where mounting is not allowed."""
    folder.mkdir()
    result = run_command(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)])
    if result.returncode:
        pytest.skip(f"this user may not mount a tmpfs: {result.stderr.strip()}")
    try:
        yield (
            lambda new_options: (
                subprocess.run(["mount", "-o", f"remount,{new_options}", str(folder)], check=True)
                and None
            )
        )
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_too_little_disk_space_is_reported_before_writing(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=4m") as _:
        folder = tmp_path / "disk" / "checkpoints"
        store = CheckpointStore(folder, keep=0)
        places: list[str] = []
        for step in (1, 2, 3):
            store.save(step, state(step), {})
        store.fail_point = places.append
        with pytest.raises(CheckpointError) as error:
            store.save(4, state(4), {})
        lines = str(error.value).splitlines()
        assert (
            lines[0]
            == "CheckpointError: the checkpoint of step 4 was not saved: No space left on device"
        )
        assert re.fullmatch(rf"  1\.0 MiB needed, [0-9.]+ KiB free in {folder}", lines[1])
        assert "free some space" in lines[2] and error.value.exit_code == 3
        assert not places  # no attempt was started
        assert_whole(folder, [1, 2, 3])


@pytest.mark.parametrize(
    "place", ["started", "in facts.json", "after facts.json", "in tensors-00000.safetensors"]
)
def test_disk_that_fills_up_during_a_save_leaves_older_checkpoints_whole(
    tmp_path: Path, place: str
) -> None:
    with mounted(tmp_path / "disk", "size=8m") as _:
        folder = tmp_path / "disk" / "checkpoints"
        hog = tmp_path / "disk" / "hog"

        def fill(at: str) -> None:
            if at == place:
                with pytest.raises(OSError), open(hog, "wb", buffering=0) as file:
                    while file.write(b"\0" * 4096):
                        pass

        CheckpointStore(folder, keep=0).save(1, state(1), {})
        with pytest.raises(
            CheckpointError,
            match=r"step 2 was not saved: No space left on device\n  1.0 MiB needed, [0-9.]+ B free",
        ):
            CheckpointStore(folder, keep=0, fail_point=fill, file_bytes=MIB // 2).save(
                2, state(2), {}
            )
        assert_whole(folder, [1])
        hog.unlink()
        CheckpointStore(folder, keep=0).save(2, state(2), {})
        assert_whole(folder, [1, 2])


def test_error_names_missing_inodes(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=8m,nr_inodes=9") as _:
        folder = tmp_path / "disk" / "checkpoints"
        CheckpointStore(folder, keep=0).save(1, state(1), {})
        with pytest.raises(
            CheckpointError,
            match=r"No space left on device\n.*but no room for another file name \(inodes\)",
        ):
            CheckpointStore(folder, keep=0).save(2, state(2), {})
        assert_whole(folder, [1])


def test_read_only_disk_is_refused_before_training_and_still_read(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=8m") as remount:
        folder = tmp_path / "disk" / "checkpoints"
        CheckpointStore(folder).save(1, state(1), {})
        remount("ro")
        store = CheckpointStore(folder)
        with pytest.raises(
            CheckpointError,
            match=r"cannot be saved here: Read-only file system[\s\S]*mounted read-only",
        ):
            store.preflight()
        with pytest.raises(CheckpointError, match="step 2 was not saved: Read-only file system"):
            store.save(2, state(2), {})
        checkpoint = store.load_newest()
        assert checkpoint and digest(checkpoint.tensors) == digest(state(1))
        remount("rw")
        (folder / "step-00000001" / "facts.json").write_text("{ }")
        CheckpointStore(folder).save(2, state(2), {})
        with open(folder / "step-00000002" / "facts.json", "a") as file:
            file.write("!")
        remount("ro")
        with pytest.raises(CheckpointError, match="damaged: the checkpoint of step 1, 2"):
            store.load_newest()


def test_damaged_newest_checkpoint_on_a_read_only_disk_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(tmp_path / "disk", "size=8m") as remount:
        folder = tmp_path / "disk" / "checkpoints"
        CheckpointStore(folder).save(1, state(1), {})
        CheckpointStore(folder).save(2, state(2), {})
        (folder / "step-00000002" / "facts.json").unlink()
        remount("ro")
        checkpoint = CheckpointStore(folder).load_newest()
        assert checkpoint and checkpoint.step == 1
        assert "could not be renamed (Read-only file system); step 1 is used instead" in caplog.text


def test_folder_without_permission_is_refused_before_training(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root ignores permissions
    try:
        with pytest.raises(
            CheckpointError,
            match=r"saved here: Permission denied[\s\S]*this user may not write there",
        ):
            CheckpointStore(tmp_path / "checkpoints").preflight()
    finally:
        os.seteuid(user)


def test_file_in_place_of_the_folder_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(
        CheckpointError, match=r"checkpoints cannot be saved here: File exists[\s\S]*checkpoints"
    ):
        CheckpointStore(tmp_path / "checkpoints").preflight()


def test_preflight_leaves_no_files(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "a" / "checkpoints").preflight()
    assert os.listdir(tmp_path / "a" / "checkpoints") == []


def test_too_few_open_files_is_refused_before_training(tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(tmp_path, os.O_RDONLY)
    os.close(probe)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe, old[1]))
        with pytest.raises(
            CheckpointError, match=r"cannot be saved here: Too many open files[\s\S]*ulimit -n"
        ):
            CheckpointStore(tmp_path).preflight()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
    assert os.listdir(tmp_path) == []


def test_disk_error_at_any_point_of_a_save_leaves_nothing_partial(tmp_path: Path) -> None:
    places: list[str] = []
    CheckpointStore(tmp_path / "rehearsal", file_bytes=MIB // 2, fail_point=places.append).save(
        2, state(2), {}
    )
    assert {"started", "after manifest.json", "sealed", "renamed", "marked"} <= set(places)
    for number in range(len(places)):
        folder = tmp_path / str(number)
        calls = itertools.count()

        def fail(
            place: str, number: int = number, calls: Iterator[int] = calls, folder: Path = folder
        ) -> None:
            if next(calls) == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            # A folder that is being removed has no marker.
            assert place != "removing" or not list(folder.glob("*step-00000002*/COMMITTED"))

        CheckpointStore(folder, keep=0).save(1, state(1), {})
        with pytest.raises(
            CheckpointError,
            match=r"step 2 was not saved: Input/output error\n.*MiB needed[\s\S]*dmesg",
        ):
            CheckpointStore(folder, keep=0, file_bytes=MIB // 2, fail_point=fail).save(
                2, state(2), {}
            )
        assert_whole(folder, [1])
        CheckpointStore(folder, keep=0).save(2, state(2), {})
        assert_whole(folder, [1, 2])


def test_disk_error_in_retention_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(place: str) -> None:
        if place == "unmarked":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    CheckpointStore(tmp_path).save(1, state(1), {})
    CheckpointStore(tmp_path, keep=1, fail_point=fail).save(2, state(2), {})
    assert "the old checkpoint of step 1 could not be deleted" in caplog.text
    assert CheckpointStore(tmp_path).steps() == [2]
    CheckpointStore(tmp_path).save(3, state(3), {})
    assert_whole(tmp_path, [2, 3])


@pytest.mark.parametrize("instead", ["nothing", "an empty folder"])
def test_missing_folder_is_not_created_again_and_a_retry_works(
    tmp_path: Path, instead: str
) -> None:
    run, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    store = CheckpointStore(folder, keep=0)
    store.preflight()
    store.save(1, state(1), {})
    run.rename(tmp_path / "away")
    if instead != "nothing":
        run.mkdir()
    with pytest.raises(
        CheckpointError, match="step 2 was not saved: No such file or directory"
    ) as error:
        store.save(2, state(2), {})
    assert "the folder is missing and is not created again" in str(error.value)
    assert not folder.exists() and run.exists() == (instead != "nothing")
    if run.exists():
        run.rmdir()
    (tmp_path / "away").rename(run)
    store.save(3, state(3), {})
    assert_whole(folder, [1, 3])
