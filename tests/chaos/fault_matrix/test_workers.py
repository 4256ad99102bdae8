"""Fault matrix of docs/fault-matrix.md, worker failures.

The number in a test's name or id is the row. Each test ends with `assert_same_bits`: the digest of
an undisturbed run, each step once, nothing left over. Time limits are far below the 600 s timeout
of a collective, since machines differ; `pytest -rP` prints the measured times.
"""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.fault_matrix import (
    BACK_WITHIN_S,
    STEPS,
    Reference,
    StartTraining,
    assert_back_in_time,
    assert_whole_in_time,
    print_seconds,
)
from support.faults import out_of_memory
from support.launching import OWN_LOOP, run_lockstep

from lockstep.checkpoint.commands import digest_line

long = pytest.mark.long


@long
@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"at": "forward"}, id="1-forward"),
        pytest.param({"at": "backward"}, id="1-backward"),
        pytest.param({"at": "collective"}, id="2-first bucket"),
        pytest.param({"at": "collective", "after": 1}, id="2-between buckets"),
        pytest.param({"at": "reducing"}, id="2-last bucket"),
        pytest.param({"at": "voting"}, id="3-after the reduction"),
        pytest.param({"at": "updating"}, id="4-in the update"),
    ],
)
def test_worker_killed_in_a_step_costs_at_most_that_step(
    start_training: StartTraining, reference: Reference, where: Any
) -> None:
    training = start_training()
    training.wait_for_step(8)
    before = training.newest
    training.inject_fault(1, "kill", step=12, **where)
    back_s = training.wait_for_step(13)
    print_seconds(back=back_s, whole=back_s + training.wait_until_whole(before))
    after = training.log.read(before.number + 1)
    assert len(after.members) == 2 and after.step in (11, 12) and back_s < BACK_WITHIN_S
    training.assert_same_bits(reference(STEPS))


def test_row_5_leader_killed_loses_no_committed_step(
    start_training: StartTraining, reference: Reference
) -> None:
    training = start_training()
    training.wait_for_step(12)
    before, step = training.newest, training.step
    training.kill(training.leader)
    after = assert_back_in_time(training, before)
    print_seconds(whole=training.wait_until_whole(before))
    assert after.step >= step and before.members[0].id not in {
        member.id for member in after.members
    }
    training.assert_same_bits(reference(STEPS))


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(0, id="6-left the old group", marks=long),
        pytest.param(1, id="6-forming the new group"),
    ],
)
def test_leader_killed_while_a_group_forms_delays_the_run_little(
    start_training: StartTraining, reference: Reference, after: int
) -> None:
    training = start_training()
    training.wait_for_step(8)
    before = training.newest
    training.request_fault(training.leader.slot, "kill", at="joining", after=after)
    training.inject_fault(2, "kill", at="backward", step=12)
    back_s = training.wait_for_step(13)
    print_seconds(back=back_s, whole=back_s + training.wait_until_whole(before))
    assert back_s < BACK_WITHIN_S and training.fault_taken(before.members[0].slot)
    training.assert_same_bits(reference(STEPS))


@long
def test_row_7_one_survivor_is_the_source_of_the_state(
    start_training: StartTraining, reference: Reference
) -> None:
    training = start_training()
    training.wait_for_step(12)
    before, step = training.newest, training.step
    training.kill(*training.newest.members[:-1])
    after = assert_back_in_time(training, before)
    print_seconds(whole=training.wait_until_whole(before))
    # One step less if the leader wrote its metrics and died before the vote reached the survivor,
    # which then retries the step.
    assert after.step >= step - 1 and len(after.members) == 1
    training.assert_same_bits(reference(STEPS))


def test_row_8_all_workers_killed_restart_from_the_newest_checkpoint(
    start_training: StartTraining, reference: Reference
) -> None:
    """Before the first checkpoint and after it. The goodput counts every second, also the lost ones."""
    training = start_training(steps=60, values={"checkpoint__every_steps": 20})
    for step in (10, 30):
        training.wait_for_step(step)
        before = training.newest
        training.kill(*before.members)
        assert_whole_in_time(training, before)
    assert training.step >= 20
    training.assert_same_bits(reference(60))
    starts, saved = training.events("began"), {event["step"] for event in training.events("saved")}
    assert [start["step"] for start in starts[:2]] == [0, 0] and starts[0][
        "generation"
    ] == 1 < starts[1]["generation"]
    assert starts[2]["step"] in saved
    first, goodput = training.events("worker started")[0], training.events("goodput")[-1]
    wall_s = (
        datetime.fromisoformat(goodput["time"]) - datetime.fromisoformat(first["time"])
    ).total_seconds()
    assert goodput["wall_s"] == pytest.approx(wall_s, rel=0.01)
    assert goodput["lost_s"] > 0 and goodput["starting_s"] > 0
    categories_s = sum(
        seconds for name, seconds in goodput.items() if name.endswith("_s") and name != "wall_s"
    )
    assert categories_s == pytest.approx(goodput["wall_s"])


