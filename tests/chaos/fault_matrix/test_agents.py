"""Fault matrix of docs/fault-matrix.md, agent and host failures.

The number in a test's name or id is the row.
"""

from __future__ import annotations

import os
import signal
import time
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
    start_other_command,
    train_steps,
    wait_for_refusal,
)
from support.hosts import HERE, Host, Network
from support.launching import ROOT

long = pytest.mark.long
HANGING_LOOP = f"{ROOT / 'tests' / 'support' / 'hanging_loop.py'}:train"
OTHER_KERNELS = ("env", "ATEN_CPU_CAPABILITY=default")  # computes different bits


@long
def test_row_12_agent_killed_the_next_one_adopts_its_workers(
    start_training: StartTraining, reference: Reference
) -> None:
    # With --min 3 the run cannot end before the new agent's fork server has imported everything.
    training = start_training(steps=60, words=("--min", "3"))
    training.wait_for_step(8)
    before = training.newest
    training.kill_agent()
    training.agents.clear()
    train_steps(training, 5)
    training.start_agent()
    adopted_s = training.wait(
        lambda: len(training.events("worker taken over")) == 3, what="the adoption"
    )
    assert training.newest == before and adopted_s < BACK_WITHIN_S
    training.kill(training.member(1))
    print_seconds(adopted=adopted_s, whole=training.wait_until_whole(before))
    training.assert_same_bits(reference(60))


@long
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"steps": 60}, "--steps is 120 for them and 60 here", id="12-steps"),
        pytest.param({"words": ("--max", "2")}, "--max is 3 for them and 2 here", id="12-max"),
    ],
)
def test_agent_with_another_command_does_not_adopt_the_workers(
    start_training: StartTraining, reference: Reference, changed: dict[str, Any], message: str
) -> None:
    training = start_training(steps=120, words=("--max", "3"))
    training.wait_for_step(8)
    before = training.newest
    training.kill_agent()
    training.agents.clear()
    wait_for_refusal(training, start_other_command(training, **changed), message)
    assert len(training.processes()) == 3 and training.newest == before
    training.start_agent()
    training.wait(lambda: len(training.events("worker taken over")) == 3, what="the adoption")
    training.assert_same_bits(reference(120))


@long
@pytest.mark.parametrize(
    "host", [pytest.param(0, id="13-of the leader's host"), pytest.param(None, id="14-all")]
)
def test_agents_of_several_hosts_killed_the_next_ones_adopt(
    start_training: StartTraining, reference: Reference, network: Network, host: int | None
) -> None:
    killed = network.hosts if host is None else [network.hosts[host]]
    training = start_training(network.hosts, workers=1, steps=60)
    training.wait_for_step(8)
    before = training.newest
    for each in killed:
        training.kill_agent(each)
    train_steps(training, 5)
    for each in killed:
        training.start_agent(each)
    training.wait(
        lambda: len(training.events("worker taken over")) == len(killed), what="the adoption"
    )
    assert training.newest == before
    training.assert_same_bits(reference(60))


@pytest.mark.parametrize(
    ("number", "away_s"),
    [
        pytest.param(1, 0, id="15-a host", marks=long),
        pytest.param(0, 3, id="16-the leader's host, back after 3 s", marks=long),
        pytest.param(1, 25, id="17-back after 25 s", marks=long),
    ],
)
def test_lost_host_the_survivors_train_on_until_it_returns(
    start_training: StartTraining,
    reference: Reference,
    network: Network,
    number: int,
    away_s: float,
) -> None:
    steps = 600 if away_s > 10 else 120
    training = start_training(network.hosts, workers=1, steps=steps)
    training.wait_for_step(8)
    lost, before, step = network.hosts[number], training.newest, training.step
    survivors = {member.pid for member in before.members if member.host != lost.name}
    network.disconnect(lost)  # first, so that its kernel closes no connections
    training.kill_host(lost)
    assert assert_back_in_time(training, before).step >= step
    network.reconnect(lost)
    time.sleep(away_s)
    smaller = training.newest
    training.start_agent(lost)
    print_seconds(joined=training.wait_until_whole(smaller))
    assert survivors < {member.pid for member in training.newest.members}
    training.assert_same_bits(reference(steps))


@long
def test_row_18_fork_server_and_a_worker_killed_the_worker_is_replaced(
    start_training: StartTraining, reference: Reference
) -> None:
    training = start_training(steps=100)
    training.wait_for_step(8)
    before = training.newest
    os.kill(training.forkserver(), signal.SIGKILL)
    training.kill(training.member(1))
    assert_whole_in_time(training, before)
    training.assert_same_bits(reference(100))


@long
def test_row_20_stopped_agent_follows_the_run_after_sigcont(
    start_training: StartTraining, reference: Reference
) -> None:
    training = start_training(steps=120)
    training.wait_for_step(8)
    before = training.newest
    training.kill_agent(number=signal.SIGSTOP)
    training.kill(training.member(1))
    train_steps(training, 40)
    assert len(training.newest.members) == 2
    training.kill_agent(number=signal.SIGCONT)
    print_seconds(whole=training.wait_until_whole(before))
    training.assert_same_bits(reference(120))


