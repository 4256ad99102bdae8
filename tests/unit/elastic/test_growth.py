"""The work of the membership protocol, counted, grows with the number of members and no faster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from support.many_members import ManyMembers

from lockstep.elastic.protocol.effects import Effect, Propose, Send


def count_calls(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return (the result of a function, the number of calls of Python and C functions in it)."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        return function(), calls
    finally:
        sys.setprofile(None)


def proposal_after_a_loss(cluster: ManyMembers) -> list[Effect]:
    """One worker exits, all others report, and the coordinator proposes the next generation."""
    lost, protocol = cluster.members[len(cluster.members) // 2], cluster.protocol
    effects = [*cluster.lose(lost), *cluster.leave()]
    for id, message in cluster.reports(lost):
        effects += protocol.on_message(id, message, cluster.now_s)
    effects += protocol.advance(cluster.now_s)
    cluster.adopt(effects)
    return effects


def test_work_of_a_start_and_a_loss_is_linear_in_the_members() -> None:
    work: dict[str, list[int]] = {"start": [], "heartbeat": [], "loss": []}
    for members in (128, 512):
        cluster = ManyMembers(members)
        _, calls = count_calls(cluster.start)
        work["start"].append(calls)
        beats, calls = count_calls(cluster.beat)
        assert len([effect for effect in beats if isinstance(effect, Send)]) == members - 1
        work["heartbeat"].append(calls)
        effects, calls = count_calls(lambda cluster=cluster: proposal_after_a_loss(cluster))
        work["loss"].append(calls)
        (proposal,) = [effect.generation for effect in effects if isinstance(effect, Propose)]
        assert len(proposal.members) == members - 1
        assert len([effect for effect in effects if isinstance(effect, Send)]) == members - 2, "each member hears of the loss once"
    for name, (few, many) in work.items():
        assert many <= 4.4 * few, f"{name}: {few} calls for 128 members, {many} for 512"
