"""Several workers of one host join together, and processes die while they receive the state."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from support.fault_matrix import STEPS, Reference, StartTraining
from support.hosts import Training


def shared_memory_left(training: Training) -> list[str]:
    """Return the memory of state transfers that workers still map or have open."""
    left = []
    for process in training.processes().values():
        folder = Path(f"/proc/{process.pid}")
        with suppress(OSError):
            names = [
                *folder.joinpath("maps").read_text().splitlines(),
                *(os.readlink(path) for path in folder.joinpath("fd").iterdir()),
            ]
            left += [name for name in names if "lockstep-state" in name]
    return left


@pytest.mark.parametrize(
    "slot",
    [
        pytest.param(None, id="none"),
        *(pytest.param(slot, marks=pytest.mark.long) for slot in (2, 3)),
    ],
)
def test_joiner_killed_while_two_of_a_host_receive_the_state(
    start_training: StartTraining, reference: Reference, slot: int | None
) -> None:
    training = start_training(
        workers=4, words=("--min", "4")
    )  # so that both join in one generation
    training.wait_for_step(12)
    before = training.newest
    if slot is not None:
        training.request_fault(slot, "kill", at="hand-over")
    training.kill(training.member(2), training.member(3))
    training.wait_until_whole(before)
    assert slot is None or training.fault_taken(slot)
    joined = [event["joined"] for event in training.events("regrouped")]
    assert [2, 3] in joined, joined
    assert not shared_memory_left(training)
    training.assert_same_bits(reference(STEPS))


@pytest.mark.long
def test_joiners_of_a_replica_resume_a_checkpoint_when_their_sources_die(
    start_training: StartTraining, reference: Reference
) -> None:
    """They keep their part of the model: a worker keeps its position in a replica."""
    training = start_training(workers=4, values={"layout__shard": 2})
    training.wait_for_step(12)
    before = training.newest
    for slot in (0, 1):
        training.request_fault(slot, "kill", at="hand-over")
    training.kill(training.member(2), training.member(3))
    training.wait(
        lambda: training.fault_taken(0) and training.fault_taken(1), what="the state transfer"
    )
    training.wait_until_whole(before)
    began = training.events("began")[-1]
    assert began["generation"] > before.number and began["step"] >= 10
    assert {id.split("/")[1] for id in began["workers"]} == {"2", "3"}, began
    training.assert_same_bits(reference(STEPS))
