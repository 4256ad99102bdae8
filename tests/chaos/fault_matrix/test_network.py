"""Fault matrix of docs/fault-matrix.md, network and clock.

The number in a test's name or id is the row.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support.fault_matrix import (
    BACK_WITHIN_S,
    STEPS,
    Reference,
    StartTraining,
    assert_back_in_time,
    print_seconds,
)
from support.hosts import Host, Network

long = pytest.mark.long


@long
@pytest.mark.parametrize(
    "seconds", [pytest.param(1.0, id="25-1 s"), pytest.param(5.0, id="25-5 s")]
)
def test_link_down_longer_than_the_heartbeat_timeout_changes_the_generation(
    start_training: StartTraining, reference: Reference, network: Network, seconds: float
) -> None:
    training = start_training(network.hosts, workers=1, steps=120)
    training.wait_for_step(8)
    before = training.newest
    network.disconnect(network.hosts[1])
    time.sleep(seconds)
    network.reconnect(network.hosts[1])
    if seconds > 2:
        print_seconds(whole=training.wait_until_whole(before))
    else:
        print_seconds(back=training.wait_for_step(training.step + 2))
        assert training.newest == before
    training.assert_same_bits(reference(120))


@pytest.mark.parametrize(
    "number",
    [pytest.param(0, id="26-the leader", marks=long), pytest.param(1, id="26-another", marks=long)],
)
def test_one_host_of_three_cut_off_for_good_is_evicted(
    start_training: StartTraining, reference: Reference, network: Network, number: int
) -> None:
    training = start_training(network.hosts, workers=1, steps=60)
    training.wait_for_step(8)
    before, step, lost = training.newest, training.step, network.hosts[number]
    network.disconnect(lost)
    after = assert_back_in_time(training, before)
    assert after.step >= step
    assert {member.host for member in after.members} == {host.name for host in network.hosts} - {
        lost.name
    }
    training.assert_same_bits(reference(60))


@long
def test_row_26_of_two_hosts_cut_apart_exactly_one_continues(
    start_training: StartTraining, reference: Reference, network: Network
) -> None:
    hosts = network.hosts[:2]
    training = start_training(hosts, workers=1, steps=700)
    training.wait_for_step(8)
    before = training.newest
    network.disconnect(hosts[1])
    assert_back_in_time(training, before)
    training.assert_same_bits(reference(700))
    later = [record for record in training.generations[before.number :] if not record.end]
    assert [len(record.members) for record in later] == [1]


@long
def test_row_27_packets_dropped_in_one_direction_evict_one_host(
    start_training: StartTraining, reference: Reference, network: Network
) -> None:
    training = start_training(network.hosts, workers=1, steps=120)
    training.wait_for_step(8)
    before, step, (leader, other, _) = training.newest, training.step, network.hosts
    network.drop_packets(other, leader)
    assert assert_back_in_time(training, before).step >= step
    network.restore_packets(other, leader)
    training.assert_same_bits(reference(120))


@long
def test_row_28_of_two_workers_that_cannot_reach_each_other_one_is_evicted(
    start_training: StartTraining, reference: Reference, network: Network
) -> None:
    training = start_training(
        network.hosts, workers=1, steps=60, values={"elastic__hang_timeout_s": 4.0}
    )
    training.wait_for_step(8)
    before, step, (_, b, c) = training.newest, training.step, network.hosts
    network.drop_packets(b, c)
    network.drop_packets(c, b)
    assert_back_in_time(training, before, 2)
    assert training.newest.step >= step
    training.assert_same_bits(reference(60))


@long
def test_row_29_cut_off_host_joins_again_after_the_others_continued(
    start_training: StartTraining, reference: Reference, network: Network
) -> None:
    training = start_training(network.hosts, workers=1, steps=200)
    training.wait_for_step(8)
    before = training.newest
    network.disconnect(network.hosts[0])
    assert_back_in_time(training, before)
    time.sleep(3.0)
    between = training.newest
    network.reconnect(network.hosts[0])
    print_seconds(whole=training.wait_until_whole(between))
    assert before.members[0].id not in {member.id for member in training.newest.members}
    training.assert_same_bits(reference(200))


@long
def test_row_30_slow_network_evicts_no_worker(
    start_training: StartTraining, reference: Reference, network: Network
) -> None:
    training = start_training(network.hosts, workers=1, steps=15)
    training.wait_for_step(3)
    before = training.newest
    for host in network.hosts:
        network.limit_rate(host, "1mbit")
    print_seconds(step=training.wait_for_step(8, timeout_s=200) / 5)
    assert training.newest == before
    training.assert_same_bits(reference(15), timeout_s=200)


@long
@pytest.mark.parametrize(
    "rank", [pytest.param(1, id="30-a worker"), pytest.param(0, id="30-the leader")]
)
def test_worker_killed_while_a_bucket_is_in_flight_on_a_slow_network(
    start_training: StartTraining, reference: Reference, network: Network, rank: int
) -> None:
    training = start_training(network.hosts, workers=1, steps=15)
    training.wait_for_step(3)
    before = training.newest
    for host in network.hosts:
        network.limit_rate(host, "1mbit")
    training.wait_for_step(5, timeout_s=200)
    time.sleep(1)  # less than a step takes
    training.kill(before.members[rank])
    back_s = training.wait_until_back(before)
    print_seconds(back=back_s)
    assert back_s < 2 * BACK_WITHIN_S
    for host in network.hosts:
        network.limit_rate(host, "1gbit")
    training.assert_same_bits(reference(15), timeout_s=200)


@long
@pytest.mark.parametrize(
    "shift_s", [pytest.param(3600, id="31-ahead"), pytest.param(-3600, id="31-behind")]
)
def test_clock_an_hour_off_has_no_effect(
    start_training: StartTraining, reference: Reference, tmp_path: Path, shift_s: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import time\nright = time.time\ntime.time = lambda: right() + {shift_s}\n"
    )
    hosts = [
        Host("a"),
        Host("b", enter=("env", f"PYTHONPATH={tmp_path}:{os.environ.get('PYTHONPATH', '')}")),
    ]
    training = start_training(hosts, workers=1)
    training.wait_for_step(12)
    before = training.newest
    training.kill(before.members[0])
    print_seconds(whole=training.wait_until_whole(before))
    assert training.log.read(before.number + 1).step >= 12
    training.assert_same_bits(reference(STEPS))
