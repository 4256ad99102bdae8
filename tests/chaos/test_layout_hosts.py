"""Replicas of two workers each, on hosts of their own: a replica is whole or dead, and the run ends with the bits of one worker.

Three hosts with a replica each, and four hosts of which two make a replica. What is done to them, as in test_fault_matrix.py. The short
part loses a host; the rest needs LOCKSTEP_CHAOS=1.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hosts import Network, Training, Truth, undisturbed, why_no_hosts

from lockstep.elastic.generation_log import Generation

STEPS = 150
SOON_S = 20.0  # far below the 600 s of a collective, far above what it takes
long = pytest.mark.skipif(os.environ.get("LOCKSTEP_CHAOS") != "1", reason="the long part of layouts on hosts: LOCKSTEP_CHAOS=1")


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """What the run comes to undisturbed, on one worker."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), STEPS)


@pytest.fixture
def training(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Network, Training]]:
    """`request.param` hosts, six or four workers, replicas of two shards; beyond its eighth step."""
    if why_not := why_no_hosts():
        pytest.skip(why_not)
    monkeypatch.setenv("LOCKSTEP_TMP", str(tmp_path))
    hosts, each = request.param
    with Network(hosts) as network:
        one = Training(tmp_path, network.hosts, workers=each, steps=STEPS, values={"layout__shard": 2})
        try:
            one.wait_for_step(8)
            yield network, one
        finally:
            one.close()


OWN = pytest.mark.parametrize("training", [pytest.param((3, 2), id="a replica a host")], indirect=True)
ACROSS = pytest.mark.parametrize("training", [pytest.param((4, 1), id="a replica over two hosts")], indirect=True)


def goes_on(one: Training, before: Generation) -> Generation:
    """The generation after `before`, as soon as it has done a step."""
    back_s = one.wait_until_back(before)
    print(f"back {back_s:.2f} s")
    assert back_s < SOON_S
    return one.log.read(before.number + 1)


def comes_again(one: Training, mend: Callable[[], None], truth: Truth) -> None:
    """Who was lost joins, and the run ends as if nothing had been."""
    now = one.newest
    mend()
    one.wait_until_whole(now)
    one.assert_same_bits(truth)


@OWN
@long
def test_one_of_two_shards_is_killed(training: tuple[Network, Training], truth: Truth) -> None:
    network, one = training
    before, step = one.newest, one.step
    lost, survivor = (one.member(slot, network.hosts[1]) for slot in (1, 0))
    one.kill(lost)
    after = goes_on(one, before)
    print(f"whole {one.wait_until_whole(before):.2f} s later")
    assert after.step >= step
    assert survivor not in after.members and len(after.members) == 4, "what is left of a replica cannot train: it comes again"
    one.assert_same_bits(truth)


@OWN
@pytest.mark.parametrize("number", [pytest.param(1, id="a host"), pytest.param(0, id="the host that leads", marks=long)])
def test_a_replica_loses_its_power(training: tuple[Network, Training], truth: Truth, number: int) -> None:
    network, one = training
    before, step, lost = one.newest, one.step, network.hosts[number]
    one.kill_host(lost)
    after = goes_on(one, before)
    assert after.step >= step and {member.host for member in after.members} == {"a", "b", "c"} - {lost.name}
    comes_again(one, lambda: one.start_agent(lost), truth)


@OWN
@long
def test_a_replica_is_cut_off_and_comes_back(training: tuple[Network, Training], truth: Truth) -> None:
    network, one = training
    before = one.newest
    network.disconnect(network.hosts[1])
    goes_on(one, before)
    assert {member.host for member in one.newest.members} == {"a", "c"}
    time.sleep(1)
    comes_again(one, lambda: network.reconnect(network.hosts[1]), truth)


@ACROSS
@long
def test_half_of_a_replica_loses_its_power(training: tuple[Network, Training], truth: Truth) -> None:
    network, one = training
    before, step = one.newest, one.step
    place = [member.host for member in before.members].index("b")
    partner = before.members[place ^ 1]
    one.kill_host(network.hosts[1])
    after = goes_on(one, before)
    assert after.step >= step and len(after.members) == 2 and partner not in after.members
    comes_again(one, lambda: one.start_agent(network.hosts[1]), truth)
