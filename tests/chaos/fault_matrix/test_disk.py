"""Fault matrix of docs/fault-matrix.md, disk and run folder.

The number in a test's name or id is the row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.fault_matrix import (
    BACK_WITHIN_S,
    STEPS,
    Reference,
    StartTraining,
    print_seconds,
    print_steps,
)
from support.faults import empty_folder_over, frozen, mounted_disk

long = pytest.mark.long


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The run folder, as a separate file system."""
    with mounted_disk(tmp_path / "disk.ext4", tmp_path / "run") as folder:
        yield folder


@long
@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("run/generations", id="32-the log"),
        pytest.param("run", id="32-the whole run folder"),
    ],
)
def test_training_continues_while_the_run_folder_is_unreachable(
    start_training: StartTraining, reference: Reference, tmp_path: Path, folder: str
) -> None:
    training = start_training(steps=200)
    training.wait_for_step(12)
    before, step = training.newest, training.shown
    with empty_folder_over(tmp_path / folder):
        time.sleep(10)
        assert training.shown >= step + 20
    assert training.newest == before
    training.assert_same_bits(reference(200))


@long
def test_row_41_committer_killed_during_a_save(
    start_training: StartTraining, reference: Reference
) -> None:
    training = start_training()
    training.wait_for_step(8)
    before = training.newest
    training.inject_fault(training.leader.slot, "kill", at="saving", step=10)
    back_s = training.wait_for_step(13)
    print_seconds(back=back_s, whole=back_s + training.wait_until_whole(before))
    assert back_s < BACK_WITHIN_S
    training.assert_same_bits(reference(STEPS))


@long
def test_row_53_no_line_is_lost_while_the_metrics_cannot_be_written(
    start_training: StartTraining, reference: Reference
) -> None:
    training = start_training(steps=60, values={"track__tensorboard": True})
    training.wait_for_step(8)
    metrics, elsewhere = training.run / "metrics.jsonl", training.run / "elsewhere.jsonl"
    metrics.rename(elsewhere)
    metrics.mkdir()
    print_steps(training, 20)
    metrics.rmdir()
    elsewhere.rename(metrics)
    training.assert_same_bits(reference(60))


@pytest.mark.parametrize(
    ("writable", "slot"),
    [
        pytest.param(False, 1, id="55-read-only", marks=long),
        pytest.param(False, 0, id="55-read-only, the leader", marks=long),
        pytest.param(True, 1, id="56-empty and writable", marks=long),
    ],
)
def test_replacement_waits_for_the_run_folder_and_writes_nothing_elsewhere(
    start_training: StartTraining, reference: Reference, writable: bool, slot: int
) -> None:
    training = start_training(steps=120)
    training.wait_for_step(12)
    before = training.newest
    survivors = {member.id for member in before.members if member.slot != slot}
    with empty_folder_over(training.run, writable=writable):
        print_steps(training, 25)  # more than checkpoint.every_steps: a save is due meanwhile
        training.kill(next(member for member in before.members if member.slot == slot))
        time.sleep(5)  # longer than three attempts to start would take
        assert all(agent.poll() is None for agent in training.agents.values())
        written = {path.name for path in training.run.iterdir()} & {
            "token",
            "generations",
            "waiting",
            "checkpoints",
            "logs",
        }
        assert not written
    print_seconds(whole=training.wait_until_whole(before))
    assert [record.number for record in training.generations] == list(
        range(1, training.newest.number + 1)
    )
    assert survivors < {member.id for member in training.newest.members}
    assert training.log.read(before.number).token == before.token
    training.assert_same_bits(reference(120))
    assert training.wrote(r"the run folder cannot be used \(.*\); worker here/\d waits for it")
    assert training.wrote("the run folder is usable again")
    assert training.wrote(r"the checkpoint of step \d+ was not saved: (Read-only|No such file)")
    assert not training.wrote("in a row to fail")


@long
def test_row_57_agent_started_over_an_empty_folder_exits_and_names_it(
    start_training: StartTraining, reference: Reference
) -> None:
    training = start_training(steps=120)
    training.wait_for_step(12)
    before = training.newest
    training.kill_agent()
    with empty_folder_over(training.run, writable=True):
        training.start_agent()
        assert training.end() == {"here": 2}
        assert training.wrote(
            "run is not the folder that the workers of here train in: it has no token"
        )
        assert not list(training.run.iterdir())
    training.start_agent()
    training.assert_same_bits(reference(120))
    assert training.newest.members == before.members or training.newest.end


@long
@pytest.mark.parametrize(
    "on_error", [pytest.param("continue", id="59-wait for it"), pytest.param("stop", id="59-exit")]
)
def test_run_that_ends_while_its_folder_is_unreachable_waits_or_exits_with_3(
    start_training: StartTraining, reference: Reference, on_error: str
) -> None:
    training = start_training(values={"checkpoint__on_error": on_error})
    training.wait_for_step(22)
    with empty_folder_over(training.run, writable=True):
        if on_error == "stop":
            assert training.end() == {"here": 3}
            assert training.wrote(r"SaveFailedError: the checkpoint of step \d+ was not saved")
            assert not (training.run / "generations").exists()
            return
        training.wait(
            lambda: training.wrote("worker here/0 waits for it"), what="the end of the training"
        )
        assert not (training.run / "generations").exists()
    training.assert_same_bits(reference(STEPS))


@long
@pytest.mark.parametrize(
    "killed",
    [
        pytest.param((), id="60-no worker dies"),
        pytest.param((1,), id="60-a worker dies"),
        pytest.param((0,), id="60-the leader dies"),
    ],
)
def test_no_step_waits_for_a_frozen_disk(
    start_training: StartTraining, reference: Reference, disk: Path, killed: Sequence[int]
) -> None:
    training = start_training(steps=300, values={"elastic__hang_timeout_s": 3.0})
    training.wait_for_step(12)
    before = training.newest
    with frozen(disk):
        print_steps(training, 60)  # six checkpoints are due meanwhile
        training.kill(*(training.member(slot) for slot in killed))
        time.sleep(4)
    if killed:
        training.wait_until_whole(before)
    else:
        assert training.newest == before
    training.assert_same_bits(reference(300))
    assert training.wrote(
        r"the save of step \d+ is skipped: the previous one is still being written"
    )
    assert not training.events("hang") and not training.wrote("cannot be written")