@pytest.mark.parametrize(
    "slot",
    [
        pytest.param(1, id="9-the joiner"),
        pytest.param(0, id="10-the leader, a source", marks=long),
        pytest.param(2, id="10-the other source", marks=long),
    ],
)
def test_worker_killed_during_state_transfer_delays_the_run_little(
    start_training: StartTraining, reference: Reference, slot: int
) -> None:
    training = start_training()
    training.wait_for_step(12)
    before = training.newest
    training.request_fault(slot, "kill", at="hand-over")
    training.kill(training.member(1))
    struck_s = training.wait(lambda: training.fault_taken(slot), what="the state transfer")
    back_s = training.wait_for_step(training.step + 1)
    print_seconds(transfer=struck_s, back=back_s, whole=back_s + training.wait_until_whole(before))
    assert back_s < BACK_WITHIN_S and training.newest.step >= 12
    training.assert_same_bits(reference(STEPS))


@long
def test_row_11_run_progresses_under_kills_every_half_second(
    start_training: StartTraining, reference: Reference
) -> None:
    training = start_training(steps=400, values={"checkpoint__every_steps": 5})
    training.wait_for_step(8)
    chance, kills, stop_s, first_step = random.Random(1), 0, time.monotonic() + 60, training.step
    while time.monotonic() < stop_s and training.step < 380:
        training.kill(chance.choice(list(training.processes().values()) or [training.leader]))
        kills += 1
        time.sleep(0.5)
    print(
        f"{kills} kills, {training.step - first_step} steps meanwhile, {training.newest.number} generations"
    )
    assert kills >= 50 and training.step > first_step
    training.assert_same_bits(reference(400))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("stop", id="19-stopped"),
        pytest.param("spin", id="21-spins with the GIL", marks=long),
        pytest.param("hang", id="21-hangs", marks=long),
        pytest.param("raise", id="22-raises", marks=long),
        pytest.param("exit", id="23-exits with 0", marks=long),
        pytest.param("flip", id="37-a bit of its weights flips", marks=long),
    ],
)
def test_failing_worker_is_evicted_and_replaced(
    start_training: StartTraining, reference: Reference, fault: Any
) -> None:
    training = start_training(steps=60, values={"elastic__hang_timeout_s": 4.0})
    training.wait_for_step(8)
    before, pid = training.newest, training.member(1).pid
    training.inject_fault(1, fault, at="backward", step=12)
    back_s = training.wait_for_step(13)
    print_seconds(back=back_s, whole=back_s + training.wait_until_whole(before))
    after = training.log.read(before.number + 1)
    assert (
        pid not in {member.pid for member in training.newest.members}
        and after.step >= 11
        and back_s < BACK_WITHIN_S
    )
    assert "/1" in after.reason
    training.assert_same_bits(reference(60))


@long
def test_row_22_an_error_at_every_attempt_ends_the_run_with_its_traceback(
    start_training: StartTraining,
) -> None:
    training = start_training()
    training.wait_for_step(8)

    def fail_until_the_agent_exits() -> bool:
        for slot in range(3):
            if training.fault_taken(slot):
                training.request_fault(slot, "raise", at="backward", step=12)
        return all(agent.poll() is not None for agent in training.agents.values())

    print_seconds(
        exit_after=training.wait(fail_until_the_agent_exits, what="the exit of the agent")
    )
    for slot in range(3):
        training.withdraw_fault(slot)
    assert set(training.end().values()) == {1} and training.step <= 12
    assert training.wrote("ValueError: injected error") and training.wrote(
        "in a row to fail in step 1[23]"
    )
    training.assert_nothing_left()


@long
@pytest.mark.parametrize(
    "target", [pytest.param("worker", id="24-a worker"), pytest.param("agent", id="24-the agent")]
)
def test_sigterm_saves_and_the_same_command_resumes(
    start_training: StartTraining, reference: Reference, target: str
) -> None:
    training = start_training()
    training.wait_for_step(12)
    if target == "agent":
        training.kill_agent(number=signal.SIGTERM)
    else:
        training.kill(training.member(1), number=signal.SIGTERM)
    assert set(training.end().values()) == {75}
    step = training.step
    assert 12 <= step < STEPS
    training.assert_nothing_left()
    training.start_agent()
    training.assert_same_bits(reference(STEPS))
    assert [event["step"] for event in training.events("began")] == [0, step]


