"""Hosts without a shared disk train one run, lose hosts and gain others, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hosts import SWITCH, Network, Truth, enter
from support.object_store import s3_server
from support.stored_hosts import RUN, StoredTraining

STEPS = 160


@pytest.fixture
def training(network: Network, tmp_path: Path) -> Iterator[StoredTraining]:
    """Three hosts, and a store that all of them reach."""
    with s3_server(SWITCH, enter(network.switch)) as server:
        training = StoredTraining(tmp_path, network.hosts, server, STEPS)
        yield training
        training.close()


def test_the_host_of_rank_0_is_lost_and_replaced(training: StoredTraining, reference: Callable[[int], Truth]) -> None:
    a, b, c = training.hosts
    for host in training.hosts:
        training.start(host)
    training.wait(lambda: training.step(a) >= 15, "step 15")
    first = training.newest(a)
    assert [member.host for member in first.members] == ["a", "b", "c"]
    training.lose(a)
    training.wait(lambda: training.newest(b).number > first.number and training.step(b) > 16, "a step without the first host")
    training.start(a)  # a new host, with an empty disk
    training.wait(lambda: {member.host for member in training.newest(b).members} == {"a", "b", "c"}, "the join of a new host")
    joined = training.newest(b)
    training.lose(c)
    assert joined.members[0].host == "b"
    assert set(training.end().values()) == {0}, training.report()
    truth = reference(STEPS)
    assert training.steps_of(b) == truth.steps, training.report()
    assert training.run(b, "checkpoint", "digest", RUN).strip() == truth.digest
