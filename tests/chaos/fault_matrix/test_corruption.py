"""Fault matrix of docs/fault-matrix.md, silent data corruption (row 37): one bit flips."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fault_matrix import Reference, StartTraining
from support.launching import ROOT, run_lockstep

from lockstep.checkpoint.commands import digest_line

long = pytest.mark.long
SUPPORT = ROOT / "tests" / "support"


@long
@pytest.mark.parametrize(
    "step",
    [pytest.param(20, id="37-before a save"), pytest.param(30, id="37-before the last save")],
)
def test_bit_flipped_on_the_leader_before_it_saves_is_in_no_checkpoint(
    start_training: StartTraining, reference: Reference, step: int
) -> None:
    training = start_training(steps=30)
    training.wait_for_step(4)
    training.inject_fault(training.leader.slot, "flip", at="saving", step=step)
    training.assert_same_bits(reference(30))
    assert training.wrote(
        rf"the weights, optimizer state or values of session.state of rank 0 .* differ before step {step + 1}"
    )
    assert digest_line(training.run, 20) == digest_line(reference(30).run, 20)


@long
@pytest.mark.parametrize("workers", [2, 3])
def test_row_37_with_verify_every_10_all_restart_from_a_verified_checkpoint(
    start_training: StartTraining, reference: Reference, workers: int
) -> None:
    training = start_training(
        steps=60,
        workers=workers,
        values={"elastic__verify_every": 10, "checkpoint__every_steps": 5},
    )
    training.wait_for_step(8)
    training.inject_fault(1, "flip", at="forward", step=32)
    training.assert_same_bits(reference(60))
    assert training.wrote("differ before step 3[5-9]")


@pytest.mark.parametrize("slot", [1, pytest.param(2, marks=long)])
def test_row_37_bit_flipped_while_a_joiner_rehearses_is_no_fault_of_the_loop(
    start_training: StartTraining, reference: Reference, slot: int
) -> None:
    """Of a member, or of the joiner itself in slot 2."""
    training = start_training(steps=20, words=("--min", "3"))
    training.inject_fault(2, "kill", at="forward", step=8)
    training.wait_until_joining(1)
    training.inject_fault(slot, "flip", at="forward")
    training.assert_same_bits(reference(20))
    assert training.wrote("a bit has flipped there")


@long
def test_row_37_bit_of_a_frozen_layer_flipped_while_a_joiner_rehearses(
    start_training: StartTraining, tmp_path: Path
) -> None:
    script = f"{SUPPORT / 'frozen_flip_loop.py'}:train"
    training = start_training(steps=100, words=("--min", "3"), script=script)
    training.inject_fault(2, "kill", at="forward", step=50)
    training.wait_until_joining(1)
    training.inject_fault(1, "flip", at="forward")
    assert training.end() == {"here": 0}, training.report()
    assert training.wrote("a bit has flipped there")
    assert_equal_to_one_worker(tmp_path, script)


def assert_equal_to_one_worker(tmp_path: Path, script: str) -> None:
    """Assert that checkpoint 100 equals that of an undisturbed run on one worker."""
    run_lockstep(
        "train", script, "--workers", 1, "--out", "alone", "--steps", 100, cwd=tmp_path, check=True
    )
    assert digest_line(tmp_path / "run", 100) == digest_line(tmp_path / "alone", 100)


@long
def test_row_37_leader_that_misses_the_verdict_trusts_no_state(
    start_training: StartTraining, tmp_path: Path
) -> None:
    script = f"{SUPPORT / 'late_verdict_loop.py'}:train"
    training = start_training(steps=100, workers=2, script=script)
    training.wait_for_step(8)
    training.inject_fault(training.leader.slot, "flip", at="forward", step=70)
    assert training.end() == {"here": 0}, training.report()
    assert training.wrote("none is in the majority") and training.wrote(
        r"the weights.* of here/[02]/\w+ were wrong"
    )
    assert training.wrote("resumes from step 50")
    assert_equal_to_one_worker(tmp_path, script)


@long
@pytest.mark.parametrize(
    ("workers", "flipped"),
    [
        pytest.param(3, "optim.", id="37-without a majority"),
        pytest.param(3, "seen", id="37-a buffer"),
        pytest.param(4, "optim.", id="37-three against one"),
    ],
)
def test_bit_flipped_by_a_source_of_a_state_transfer_is_found(
    start_training: StartTraining, tmp_path: Path, workers: int, flipped: str
) -> None:
    """The joiner receives the flipped state, so of three workers none is in the majority."""
    script = f"{SUPPORT / 'divergent_source_loop.py'}:train"
    (tmp_path / "flipped").write_text(flipped)
    training = start_training(steps=100, workers=workers, script=script)
    training.wait_for_step(8)
    training.inject_fault(0, "kill", at="forward", step=55)
    assert training.end() == {"here": 0}, training.report()
    if workers == 4:
        assert training.wrote(
            "here/2: its weights, optimizer state or values of session.state differ before step [5-9]"
        )
        assert not training.wrote("resumes from step 50")
    else:
        assert training.wrote("none is in the majority") and training.wrote(
            r"the weights.* of here/[02]/\w+ were wrong"
        )
        assert training.wrote("resumes from step 50")
    assert_equal_to_one_worker(tmp_path, script)
