"""One real coordinator of many members, driven through a start and a loss without sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.elastic.generation_log import NO_GENERATION, Generation, Member
from lockstep.elastic.protocol.decisions import ElasticLimits, LeaveReport
from lockstep.elastic.protocol.state import Effect, Propose
from lockstep.elastic.protocol.transitions import Protocol

WORKERS_PER_HOST = 8


def make_member(index: int) -> Member:
    host, slot = f"h{index // WORKERS_PER_HOST:04d}", index % WORKERS_PER_HOST
    address = f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}:{5000 + slot}"
    return Member(f"{host}/{slot}/{index:08x}", host, slot, 1000 + index, address)


class ManyMembers:
    """`protocol` is worker 0, the coordinator. Each method is one turn of its membership thread."""

    def __init__(self, count: int) -> None:
        self.members = [make_member(index) for index in range(count)]
        self.protocol = Protocol(
            self.members[0], ElasticLimits(expected_workers=count), lambda: "token", 0.0
        )
        self.now_s = 1.0

    def start(self) -> Generation:
        """All workers ask worker 0 to start; it proposes generation 1 and adopts it."""
        protocol, now_s = self.protocol, self.now_s
        protocol.request_join(now_s, {})
        protocol.on_log_read(NO_GENERATION, [], now_s)
        for member in self.members[1:]:
            protocol.on_link_up(member.id, now_s)
            request = {
                "kind": "join",
                "number": 0,
                "member": vars(member),
                "fingerprint": {},
                "reaches": [],
            }
            protocol.on_message(member.id, request, now_s)
        return self.adopt(protocol.advance(now_s))

    def adopt(self, effects: Sequence[Effect]) -> Generation:
        """The proposal of these effects wins."""
        (generation,) = [effect.generation for effect in effects if isinstance(effect, Propose)]
        self.protocol.on_proposed(generation, self.now_s)
        self.protocol.advance(self.now_s)
        self.members = list(generation.members)
        return generation

    def beat(self) -> list[Effect]:
        """Each member sends a heartbeat, and a heartbeat of the coordinator is due."""
        self.now_s += 0.5
        for member in self.members[1:]:
            self.protocol.on_message(member.id, {"kind": "heartbeat"}, self.now_s)
        return [*self.protocol.tick(self.now_s), *self.protocol.advance(self.now_s)]

    def lose(self, member: Member) -> list[Effect]:
        """The process of a member exits: its link breaks, and a new connection is refused."""
        effects = self.protocol.on_link_down(member.id, self.now_s)
        self.protocol.on_connect_failed(member.id, True, self.now_s)
        return [*effects, *self.protocol.advance(self.now_s)]

    def leave(self) -> list[Effect]:
        """The coordinator leaves the generation."""
        self.protocol.on_group_left(LeaveReport(self.protocol.number, 7, why="lost"), self.now_s)
        return self.protocol.advance(self.now_s)

    def reports(self, lost: Member) -> list[tuple[str, dict[str, Any]]]:
        """Return the messages that the other members send after a loss."""
        known = {
            "number": self.protocol.number,
            "why": "lost",
            "dead": {lost.id: "exited"},
            "partition_suspected": False,
        }
        left = {"kind": "left", "step": 7, "leaving": False, "lost": [], **known}
        senders = [member.id for member in self.members[1:] if member != lost]
        return [(id, message) for message in ({"kind": "ended", **known}, left) for id in senders]
