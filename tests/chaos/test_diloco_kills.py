"""DiLoCo through failures: the learners of a dead worker are computed elsewhere, with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.hosts import Host, Network, Training, undisturbed

VALUES: dict[str, object] = {"diloco__learners": 4, "diloco__every": 10, "optim__decay_steps": 60}
SHARDS = {"layout__shard": 2}


def in_middle(training: Training, host: Host) -> bool:
    """Return whether a worker of `host` computes a learner, after its first steps."""
    status = training.doing(0, host)
    return (
        status.phase in ("forward", "backward")
        and status.step > 20
        and status.step % 10 in (4, 5, 6, 7)
    )


@pytest.mark.long
def test_worker_killed_within_an_outer_step(start_training: Callable[..., Training]) -> None:
    training = start_training(workers=3, steps=60, values=VALUES)
    training.wait_for_step(20)
    training.inject_fault(1, "kill", at="forward", step=35)
    (training.folder / "alone").mkdir()
    training.assert_same_bits(undisturbed(training.folder / "alone", 60, **VALUES))
    (fault,) = training.injected_faults()
    assert fault[0] == "forward" and fault[1] % 10 not in (0, 1)


@pytest.mark.long
def test_shard_killed_within_an_outer_step_joins_again(
    start_training: Callable[..., Training],
) -> None:
    values = VALUES | {"optim__decay_steps": 200}
    training = start_training(workers=4, steps=200, values=values | SHARDS)
    training.wait_for_step(20)
    before = training.newest
    training.inject_fault(3, "kill", at="forward", step=35)
    training.wait_until_back(before, 2)
    halved = next(record for record in training.generations if len(record.members) == 2)
    assert halved.step >= 20, "no committed step is lost"
    training.wait_until_whole(before)
    (training.folder / "alone").mkdir()
    training.assert_same_bits(undisturbed(training.folder / "alone", 200, **values))
    (fault,) = training.injected_faults()
    assert fault[0] == "forward" and fault[1] % 10 not in (0, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [pytest.param({}, id="replicas"), pytest.param(SHARDS, id="a replica on each host")]
)
def test_host_lost_in_the_middle_of_an_outer_step(
    start_training: Callable[..., Training], why_no_network: str, layout: dict[str, object]
) -> None:
    if why_no_network:
        pytest.skip(why_no_network)
    with Network(2) as network:
        training = start_training(network.hosts, workers=2, steps=60, values=VALUES | layout)
        lost = network.hosts[1]
        training.wait(
            lambda: training.step >= 20 and in_middle(training, lost),
            what="a learner in the middle of an outer step",
        )
        before, step = training.newest, training.step
        training.kill_host(lost)
        training.wait_until_back(before)
        assert training.newest.step >= step, "no committed step is lost"
        assert {member.host for member in training.newest.members} == {"a"}
        training.start_agent(lost)
        (training.folder / "alone").mkdir()
        training.assert_same_bits(undisturbed(training.folder / "alone", 60, **VALUES))