@long
def test_row_33_second_start_of_a_running_run_is_refused(
    start_training: StartTraining, reference: Reference
) -> None:
    training = start_training(steps=60)
    training.wait_for_step(5)
    first_agent = training.agents.pop("here")
    training.start_agent()
    assert training.end() == {"here": 2} and training.wrote(
        "another training is already running in run"
    )
    training.agents["here"] = first_agent
    training.assert_same_bits(reference(60))


@long
def test_row_34_files_of_a_dead_run_are_ignored(
    start_training: StartTraining, reference: Reference
) -> None:
    training = start_training()
    training.wait_for_step(14)
    before = training.newest
    training.kill_host(HERE)
    training.start_agent()
    assert_whole_in_time(training, before)
    assert training.step >= 10
    training.assert_same_bits(reference(STEPS))


@long
def test_row_35_run_grows_from_one_worker_to_four_and_shrinks_to_one(
    start_training: StartTraining, reference: Reference
) -> None:
    hosts, start_s = [Host(name) for name in "abcd"], time.monotonic()
    training = start_training(
        hosts, workers=1, steps=400, start=hosts[:1], values={"elastic__rendezvous_timeout_s": 0.1}
    )
    training.wait_for_step(5)
    for size, host in enumerate(hosts[1:], 2):
        before = training.newest
        training.start_agent(host)
        training.wait_until_back(before, size)
    for size, host in zip((3, 2, 1), hosts, strict=False):
        before = training.newest
        training.kill_agent(host, signal.SIGUSR1)
        training.wait_until_back(before, size)
    sizes, steps = zip(
        *((len(record.members), record.step) for record in training.generations), strict=True
    )
    assert sizes == (1, 2, 3, 4, 3, 2, 1) and list(steps) == sorted(steps)
    training.assert_same_bits(reference(400))
    wall_s, goodput = time.monotonic() - start_s, training.events("goodput")[-1]
    assert 0.5 * wall_s < goodput["wall_s"] < wall_s, (
        "the last worker to join reports the goodput of the whole run"
    )
    categories_s = sum(
        seconds for name, seconds in goodput.items() if name.endswith("_s") and name != "wall_s"
    )
    assert categories_s == pytest.approx(goodput["wall_s"])


@long
def test_row_35_standby_worker_has_its_model_when_it_joins(
    start_training: StartTraining, reference: Reference
) -> None:
    hosts = [Host(name) for name in "abc"]
    training = start_training(hosts, workers=1, steps=120, words=("--max", "2"))
    training.wait(
        lambda: len(list((training.run / "waiting").glob("c-*.json"))) == 1 and training.step >= 10,
        what="the standby worker",
    )
    before = training.newest
    training.kill(before.members[1])
    print_seconds(back=training.wait_until_back(before, 2))
    assert {member.host for member in training.newest.members} == {"a", "c"}
    training.assert_same_bits(reference(120))


@long
def test_row_36_joiner_that_computes_other_bits_is_refused(
    start_training: StartTraining, reference: Reference
) -> None:
    hosts = [Host("a"), Host("b", enter=OTHER_KERNELS)]
    training = start_training(
        hosts, workers=1, steps=120, start=hosts[:1], values={"elastic__rendezvous_timeout_s": 0.1}
    )
    training.wait_for_step(5)
    before = training.newest
    training.start_agent(hosts[1])
    wait_for_refusal(training, training.agents.pop("b"), "would compute different bits")
    assert training.newest == before
    training.assert_same_bits(reference(120))


@long
def test_row_36_joiner_with_another_number_of_steps_is_refused(
    start_training: StartTraining, reference: Reference
) -> None:
    hosts = [Host("a"), Host("b")]
    training = start_training(
        hosts, workers=1, steps=120, start=hosts[:1], values={"elastic__rendezvous_timeout_s": 0.1}
    )
    training.wait_for_step(5)
    before = training.newest
    refused = start_other_command(training, hosts[1], steps=60)
    wait_for_refusal(training, refused, "run steps is '60' there and '120' here")
    assert training.newest == before
    training.assert_same_bits(reference(120))


@long
def test_row_36_standby_worker_that_computes_other_bits_is_refused(
    start_training: StartTraining, reference: Reference
) -> None:
    hosts = [Host("a"), Host("b"), Host("c", enter=OTHER_KERNELS)]
    training = start_training(hosts, workers=1, steps=60, words=("--max", "2"))
    training.wait_for_step(5)
    assert [member.host for member in training.newest.members] == ["a", "b"]
    before = training.newest
    wait_for_refusal(training, training.agents.pop("c"), "would compute different bits")
    assert training.newest == before
    training.assert_same_bits(reference(60))


@long
def test_row_36_joiner_with_other_flags_of_the_users_loop_is_refused(
    start_training: StartTraining,
) -> None:
    hosts = [Host("a"), Host("b")]
    training = start_training(hosts, workers=1, steps=5000, script=HANGING_LOOP)
    training.wait_for_step(20)
    before = training.newest
    training.kill_host(hosts[1])
    training.wait_until_back(before, 1)
    wait_for_refusal(
        training,
        start_other_command(training, hosts[1], steps=60),
        "--steps is '60' there and '5000' here",
    )
    training.agents.pop("b", None)
    training.stop()
    assert set(training.end().values()) == {75}
    training.assert_nothing_left()
