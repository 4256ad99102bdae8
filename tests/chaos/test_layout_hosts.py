"""Replicas of two workers each on several hosts: a replica is complete or lost.

Two layouts: three hosts with one replica each, and four hosts of which two share a replica. Every
run is stopped, and has the bits of one worker then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from support.fault_matrix import assert_back_in_time, print_seconds
from support.hosts import Network, Training, undisturbed

long = pytest.mark.long


@pytest.fixture
def sharded(
    request: pytest.FixtureRequest, start_training: Callable[..., Training], why_no_network: str
) -> Iterator[tuple[Network, Training]]:
    """Return hosts and a training with two shards per replica, after step 8.

    request.param  (hosts, workers per host)
    """
    if why_no_network:
        pytest.skip(why_no_network)
    hosts, workers = request.param
    with Network(hosts) as network:
        training = start_training(
            network.hosts, workers=workers, steps=100_000, values={"layout__shard": 2}
        )
        training.wait_for_step(8)
        yield network, training
        training.close()


ONE_HOST = pytest.mark.parametrize(
    "sharded", [pytest.param((3, 2), id="a replica on one host")], indirect=True
)
TWO_HOSTS = pytest.mark.parametrize(
    "sharded", [pytest.param((4, 1), id="a replica on two hosts")], indirect=True
)


def assert_recovers(training: Training, recover: Callable[[], None]) -> None:
    """Call `recover()`; assert that the lost host joins, and the bits of one worker."""
    before = training.newest
    recover()
    training.wait_until_whole(before)
    assert_same_bits_after_a_stop(training)


def assert_same_bits_after_a_stop(training: Training) -> None:
    training.stop()
    training.end()
    (training.folder / "alone").mkdir()
    training.assert_same_bits(
        undisturbed(training.folder / "alone", training.step, optim__decay_steps=training.steps),
        code=75,
    )


@ONE_HOST
@long
def test_partner_of_a_killed_shard_leaves_and_joins_again(
    sharded: tuple[Network, Training],
) -> None:
    network, training = sharded
    before, step = training.newest, training.step
    lost, partner = (training.member(slot, network.hosts[1]) for slot in (1, 0))
    training.kill(lost)
    after = assert_back_in_time(training, before)
    assert after.step >= step
    assert partner not in after.members and len(after.members) == 4, "half a replica cannot train"
    print_seconds(whole=training.wait_until_whole(before))
    assert_same_bits_after_a_stop(training)


@ONE_HOST
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(1, id="15-a host", marks=long),
        pytest.param(0, id="16-the leader's host", marks=long),
    ],
)
def test_host_of_a_replica_is_lost_and_returns(
    sharded: tuple[Network, Training], number: int
) -> None:
    network, training = sharded
    before, step, lost = training.newest, training.step, network.hosts[number]
    training.kill_host(lost)
    after = assert_back_in_time(training, before)
    assert after.step >= step and {member.host for member in after.members} == {"a", "b", "c"} - {
        lost.name
    }
    assert_recovers(training, lambda: training.start_agent(lost))


@ONE_HOST
@long
def test_row_29_host_of_a_replica_is_cut_off_and_joins_again(
    sharded: tuple[Network, Training],
) -> None:
    network, training = sharded
    before = training.newest
    network.disconnect(network.hosts[1])
    assert_back_in_time(training, before)
    assert {member.host for member in training.newest.members} == {"a", "c"}
    time.sleep(1)
    assert_recovers(training, lambda: network.reconnect(network.hosts[1]))


@TWO_HOSTS
@long
def test_row_15_partner_on_another_host_leaves_with_a_lost_host(
    sharded: tuple[Network, Training],
) -> None:
    network, training = sharded
    before, step = training.newest, training.step
    rank = next(rank for rank, member in enumerate(before.members) if member.host == "b")
    partner = before.members[rank ^ 1]
    training.kill_host(network.hosts[1])
    after = assert_back_in_time(training, before)
    assert after.step >= step and len(after.members) == 2 and partner not in after.members
    assert_recovers(training, lambda: training.start_agent(network.hosts[1]))