@long
def test_row_52_worker_killed_by_the_kernel_for_memory_is_replaced(
    start_training: StartTraining, reference: Reference
) -> None:
    training = start_training(steps=60)
    training.wait_for_step(8)
    before, step = training.newest, training.step
    with out_of_memory(training.member(1).pid):
        back_s = training.wait(
            lambda: training.newest.number > before.number and training.step > step,
            what="the next generation",
        )
        print_seconds(back=back_s, whole=back_s + training.wait_until_whole(before))
    assert training.newest.step >= step
    training.assert_same_bits(reference(60))


PLACES: list[dict[str, Any]] = [
    {"at": "forward"},
    {"at": "backward"},
    {"at": "collective"},
    {"at": "collective", "after": 1},  # between two buckets
    {"at": "voting"},
]


STEPS_OF_ROW_54 = 6 if os.environ.get("LOCKSTEP_CHAOS") == "1" else 3


@pytest.mark.timeout(600)
def test_row_54_kill_at_every_place_of_every_step(
    start_training: StartTraining, reference: Reference
) -> None:
    """SIGKILL at each place of each step, the replicas in turn.

    With --min 3 the survivors wait until all three are there and retry the step, in which the next
    worker dies at the next place. After the vote the step is not retried: there one worker dies in
    the update, and another while it saves.
    """
    steps = STEPS_OF_ROW_54
    training = start_training(
        steps=steps, words=("--min", "3"), values={"checkpoint__every_steps": 1}
    )
    start_s = time.monotonic()
    for step in range(1, steps + 1):
        slots = [(step + turn) % 3 for turn in range(8)]
        for slot, next_slot, place in zip(slots, slots[1:], PLACES, strict=False):
            training.inject_fault(slot, "kill", step=step, **place)
            training.wait_until_joining(next_slot)
        training.request_fault(slots[5], "kill", at="updating", step=step)
        training.inject_fault(slots[6], "kill", at="saving", step=step)
        training.wait(
            lambda slot=slots[5]: training.fault_taken(slot), what=f"the update of {step}"
        )  # type: ignore[misc]
        if step < steps:
            training.wait_until_joining(slots[7])
    print_seconds(each=(time.monotonic() - start_s) / (7 * steps))
    training.assert_same_bits(reference(steps))
    expected = [
        (place["at"], step)
        for step in range(1, steps + 1)
        for place in (*PLACES, {"at": "updating"}, {"at": "saving"})
    ]
    assert sorted(training.injected_faults()) == sorted(expected)


@long
def test_row_58_an_error_at_every_start_of_the_users_loop_ends_the_run(
    start_training: StartTraining, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "def train(steps: int = 0) -> None:\n    open('no such folder/file')\n"
    )
    training = start_training(script="own.py:train")
    assert training.end() == {"here": 1}
    assert training.wrote("FileNotFoundError: .*no such folder/file")
    assert training.wrote("workers failed with this error before the first step")
    training.assert_nothing_left()


@long
def test_users_loop_recovers_in_place_from_one_fault_after_another(
    start_training: StartTraining, tmp_path: Path
) -> None:
    """Rows 1, 5, 37, 12 and 19 in one run of examples/own_loop.py."""
    training = start_training(steps=1_000_000, script=OWN_LOOP)
    training.wait_for_step(50)
    for fault in ("kill a worker", "kill the leader", "flip", "kill the agent", "stop"):
        before, step = training.newest, training.step
        if fault == "kill the agent":
            training.kill_agent()
            training.start_agent()
            training.wait_for_step(step + 50)
            continue
        if fault == "kill the leader":
            training.kill(training.leader)
        elif fault == "kill a worker":
            training.kill(before.members[1])
        else:
            training.inject_fault(1, fault, at="forward", step=step + 20)  # type: ignore[arg-type]
        print_seconds(**{fault: training.wait_until_whole(before)})
    training.stop()
    assert set(training.end().values()) == {75}, training.report()
    assert not [
        record.reason
        for record in training.generations
        if "no member of generation" in record.reason
    ]
    run_lockstep(
        "train",
        OWN_LOOP,
        "--workers",
        1,
        "--out",
        "alone",
        "--steps",
        training.step,
        cwd=tmp_path,
        check=True,
    )
    saved = training.step // 50 * 50
    assert digest_line(training.run, saved) == digest_line(tmp_path / "alone", saved)
